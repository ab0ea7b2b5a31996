"""One picture for every measurement: a panel for each section, a point for each row.

Points, because the scale is logarithmic: the length of a bar would mean nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables import Section, figure, number

OURS, OTHER = "#2f6fd6", "#8a93a3"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.alpha": 0.25,
}


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write the picture of one command's measurement as ``<command>.png``."""
    shown = [part for part in result["sections"] if _points(part)]
    if not shown:
        return
    points = sum(len(_points(part)) for part in shown)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(8.5, 0.9 * len(shown) + 0.3 * points), layout="constrained")
        panels = drawing.subplots(
            len(shown), 1, squeeze=False, height_ratios=[2 + len(_points(part)) for part in shown]
        )
        for axes, part in zip(panels.flat, shown, strict=True):
            _draw_section(axes, part)
        drawing.savefig(folder / f"{result['command']}.png", dpi=100, facecolor="white")


def _draw_section(axes: Axes, part: Section) -> None:
    for place, (label, value) in enumerate(_points(part).items()):
        axes.plot([value], [label], "o", color=OURS if label.lower().startswith("svb") else OTHER)
        axes.text(value, place, f"   {number(part['plot'], value)}", va="center", size=8)
    axes.set(title=part["title"], xscale="log", xlabel=part["plot"].replace("median", "seconds"))
    axes.margins(x=0.25, y=0.05)
    axes.invert_yaxis()


def _points(part: Section) -> dict[str, float]:
    """Return each row's figure, of a range the most."""
    found = {row["label"]: figure(row, part["plot"]) for row in part["rows"].values()}
    largest = {
        label: max(value) if isinstance(value, list | tuple) else value for label, value in found.items()
    }
    return {label: value for label, value in largest.items() if value}
