"""Tables of results, paper beside ours, as Markdown or HTML."""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from svb_jax.experiments.comparison import FEWEST_SEEDS, Paired, paired, seeds_needed, spread
from svb_jax.experiments.experiment import Experiment, Metric, PriorArt
from svb_jax.experiments.record import Record, Runs


@dataclass(frozen=True)
class Table:
    """A heading and rows of text; ``**bold**`` and a code span in backticks are understood.

    Example:
      >>> print(Table(["method", "error"], [["sgd", "**6.10**"]]).to_markdown())
      | method | error |
      |---|---:|
      | sgd | **6.10** |
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """The table in Markdown, all columns but the first to the right."""
        lines = [self.header, *self.rows]
        text = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([text[0], "|---" + "|---:" * (len(self.header) - 1) + "|", *text[1:]])

    def to_html(self) -> str:
        """The table in HTML, in a box that scrolls sideways where the screen is narrow."""
        head = "".join(f"<th>{inline_html(cell)}</th>" for cell in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td>{inline_html(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def inline_html(text: str) -> str:
    """Escape text for HTML, and turn its bold and code spans into elements.

    Example:
      >>> inline_html("**a** < `b`")
      '<strong>a</strong> &lt; <code>b</code>'
    """
    escaped = html.escape(text, quote=False)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escaped))


def results_table(experiment: Experiment[Any], runs: Runs) -> Table:
    """The rows that were run, the paper's number beside ours.

    Bold are those that are better than their baseline by a paired interval that excludes zero. Intervals take
    three seeds: two may agree by chance.
    """
    metric = experiment.metric
    header = [
        "row",
        *(["paper"] if experiment.paper else []),
        f"{metric.label}{metric.unit}",
        "95 % interval",
    ]
    header += ["difference, paired", "best run", *experiment.columns, "runs"]
    header += ["quickest run (x baseline)"] if _shows_times(experiment, runs) else []
    return Table(header, [_result_row(experiment, runs, row) for row in runs])


def prior_art_table(prior_art: Sequence[PriorArt]) -> Table:
    """What the paper quotes from others, as it prints it."""

    def shown(value: float | int | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            row.method,
            shown(row.cifar10, ".2f"),
            shown(row.cifar100, ".2f"),
            shown(row.layers, ",d"),
            row.parameters or "-",
        ]
        for row in prior_art
    ]
    return Table(["quoted by the paper", "CIFAR-10", "CIFAR-100", "layers", "parameters"], rows)


def compare(experiment: Experiment[Any], runs: Runs, row: str) -> Paired | None:
    """A row against its baseline by seeds, if both were run and neither has diverged."""
    baseline = experiment.baseline(row)
    if baseline is None or not runs.get(baseline):
        return None
    if experiment.metric.num_diverged([*runs[row], *runs[baseline]]):
        return None
    key = experiment.metric.key
    values, base = ({run.seed: run.result[key] for run in runs[name]} for name in (row, baseline))
    return paired(values, base)


def open_questions(experiment: Experiment[Any], runs: Runs) -> str:
    """Which rows' differences are still undecided, and how many seeds would decide them; empty if none is."""
    metric = experiment.metric
    compared = {row: found for row in runs if (found := compare(experiment, runs, row)) is not None}
    few = [row for row, found in compared.items() if found.n < FEWEST_SEEDS]
    undecided = [row for row in compared if row not in few and not compared[row].is_decided]
    sentences = []
    if undecided:
        sentences.append(f"Undecided, as their intervals include zero: {_listed(undecided)}.")
    if undecided and metric.resolution is not None:
        needed = [
            f"`{row}` about {seeds_needed(compared[row].std, metric.resolution)} "
            f"({metric.show(compared[row].std)} over {compared[row].n} seeds)"
            for row in undecided
        ]
        sentences.append(
            f"Seeds that an interval of ± {metric.resolution:g}{metric.difference_unit} would take, by the "
            f"standard deviation of the paired differences so far: {', '.join(needed)}."
        )
    if few:
        sentences.append(f"Too few seeds for an interval that says anything: {_listed(few)}.")
    return " ".join(sentences)


