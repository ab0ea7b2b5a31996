"""``svb report``: finished runs as one self-contained HTML page and as Markdown tables."""

import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib.figure import Figure

from svb_jax.experiments import catalogue, page, plots, record
from svb_jax.experiments.comparison import FEWEST_SEEDS
from svb_jax.experiments.experiment import RUNS, Experiment
from svb_jax.experiments.program import command, given
from svb_jax.experiments.record import Record, Runs
from svb_jax.experiments.tables import (
    compare,
    inline_html,
    open_questions,
    prior_art_table,
    provenance,
    results_table,
)
from svb_jax.training.durable import write_whole

Draw = Callable[[Experiment[Any], Runs], Figure]

TITLE = "Singular Value Bounding: the paper's experiments"
PAPER_ADDRESS = "https://arxiv.org/abs/1611.06013"
OPENING = (
    "Singular Value Bounding (SVB) keeps the singular values of every weight matrix within a band around "
    "one, from 1 / (1 + ε) to 1 + ε: every so many steps of SGD, values outside are clipped to its ends. "
    "Bounded Batch Normalization (BBN) does the same to the scales of BatchNorm, with a band of its own, ε̃, "
    "around their mean. Both are from the paper ",
    "Improving training of deep neural networks via Singular Value Bounding",
    " (Jia, Tao, Gao and Xu, CVPR 2017).",
)
LEAD = (
    "Each value is the mean over seeds ± the standard deviation, with Student's 95 % interval. Each row is "
    "compared, seed by seed, with the one that lacks its bounds, unless the notes name another; a negative "
    "difference is an improvement. Bold: better, by a paired interval that excludes zero. A row with a "
    "diverged run has no mean. Errors are those after the last step, which no projection follows, as in the "
    "authors' code."
)
SCALED_DOWN = "Scaled down: compare the rows with each other, not with the paper's errors."
SMOKE = "A smoke test: it shows that everything runs, and nothing about the methods."


@dataclass(frozen=True)
class Chapter:
    """The runs of one experiment at one scale."""

    experiment: Experiment[Any]
    scale: str
    runs: Runs

    @property
    def records(self) -> list[Record]:
        """All runs, of whatever row."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def remark(self) -> str:
        """What a reader must know before comparing with the paper."""
        is_paper_sized = self.scale == "full" or not self.experiment.paper
        missing = len(self.experiment.rows) - len(self.runs)
        rows = f"{missing} of {len(self.experiment.rows)} rows not run at this scale." if missing else ""
        size = SMOKE if self.scale == "smoke" else "" if is_paper_sized else SCALED_DOWN
        return " ".join(filter(None, [size, rows]))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write finished runs, with the paper's numbers beside them, as report.html and report.md."""

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="")
    ] = ()
    """Experiments to report; all that have runs if none is given."""
    out: Path = RUNS
    """The folder to write to."""
    runs: Path = RUNS
    """Where `run` kept the runs."""
    results: Path = field(default=record.RESULTS)
    """Where the records of finished runs are kept."""
    figures: Path | None = None
    """Write the figures here too, as PNG."""
    tables: Path | None = None
    """Write the tables to this Markdown file too, with the figures if they are written as well."""
    paper_colours: bool = False
    """Draw each figure in the paper's own colours: its figure 1 has SGD red and SVB blue."""

    def run(self) -> None:
        """Collect, write, and say where."""
        experiments = [catalogue.find(name)[0] for name in self.names] or list(catalogue.EXPERIMENTS.values())
        if self.paper_colours:
            experiments = [replace(found, colours=found.paper_colours) for found in experiments]
        chapters = chapters_of(experiments, record.collect(self.results, self.runs))
        if not chapters:
            asked = f" of {', '.join(self.names)}" if self.names else ""
            example = f"run {(*self.names, 'table1')[0]} --scale smoke"
            raise FileNotFoundError(
                f"report needs finished runs{asked}, got none in {self.results} or {self.runs}. "
                f"Try: {command(example, **given(self, 'runs', 'results'))}"
            )
        for path in write(chapters, self.out):
            print(f"Wrote {path}")
        if self.tables is not None:
            # With slashes on every system, as Markdown wants them.
            figures = self.figures and Path(os.path.relpath(self.figures, self.tables.parent)).as_posix()
            self.tables.write_text(to_markdown(chapters, figures=figures), encoding="utf-8")
            print(f"Wrote {self.tables}")
        if self.figures is not None:
            save_figures(chapters, self.figures)
            print(f"Wrote the figures to {self.figures}")


def chapters_of(experiments: Sequence[Experiment[Any]], records: Sequence[Record]) -> list[Chapter]:
    """Sort records by experiment, scale and row; the experiments' order, scales from full to smoke."""
    return [
        Chapter(experiment, scale, runs)
        for experiment in experiments
        for scale in experiment.scales
        if (runs := _runs(experiment, scale, records))
    ]


