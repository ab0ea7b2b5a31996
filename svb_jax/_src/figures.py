"""The look of every figure, and the pieces they share. Needs matplotlib."""

import io
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK = "#0b0c0e"
COLOURS = {"red": "#e0433f", "blue": "#3d7fe0", "black": INK}
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


class NotebookFigure(Figure):
    """A figure that a notebook shows by itself, whether or not pyplot was imported there."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()


def new_figure(
    rows: int,
    columns: int,
    height: float = 3.4,
    width: float | None = None,
    background: str = "none",
    **subplots: Any,
) -> tuple[Figure, np.ndarray]:
    """An empty figure in the house style, as wide as a report's page if no width is given."""
    with matplotlib.rc_context(STYLE):
        size = (width or (10.5 if columns > 1 else 7.0), height * rows)
        figure = NotebookFigure(figsize=size, layout="constrained", facecolor=background)
        grid = figure.subplots(rows, columns, squeeze=False, **subplots)
        for axes in grid.flat:
            axes.set_facecolor("none")
    return figure, grid


def legend(axes: Axes, **options: Any) -> None:
    """Name the lines, without a box around the names."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **options)


def log_scale(
    axes: Axes, name: Literal["x", "y"] = "y", ticks: tuple[float, ...] = (1, 2, 5), most: int = 8
) -> None:
    """Make an axis logarithmic, with plain numbers: 0.5 and not 5 times a power of ten.

    Over more than three decades there is room for the powers of ten only.
    """
    set_scale, axis = (axes.set_xscale, axes.xaxis) if name == "x" else (axes.set_yscale, axes.yaxis)
    set_scale("log")
    low, high = axis.get_view_interval()
    ticks = ticks if high < 1e3 * low else (1,)
    axis.set_major_locator(LogLocator(subs=ticks, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
