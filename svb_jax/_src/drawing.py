"""Draws spectra with matplotlib."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from svb_jax._src.figures import COLOURS, INK, legend, log_scale, new_figure

GREY = "#9aa0a8"
Band = tuple[float, float]
Values = Mapping[str, np.ndarray]


def layers(now: Values, then: Values, band: Band, kind: Literal["quantiles", "histogram"]) -> Figure:
    """Draw one line per layer, the first on top."""
    figure, grid = new_figure(1, 1, height=1.4 + 0.26 * len(now), width=7.5, background="white")
    axes = grid[0, 0]
    axes.axvspan(*band, **_band_look(band))
    values = [*now.values(), *then.values()]
    is_positive = min(spectrum.min() for spectrum in values) > 0
    if is_positive:
        decades = np.log10(
            max(spectrum.max() for spectrum in values) / min(spectrum.min() for spectrum in values)
        )
        # More numbers where the axis is short, fewer where they would touch.
        log_scale(
            axes, "x", (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,), most=12
        )
    edges = _bin_edges(values, is_positive)
    for spectra, colour, label in ((then, GREY, "before"), (now, COLOURS["red"], "now")):
        for place, spectrum in enumerate(spectra.values()):
            named = label if place == 0 else ""
            if kind == "quantiles":
                _draw_quantiles(
                    axes, place - 0.25 * (bool(then) and label == "before"), spectrum, colour, named
                )
            else:
                _draw_histogram(axes, place, spectrum, edges, colour, named)
    axes.set_yticks(range(len(now)), list(now), fontsize=8, parse_math=False)
    axes.set_ylim(len(now) - 0.4, -1.0)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="singular value")
    legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handles=_legend_handles(axes, kind))
    return figure


def over_time(bounds: Mapping[str, Mapping[int, tuple[float, float, float]]], band: Band | None) -> Figure:
    """Draw the range before each projection above the share that it clipped."""
    figure, grid = new_figure(2, 1, height=2.4, width=7.5, background="white", sharex=True)
    above, below = grid[:, 0]
    if band is not None:
        above.axhspan(*band, **_band_look(band))
    colours = [COLOURS["red"], INK, GREY, COLOURS["blue"]]
    for number, (name, points) in enumerate(bounds.items()):
        steps = sorted(points)
        low, high, share = np.array([points[step] for step in steps]).T.reshape(3, -1)
        look = {"color": colours[number % len(colours)], "marker": "o", "markersize": 3}
        above.plot(steps, high, label=f"{name}: largest", **look)
        above.plot(steps, low, label=f"{name}: smallest", linestyle="--", **look)
        below.plot(steps, share, label=name, **look)
    if all(low > 0 for points in bounds.values() for low, _, _ in points.values()):
        log_scale(above)
    above.set(ylabel="singular values before")
    below.set(ylabel="share clipped", xlabel="step", ylim=(0, None))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(above)
    return figure


def _band_look(band: Band) -> dict[str, Any]:
    # The edges are all there is to see of a band that is a single value.
    blue = COLOURS["blue"]
    label = f"band {band[0]:.3g} to {band[1]:.3g}"
    return {"facecolor": (blue, 0.12), "edgecolor": (blue, 0.5), "linewidth": 0.8, "label": label}


def _legend_handles(axes: Axes, kind: Literal["quantiles", "histogram"]) -> list[Artist]:
    """Return what was drawn under a name, and what the parts of a line mean."""
    named, _ = axes.get_legend_handles_labels()
    if kind == "histogram":
        return named
    dot = {"marker": "o", "markersize": 4, "color": "white", "markeredgecolor": INK}
    return [
        *named,
        Line2D([], [], color=INK, linewidth=1, label="all values"),
        Line2D([], [], color=INK, linewidth=3.5, label="middle 80 %"),
        Line2D([], [], linestyle="none", label="median", **dot),
    ]


def _draw_quantiles(axes: Axes, place: float, spectrum: np.ndarray, colour: str, label: str) -> None:
    low, tenth, median, ninetieth, high = np.quantile(spectrum, (0, 0.1, 0.5, 0.9, 1))
    axes.hlines(place, low, high, color=colour, linewidth=1)
    axes.hlines(place, tenth, ninetieth, color=colour, linewidth=3.5, label=label)
    axes.plot(median, place, "o", markersize=4, color="white", markeredgecolor=colour)


def _draw_histogram(
    axes: Axes, place: int, spectrum: np.ndarray, edges: np.ndarray, colour: str, label: str
) -> None:
    counts, _ = np.histogram(spectrum, edges)
    # Places grow downwards.
    tops = place - 0.85 * counts / counts.max()
    is_behind = colour == GREY
    axes.stairs(
        tops, edges, baseline=place, fill=True, color=colour, alpha=0.35 if is_behind else 0.6, label=label
    )


def _bin_edges(values: list[np.ndarray], is_positive: bool) -> np.ndarray:
    low, high = min(spectrum.min() for spectrum in values), max(spectrum.max() for spectrum in values)
    if is_positive:
        # A matrix whose values are all equal still needs a bin with some width.
        return np.geomspace(low / 1.02, high * 1.02, 49)
    return np.linspace(low - 0.01, high + 0.01, 49)
