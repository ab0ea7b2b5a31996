"""The figures of a report: validation curves, histograms of singular values, their range over training."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from svb_jax._src.figures import COLOURS, INK, STYLE, legend, log_scale, new_figure
from svb_jax.experiments.experiment import Experiment, Metric
from svb_jax.experiments.record import BIN_WIDTH, Histogram, Record, Runs, fine_bin, merge

DASHES = ((5, 1, 1, 1, 1, 1), (8, 2), (8, 2, 2, 2), (1, 3))
LINE_STYLES = ("-", "--", "-.", ":", *((0, dashes) for dashes in DASHES))
LEAST_SHARE = 5e-4
"""Where the vertical axis of a histogram begins."""
SHOWN_WHOLE = 4
"""Up to how many epochs of a training are all shown."""
BIN_RATIO = 1.12
"""By how much a histogram's bins grow."""
LAYER_GROUPS = ("lower layers", "middle layers", "higher layers")


def curves(experiment: Experiment[Any], runs: Runs) -> Figure:
    """The mean of the seeds after each epoch, shaded from best to worst; the axis fits the second half."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(-(-len(panels) // 3), min(3, len(panels)), sharex=True)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for row, look in looks(experiment, rows):
            label = f"{row} (diverged)" if experiment.metric.num_diverged(runs[row]) else row
            draw_range(axes, [record.curve(experiment.metric.key) for record in runs[row]], label, look)
        unit = experiment.metric.unit.strip()
        axes.set(title=title, ylabel=experiment.metric.label + (f" ({unit})" if unit else ""))
        label_epochs(axes)
        show_second_half(axes, experiment.metric, [run for row in rows for run in runs[row]])
        name_lines_below(axes)
    hide_unused(grid, len(panels))
    return figure


def spectra(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Histograms of the singular values after training, all seeds together."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(len(panels), len(LAYER_GROUPS), height=2.6)
    for line, (title, rows) in zip(grid, panels.items(), strict=True):
        for number, axes in enumerate(line):
            axes.axvline(1, color=INK, linewidth=1, linestyle=":", label="before training: all 1")
            draw_bands(axes.axvspan, experiment, rows)
            histograms = {row: layer_group(runs[row], number) for row in rows}
            bands = [band for row in rows if (band := experiment.band(row)) is not None]
            draw_histograms(axes, histograms, dict(looks(experiment, rows)), bands)
            axes.set(xlabel="singular value")
        line[0].set_ylabel("\n".join(filter(None, [title, "share of values"])))
        legend(line[-1], loc="upper left", bbox_to_anchor=(1, 1))
    for axes, title in zip(grid[0], LAYER_GROUPS, strict=True):
        axes.set_title(title)
    return figure


def sigma_range(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Smallest and largest singular value after each epoch, before projection; dots if none was logged."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(-(-len(panels) // 3), min(3, len(panels)), sharex=True)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for row, look in looks(experiment, rows):
            for end, label in (("min", row), ("max", None)):
                found = [sigma_curve(record, end) for record in runs[row]]
                # The two ends of a training say nothing about the way between them.
                is_way = len(found[0][0]) > 2
                draw_range(axes, found, label, look if is_way else ends_only(look))
        axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        draw_bands(axes.axhspan, experiment, rows)
        axes.set(title=title, ylabel="singular value")
        label_epochs(axes)
        log_scale(axes)
        name_lines_below(axes)
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
    """The colour of each row's method, a line style for rows that share it, and a width."""
    styles = {method: cycle(LINE_STYLES) for method in map(experiment.method, rows)}
    # Narrower from row to row, so that a line shows under another that runs over it.
    for row, width in zip(rows, np.linspace(3.0, 1.2, len(rows)), strict=True):
        method = experiment.method(row)
        colour = COLOURS[experiment.colours.get(method, "black")]
        yield row, {"color": colour, "linestyle": next(styles[method]), "linewidth": width}


def ends_only(look: dict[str, Any]) -> dict[str, Any]:
    """The same look for points that no line should join."""
    return look | {"linestyle": "none", "marker": "o", "markersize": 5}


def name_lines_below(axes: Axes) -> None:
    """Name the lines under the axes, where the names hide none of them."""
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3)


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
    if len(curves) > 1 and "marker" not in look:
        axes.fill_between(
            epochs, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.12, lw=0
        )


def draw_bands(span: Callable[..., Any], experiment: Experiment[Any], rows: Sequence[str]) -> None:
    """Shade the interval that SVB keeps singular values in, once for each ε of the rows.

    Args:
      span: ``axvspan`` or ``axhspan`` of the axes.
      experiment: Has the rows' bands.
      rows: Those that are drawn.
    """
    bands = sorted(
        {band for row in rows if (band := experiment.band(row)) is not None}, key=lambda band: band[1]
    )
    label = "band, ε = " + ", ".join(f"{high - 1:g}" for _, high in bands)
    for number, (low, high) in enumerate(bands):
        # A band without width is one line, which the edges draw.
        span(
            low,
            high,
            facecolor=(*to_rgb(INK), 0.08),
            edgecolor=(*to_rgb(INK), 0.35),
            lw=0.8,
            zorder=0,
            label=label if number == 0 else None,
        )