def provenance(records: Sequence[Record]) -> str:
    """The machines and commits that a set of runs comes from."""
    hardware = sorted({str(record.result.get("hardware")) for record in records})
    # A run of the installed package has no commit.
    commits = sorted({str(commit)[:10] for record in records if (commit := record.result.get("commit"))})
    versions = sorted({str(record.result.get("jax")) for record in records})
    made_by = f"{' and '.join(hardware)}; jax {', '.join(versions)}"
    return f"{made_by}; commit {', '.join(commits)}" if commits else made_by


def _listed(rows: Sequence[str]) -> str:
    return ", ".join(f"`{row}`" for row in rows)


def _result_row(experiment: Experiment[Any], runs: Runs, row: str) -> list[str]:
    records, metric = runs[row], experiment.metric
    comparison = compare(experiment, runs, row)
    return [
        f"`{row}`",
        *([str(experiment.paper[row]) if row in experiment.paper else "-"] if experiment.paper else []),
        *_summary(metric, records, is_better=comparison is not None and _is_better(comparison)),
        _comparison(metric, comparison),
        metric.show(min(_values(metric, records), default=None)),
        *(_mean_of(experiment, records, key) for key in experiment.columns.values()),
        str(len(records)),
        *([_time(experiment, runs, row)] if _shows_times(experiment, runs) else []),
    ]


def _is_better(comparison: Paired) -> bool:
    return comparison.n >= FEWEST_SEEDS and comparison.high < 0


def _summary(metric: Metric, records: Sequence[Record], is_better: bool) -> tuple[str, str]:
    """The mean and its interval; neither where a run has diverged: the others alone would flatter a row."""
    diverged = metric.num_diverged(records)
    if diverged:
        return f"diverged ({diverged} of {len(records)})", "-"
    summary = spread(_values(metric, records))
    mean = metric.show(summary.mean)
    ours = mean if math.isnan(summary.std) else f"{mean} ± {metric.show(summary.std)}"
    interval = (
        "-" if summary.n < FEWEST_SEEDS else f"{metric.show(summary.low)} to {metric.show(summary.high)}"
    )
    return f"**{ours}**" if is_better else ours, interval


def _values(metric: Metric, records: Sequence[Record]) -> list[float]:
    """What the runs that did not diverge ended with."""
    values = [record.result[metric.key] for record in records]
    return [value for value in values if not metric.has_diverged(value)]


def _comparison(metric: Metric, comparison: Paired | None) -> str:
    if comparison is None:
        return "-"
    text = metric.show_difference(comparison.mean)
    if comparison.n >= FEWEST_SEEDS:
        text += f" ({metric.show_difference(comparison.low)} to {metric.show_difference(comparison.high)})"
    return f"{text}; {comparison.wins} of {comparison.n} better"


def _mean_of(experiment: Experiment[Any], records: Sequence[Record], key: str) -> str:
    values = [record.result[key] for record in records if record.result.get(key) is not None]
    return experiment.metric.show(spread(values).mean) if values else "-"


def _shows_times(experiment: Experiment[Any], runs: Runs) -> bool:
    """Return whether times say what bounding costs; those of a smoke test are the compiler's."""
    return experiment.shows_times and all(
        run.scale != "smoke" for records in runs.values() for run in records
    )


def _time(experiment: Experiment[Any], runs: Runs, row: str) -> str:
    """The wall time of the quickest run, and its ratio to the baseline's: what bounding costs.

    Whatever else a machine did meanwhile only adds to a run's time, so that the quickest says most.
    """
    seconds = _quickest(runs[row])
    text = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    baseline = experiment.baseline(row)
    if baseline is None or not runs.get(baseline):
        return text
    return f"{text} ({seconds / _quickest(runs[baseline]):.2f} x)"


def _quickest(records: Sequence[Record]) -> float:
    return min(record.result["seconds"] for record in records)
