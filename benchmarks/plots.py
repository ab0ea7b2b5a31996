"""One picture for every measurement: a panel for each section, a point for each row.

An axis begins at zero, so that distances are ratios. Only where the largest figure is many times the smallest
is it logarithmic.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from benchmarks.tables import Section, figure, number

OURS, OTHER = "#2f6fd6", "#8a93a3"
WIDEST_LINEAR = 50
"""By how much the largest figure may exceed the smallest on a linear axis."""
MEANINGS = {"median": "time: median, least to most", "cycles_due": "cycles of a projecting step, estimated"}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.labelcolor": "#5c626d",
    "grid.alpha": 0.25,
}


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write the picture of one command's measurement as ``<command>.png``."""
    shown = [part for part in result["sections"] if _points(part)]
    if not shown:
        return
    # A panel's height in rows: its points, and the title and the labels of its axis.
    heights = [3 + len(_points(part)) for part in shown]
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(8.5, 0.27 * sum(heights)), layout="constrained")
        panels = drawing.subplots(len(shown), 1, squeeze=False, height_ratios=heights)
        for axes, part in zip(panels.flat, shown, strict=True):
            draw_section(axes, part)
        drawing.savefig(folder / f"{result['command']}.png", dpi=100, facecolor="white")


def draw_section(axes: Axes, part: Section) -> None:
    """Draw a section's rows from top to bottom: a point each, and a line from the least to the most."""
    plotted, points = part["plot"], _points(part)
    spreads = {row["label"]: (row["least"], row["most"]) for row in part["rows"].values() if "least" in row}
    # Where a loop goes by the data, the compiler's estimate has it once.
    loops = {row["label"]: row.get("facts", {}).get("data_dependent_loops") for row in part["rows"].values()}
    for place, (label, value) in enumerate(points.items()):
        at_least = " or more" if loops.get(label) else ""
        colour = OURS if label.lower().startswith("svb") and "by hand" not in label else OTHER
        low, high = spreads.get(label, (value, value)) if plotted == "median" else (value, value)
        axes.hlines(place, low, high, color=colour, linewidth=2, alpha=0.5)
        axes.plot([value], [place], "o", color=colour)
        axes.text(max(value, high), place, f"   {number(plotted, value)}{at_least}", va="center", size=8)
    axes.set_title(part["title"], loc="left")
    axes.set(xlabel=MEANINGS.get(plotted, plotted.replace("_", " ")), ylim=(len(points) - 0.4, -0.6))
    axes.set_yticks(range(len(points)), list(points))
    _set_scale(axes)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s" if plotted == "median" else ""))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _set_scale(axes: Axes) -> None:
    room = 1.15  # for the text beside the rightmost point
    left, right = axes.dataLim.intervalx
    if right <= WIDEST_LINEAR * left:
        axes.set_xlim(0, right * room)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    else:
        left /= 1.3
        axes.set(xscale="log", xlim=(left, right * (right / left) ** (room - 1)))
        axes.xaxis.set_major_locator(LogLocator(numticks=8))


def _points(part: Section) -> dict[str, float]:
    """Return each row's figure, of a range the most."""
    found = {row["label"]: figure(row, part["plot"]) for row in part["rows"].values()}
    largest = {
        label: max(value) if isinstance(value, list | tuple) else value for label, value in found.items()
    }
    return {label: value for label, value in largest.items() if value}