def label_epochs(axes: Axes) -> None:
    """Label the horizontal axis with whole epochs."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def show_second_half(axes: Axes, metric: Metric, records: Sequence[Record]) -> None:
    """Let the vertical axis end where the second half of training does: the first epochs would flatten it.

    So would runs that diverged, which leave it at the top. A few epochs are shown whole.
    """
    late = [
        value
        for record in records
        for epoch, value in zip(*record.curve(metric.key), strict=True)
        if (epoch > record.metrics[-1]["epoch"] / 2 or record.metrics[-1]["epoch"] <= SHOWN_WHOLE)
        and not metric.has_diverged(value)
    ]
    if late:
        low, high = min(late), max(late)
        margin = 0.08 * (high - low) or 0.05 * abs(high)
        axes.set_ylim(low - margin, high + margin)


def draw_histograms(
    axes: Axes,
    histograms: Mapping[str, Histogram],
    looks: Mapping[str, dict[str, Any]],
    bands: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw histograms as stairs in common bins of equal width on a logarithmic axis.

    No stair crosses the end of a band, and each histogram ends where its own values do: a wide bin would show
    them farther from the band than they are. Those without any finite value are left out.
    """
    histograms = {label: histogram for label, histogram in histograms.items() if histogram}
    if not histograms:
        return
    numbers = {label: np.array(list(map(int, histogram))) for label, histogram in histograms.items()}
    low, high = min(bins.min() for bins in numbers.values()), max(bins.max() for bins in numbers.values())
    # A value at the upper end is in the fine bin that begins there.
    ends = [int(end) for below, above in bands for end in (fine_bin(below), fine_bin(above) + 1)]
    starts = with_edges(log_bins(low, high + 1), ends)
    for label, histogram in histograms.items():
        own = np.unique(np.clip(starts, numbers[label].min(), numbers[label].max() + 1))
        places = np.searchsorted(own, numbers[label], side="right") - 1
        counts = np.bincount(places, weights=list(histogram.values()), minlength=len(own) - 1)
        # On a logarithmic axis the first bin, which begins at zero, is as wide as the second.
        edges = np.maximum(own, 0.5) * BIN_WIDTH
        axes.stairs(counts / counts.sum(), edges, label=label, **looks[label])
    log_scale(axes, "x")
    # One tall bar at one must not hide the values far from it, which are few.
    axes.set_ylim(LEAST_SHARE, 1)
    log_scale(axes, ticks=(1,))
    # Three panels stand side by side: two numbers a decade have room in two decades and a half.
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if right < 300 * left else (1,), numticks=12))


def log_bins(low: int, end: int, ratio: float = BIN_RATIO) -> np.ndarray:
    """The first fine bin of each wide one, from the one that holds ``low``; the last is not before ``end``.

    Wide bins grow by the ratio where the fine ones allow it.

    Example:
      >>> log_bins(0, 20, ratio=2.0).tolist(), log_bins(5, 20, ratio=2.0).tolist()
      ([0, 1, 2, 4, 8, 16, 32], [4, 8, 16, 32])
    """
    count = math.ceil(math.log(end, ratio)) + 1
    starts = np.unique([0, *np.round(ratio ** np.arange(count)).astype(int)])
    return starts[np.searchsorted(starts, low, side="right") - 1 :]


def with_edges(starts: np.ndarray, edges: Sequence[int], ratio: float = BIN_RATIO) -> np.ndarray:
    """Put edges in the place of those that are near them: an edge too many would leave a bin too narrow.

    Example:
      >>> with_edges(np.array([1, 2, 4, 8, 16]), [9], ratio=2.0).tolist()
      [1, 2, 4, 9, 16]
    """
    nearness = [np.abs(np.log(np.maximum(starts, 0.5) / edge)) < math.log(ratio) / 2 for edge in edges]
    return np.union1d(starts[~np.any(nearness, axis=0)], edges) if edges else starts


def layer_group(records: Sequence[Record], number: int) -> Histogram:
    """The final singular values of the first, second or last third of the layers, over all seeds."""
    layers = [list(record.spectra["final"].values()) for record in records]
    ends = [round(len(layers[0]) * third / 3) for third in range(4)]
    return merge(histogram for run in layers for histogram in run[ends[number] : ends[number + 1]])


def sigma_curve(record: Record, end: str) -> tuple[list[float], list[float]]:
    """Epochs and the ``min`` or ``max`` singular value of all; first and last where none was logged."""
    projected = dict(zip(*record.curve(f"svb/sigma_{end}"), strict=True))
    # In an epoch without a projection the statistics are still those of the one before.
    found = projected | dict(zip(*record.curve(f"sigma_{end}"), strict=True))
    found = found or {record.metrics[-1]["epoch"]: _histogram_end(record, "final", end)}
    return [0, *found], [_histogram_end(record, "initial", end), *found.values()]


def _histogram_end(record: Record, moment: str, end: str) -> float:
    """The middle of the lowest or the highest bin of all layers."""
    choose = {"min": min, "max": max}[end]
    numbers = [int(key) for histogram in record.spectra[moment].values() for key in histogram]
    return (choose(numbers, default=math.nan) + 0.5) * BIN_WIDTH


def hide_unused(grid: np.ndarray, used: int) -> None:
    """Take away the axes that no panel was left for."""
    for axes in grid.flat[used:]:
        axes.set_visible(False)


def to_svg(figure: Figure) -> str:
    """The figure as inline SVG whose ink follows the colour of the page's text, on light and on dark."""
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
