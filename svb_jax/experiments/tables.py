"""Tables of results, paper beside ours, as Markdown or HTML."""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from svb_jax.experiments.comparison import Paired, paired, spread
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
    """The rows that were run, the paper's number beside ours; the lowest mean of each baseline is bold."""
    metric = experiment.metric
    header = [
        "row",
        *(["paper"] if experiment.paper else []),
        f"{metric.label}{metric.unit}",
        "95 % interval",
    ]
    header += ["difference, paired", "best run", *experiment.columns, "runs"]
    header += ["quickest run (x baseline)"] if experiment.shows_times else []
    leaders = _leaders(experiment, runs)
    return Table(header, [_result_row(experiment, runs, row, row in leaders) for row in runs])


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
    """A row against its baseline by seeds, if both were run."""
    baseline = experiment.baseline(row)
    if baseline is None or not runs.get(baseline):
        return None
    key = experiment.metric.key
    values, base = ({run.seed: run.result[key] for run in runs[name]} for name in (row, baseline))
    return paired(values, base)


def provenance(records: Sequence[Record]) -> str:
    """The machines and commits that a set of runs comes from."""
    hardware = sorted({str(record.result.get("hardware")) for record in records})
    # A run of the installed package has no commit.
    commits = sorted({commit[:10] for record in records if (commit := record.result.get("commit"))})
    versions = sorted({str(record.result.get("jax")) for record in records})
    made_by = f"{' and '.join(hardware)}; jax {', '.join(versions)}"
    return f"{made_by}; commit {', '.join(commits)}" if commits else made_by


def _leaders(experiment: Experiment[Any], runs: Runs) -> set[str]:
    """The row with the lowest mean among those that share a baseline."""
    means = {
        row: spread([run.result[experiment.metric.key] for run in records]).mean
        for row, records in runs.items()
    }
    groups: dict[str, list[str]] = {}
    for row in runs:
        groups.setdefault(experiment.baseline(row) or row, []).append(row)
    return {min(group, key=means.__getitem__) for group in groups.values() if len(group) > 1}


def _result_row(experiment: Experiment[Any], runs: Runs, row: str, is_leader: bool) -> list[str]:
    records, metric = runs[row], experiment.metric
    summary = spread([record.result[metric.key] for record in records])
    mean = metric.show(summary.mean)
    ours = mean if math.isnan(summary.std) else f"{mean} ± {metric.show(summary.std)}"
    interval = (
        "-" if math.isnan(summary.low) else f"{metric.show(summary.low)} to {metric.show(summary.high)}"
    )
    return [
        f"`{row}`",
        *([str(experiment.paper[row]) if row in experiment.paper else "-"] if experiment.paper else []),
        f"**{ours}**" if is_leader else ours,
        interval,
        _comparison(experiment.metric, compare(experiment, runs, row)),
        metric.show(summary.best),
        *(_mean_of(experiment, records, key) for key in experiment.columns.values()),
        str(summary.n),
        *([_time(experiment, runs, row)] if experiment.shows_times else []),
    ]


def _comparison(metric: Metric, comparison: Paired | None) -> str:
    if comparison is None:
        return "-"
    text = metric.show_difference(comparison.mean)
    if not math.isnan(comparison.low):
        text += f" ({metric.show_difference(comparison.low)} to {metric.show_difference(comparison.high)})"
    return f"{text}; {comparison.wins} of {comparison.n} better"


def _mean_of(experiment: Experiment[Any], records: Sequence[Record], key: str) -> str:
    values = [record.result[key] for record in records if record.result.get(key) is not None]
    return experiment.metric.show(spread(values).mean) if values else "-"


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
