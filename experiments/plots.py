"""The figures of a report: validation curves, histograms of singular values, their range over training."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.experiment import Experiment
from experiments.record import BIN_WIDTH, Histogram, Record, Runs, merge

# Stands for the colour of the page's text: black on paper, light on a dark screen.
INK = "#0b0c0e"
COLOURS = {"red": "#e0433f", "blue": "#3d7fe0", "black": INK}
TABLE_COLOURS = {"sgd": "blue", "svb": "red", "svb+bbn": "black"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
LAYER_GROUPS = ("lower layers", "middle layers", "higher layers")


def curves(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Test error after each epoch: the mean of the seeds, and the band from the best to the worst."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(-(-len(panels) // 3), min(3, len(panels)), sharex=True)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for row, look in looks(experiment, rows):
            draw_range(axes, [record.curve(experiment.metric.key) for record in runs[row]], row, look)
        axes.set(title=title, xlabel="epoch", ylabel=f"{experiment.metric.label}{experiment.metric.unit}")
        legend(axes)
    hide_unused(grid, len(panels))
    return figure


def spectra(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Histograms of the singular values after training, all seeds together."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(len(panels), len(LAYER_GROUPS), height=2.6)
    for line, (title, rows) in zip(grid, panels.items(), strict=True):
        for number, axes in enumerate(line):
            axes.axvline(1, color=INK, linewidth=1, linestyle=":", label="before training: all 1")
            draw_histograms(
                axes, {row: layer_group(runs[row], number) for row in rows}, dict(looks(experiment, rows))
            )
            axes.set(xlabel="singular value")
        line[0].set_ylabel("\n".join(filter(None, [title, "share of values"])))
        legend(line[-1])
    for axes, title in zip(grid[0], LAYER_GROUPS, strict=True):
        axes.set_title(title)
    return figure


def sigma_range(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Smallest and largest singular value of all layers, before each projection; SGD: first and last."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(-(-len(panels) // 3), min(3, len(panels)), sharex=True)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for row, look in looks(experiment, rows):
            for end, label in (("min", row), ("max", None)):
                draw_range(axes, [sigma_curve(record, end) for record in runs[row]], label, look)
        axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        axes.set(title=title, xlabel="epoch", ylabel="singular value")
        log_scale(axes)
        legend(axes)
    hide_unused(grid, len(panels))
    return figure


STANDARD_FIGURES = (curves, spectra, sigma_range)


def drawn_panels(experiment: Experiment[Any], runs: Runs) -> dict[str, list[str]]:
    """The panels that have runs to show beside those of their baseline."""
    panels = experiment.panels or {"": list(experiment.rows)}
    present = {title: [row for row in rows if runs.get(row)] for title, rows in panels.items()}
    informative = {
        title: rows
        for title, rows in present.items()
        if any(experiment.method(row) == experiment.method(panels[title][-1]) for row in rows)
    }
    return informative or {"": [row for row in experiment.rows if runs.get(row)]}


def looks(experiment: Experiment[Any], rows: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The colour of each row's method, as the paper has it, and a line style for rows that share it."""
    styles = {method: cycle(LINE_STYLES) for method in map(experiment.method, rows)}
    for row in rows:
        method = experiment.method(row)
        colour = COLOURS[experiment.colours.get(method, "black")]
        yield row, {"color": colour, "linestyle": next(styles[method])}


def new_figure(rows: int, columns: int, height: float = 3.4, **subplots: Any) -> tuple[Figure, np.ndarray]:
    """An empty figure in the report's style, as wide as the page."""
    with matplotlib.rc_context(STYLE):
        width = 10.5 if columns > 1 else 7.0
        figure = Figure(figsize=(width, height * rows), layout="constrained", facecolor="none")
        grid = figure.subplots(rows, columns, squeeze=False, **subplots)
        for axes in grid.flat:
            axes.set_facecolor("none")
    return figure, grid


def draw_range(
    axes: Axes, curves: Sequence[tuple[list[float], list[float]]], label: str | None, look: dict[str, Any]
) -> None:
    """Draw the mean of several curves and the band that holds them all."""
    length = min(len(values) for _, values in curves)
    if not length:
        return
    epochs = curves[0][0][:length]
    values = np.array([values[:length] for _, values in curves])
    axes.plot(epochs, values.mean(axis=0), label=label, **look)
    if len(curves) > 1:
        axes.fill_between(
            epochs, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.12, lw=0
        )


def draw_histograms(
    axes: Axes, histograms: Mapping[str, Histogram], looks: Mapping[str, dict[str, Any]]
) -> None:
    """Draw histograms as stairs, in common bins that are wide enough for the range of them all."""
    numbers = {label: np.array(list(map(int, histogram))) for label, histogram in histograms.items()}
    low, high = min(bins.min() for bins in numbers.values()), max(bins.max() for bins in numbers.values())
    merged = max(1, round((high - low) / 45))
    edges = (low // merged + np.arange(high // merged - low // merged + 2)) * merged * BIN_WIDTH
    for label, histogram in histograms.items():
        places = numbers[label] // merged - low // merged
        counts = np.bincount(places, weights=list(histogram.values()), minlength=len(edges) - 1)
        axes.stairs(counts / counts.sum(), edges, label=label, linewidth=1.6, **looks[label])


def legend(axes: Axes) -> None:
    """Name the lines, without a box around the names."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers: 0.5 and not 5 times a power of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def layer_group(records: Sequence[Record], number: int) -> Histogram:
    """The final singular values of the first, second or last third of the layers, over all seeds."""
    layers = [list(record.spectra["final"].values()) for record in records]
    ends = [round(len(layers[0]) * third / 3) for third in range(4)]
    return merge(histogram for run in layers for histogram in run[ends[number] : ends[number + 1]])


def sigma_curve(record: Record, end: str) -> tuple[list[float], list[float]]:
    """Epochs and the ``min`` or ``max`` singular value of all; first and last where none was logged."""
    epochs, values = record.curve(f"svb/sigma_{end}")
    if epochs:
        return epochs, values
    choose = {"min": min, "max": max}[end]
    edges = [
        (choose(int(key) for histogram in layers.values() for key in histogram) + 0.5) * BIN_WIDTH
        for layers in (record.spectra["initial"], record.spectra["final"])
    ]
    return [0, record.metrics[-1]["epoch"]], edges


def hide_unused(grid: np.ndarray, used: int) -> None:
    """Take away the axes that no panel was left for."""
    for axes in grid.flat[used:]:
        axes.set_visible(False)


def to_svg(figure: Figure) -> str:
    """The figure as inline SVG whose black follows the colour of the page's text."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as a picture on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=130, facecolor="white")