def write(chapters: Sequence[Chapter], out: Path, title: str = TITLE) -> list[Path]:
    """Write report.html and report.md to a folder, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    contents = {"report.html": to_html(chapters, title), "report.md": to_markdown(chapters, title)}
    for name, content in contents.items():
        write_whole(out / name, content.encode())
    return [(out / name).absolute() for name in contents]


def to_markdown(chapters: Sequence[Chapter], title: str = TITLE, figures: str | None = None) -> str:
    """The tables and notes, and the figures if the address of their folder is given."""
    before, name, after = OPENING
    parts = [f"# {title}", f"{before}[{name}]({PAPER_ADDRESS}){after}", LEAD]
    for chapter in chapters:
        experiment = chapter.experiment
        parts += [f"## {experiment.name}, {chapter.scale}: {experiment.title}", chapter.remark]
        parts += [results_table(experiment, chapter.runs).to_markdown(), f"{provenance(chapter.records)}."]
        parts.append(open_questions(experiment, chapter.runs))
        if experiment.prior_art:
            parts.append(prior_art_table(experiment.prior_art).to_markdown())
        parts.append("\n".join(f"- {note}" for note in experiment.notes_at(chapter.scale)))
        if figures is not None:
            drawn = [(_caption(draw), _picture(chapter, draw)) for draw in experiment.figures]
            parts += [f"![{caption}]({figures}/{picture})\n\n*{caption}*" for caption, picture in drawn]
    return "\n\n".join(filter(None, parts)) + "\n"


def to_html(chapters: Sequence[Chapter], title: str = TITLE) -> str:
    """The whole report as one page."""
    links = [f'<a href="#{_anchor(chapter)}">{_anchor(chapter)}</a>' for chapter in chapters]
    contents = f"<nav>{''.join(links)}</nav>" if len(links) > 1 else ""
    numbers = "".join(card for chapter in chapters for card in _cards(chapter))
    cards = f'<div class="cards">{numbers}</div>' if numbers else ""
    sections = "\n".join(map(_section, chapters))
    before, name, after = map(html.escape, OPENING)
    opening = f'<p>{before}<a href="{PAPER_ADDRESS}">{name}</a>{after}</p>'
    heading = f'<h1>{html.escape(title)}</h1>{opening}<p class="soft">{LEAD}</p>'
    return page.page(title, f"{heading}{contents}{cards}\n{sections}")


def save_figures(chapters: Sequence[Chapter], folder: Path) -> None:
    """Write every figure as ``<experiment>-<scale>-<what it shows>.png``."""
    for chapter in chapters:
        for draw in chapter.experiment.figures:
            plots.save_png(draw(chapter.experiment, chapter.runs), folder / _picture(chapter, draw))


def _runs(experiment: Experiment[Any], scale: str, records: Sequence[Record]) -> Mapping[str, list[Record]]:
    mine = [entry for entry in records if (entry.experiment, entry.scale) == (experiment.name, scale)]
    for entry in mine:
        known = {experiment.metric.key: "", **entry.result}
        for key in (experiment.metric.key, *experiment.columns.values()):
            if not isinstance(known.get(key), int | float | None):
                raise ValueError(
                    f"report needs {key} in every result of {experiment.name}, got none in "
                    f"{entry.row}, {scale}, seed {entry.seed}."
                )
    by_row = {row: [entry for entry in mine if entry.row == row] for row in experiment.rows}
    return {row: sorted(runs, key=lambda run: run.seed) for row, runs in by_row.items() if runs}


def _anchor(chapter: Chapter) -> str:
    return f"{chapter.experiment.name}-{chapter.scale}"


def _picture(chapter: Chapter, draw: Draw) -> str:
    return f"{_anchor(chapter)}-{draw.__name__.replace('_', '-')}.png"


def _caption(draw: Draw) -> str:
    return (draw.__doc__ or draw.__name__).splitlines()[0]


def _cards(chapter: Chapter) -> Iterator[str]:
    """The largest improvement and the largest harm, of those that enough seeds have decided."""
    experiment = chapter.experiment
    compared = {row: compare(experiment, chapter.runs, row) for row in chapter.runs}
    decided = {
        row: found
        for row, found in compared.items()
        if found and found.n >= FEWEST_SEEDS and found.is_decided
    }
    ordered = sorted(decided, key=lambda row: decided[row].mean)
    # Both ends, lest a sweep be known by its luckiest row.
    ends = [row for row in ordered[:1] if decided[row].mean < 0]
    ends += [row for row in ordered[-1:] if decided[row].mean > 0]
    for row in ends:
        found, metric = decided[row], experiment.metric
        what = f"{metric.label}, {experiment.name}/{row} against {experiment.baseline(row)}, "
        what += f"{chapter.scale} scale, 95 % interval {metric.show_difference(found.low)} to "
        what += f"{metric.show_difference(found.high)}, n = {found.n}"
        yield page.card(metric.show_difference(found.mean) + metric.difference_unit, what)


def _section(chapter: Chapter) -> str:
    experiment = chapter.experiment
    heading = f'<h2 id="{_anchor(chapter)}">{html.escape(experiment.name)}: {html.escape(experiment.title)}'
    parts = [f'{heading}<span class="tag">{chapter.scale} scale</span></h2>']
    parts += [f'<p class="soft">{text}</p>' for text in [chapter.remark] if text]
    parts.append(results_table(experiment, chapter.runs).to_html())
    parts.append(f'<p class="soft">{html.escape(provenance(chapter.records))}.</p>')
    questions = open_questions(experiment, chapter.runs)
    parts.append(f'<p class="soft">{inline_html(questions)}</p>' if questions else "")
    for draw in experiment.figures:
        svg = plots.to_svg(draw(experiment, chapter.runs))
        parts.append(page.figure(svg, _caption(draw)))
    if experiment.prior_art:
        parts.append(prior_art_table(experiment.prior_art).to_html())
    notes = "".join(f"<li>{inline_html(note)}</li>" for note in experiment.notes_at(chapter.scale))
    parts.append(f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "")
    return "<section>" + "\n".join(parts) + "</section>"
