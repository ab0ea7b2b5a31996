"""Pictures of the measurements, for pages with a white background."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.formatting import is_measured, seconds
from benchmarks.tables import AMORTISED, amortised_overhead, parts_of_a_step, with_updates

OURS, YARDSTICK, PEER = "#2f6fd6", "#8a93a3", "#d98a3d"
YARDSTICKS = ("squares", "decompositions", "floor", "muon")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write the picture of one command's measurement as ``<command>.png``."""
    picture = {"projection": _projection, "step": _step, "scaling": _scaling, "loop": _loop}[
        result["command"]
    ]
    with matplotlib.rc_context(STYLE):
        figure = picture(result["measured"])
        figure.savefig(folder / f"{result['command']}.png", dpi=140, facecolor="white")


def _new(width: float, height: float, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _projection(networks: dict[str, Any]) -> Figure:
    """Draw a bar for each row, with its time and how often longer it takes than ours."""
    bars = [sum(is_measured(row) for row in network["rows"].values()) for network in networks.values()]
    figure, panels = _new(8.5, 0.9 * len(bars) + 0.3 * sum(bars), len(networks), 1)
    for axes, (name, network) in zip(panels, networks.items(), strict=True):
        rows = {key: row for key, row in network["rows"].items() if is_measured(row)}
        ours = rows["auto"]["median"] if "auto" in rows else None
        for key, row in rows.items():
            colour = OURS if row["label"].startswith("svb_jax") else YARDSTICK if key in YARDSTICKS else PEER
            axes.barh(row["label"], row["median"], color=colour)
            factor = f"  ({row['median'] / ours:.2g}×)" if ours else ""
            axes.text(row["median"], row["label"], f" {seconds(row['median'])}{factor}", va="center", size=8)
        axes.set(title=f"{name}: projecting {network['matrices']} matrices", xscale="log")
        axes.set_xlabel("seconds; in brackets, times svb_jax auto")
        axes.margins(x=0.25)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
    return figure


def _step(measured: dict[str, Any]) -> Figure:
    """Draw the time of each step, and what projections add to the mean step."""
    figure, (left, right) = _new(11, 4.2, 1, 2)
    shown = ("sgd", "off", "projecting", "spectral_norm", "torch_sgd", "torch_projecting")
    networks = {name: network["rows"] for name, network in measured["networks"].items()}
    labels = {name: rows[name]["label"] for rows in networks.values() for name in shown if name in rows}
    for number, (name, label) in enumerate(labels.items()):
        places = [place + number / (len(labels) + 1) for place in range(len(networks))]
        heights = [rows[name].get("median", 0) for rows in networks.values()]
        colour = OURS if name in ("off", "projecting") else PEER if name.startswith("torch") else YARDSTICK
        alpha = 0.55 if name in ("off", "spectral_norm", "torch_projecting") else 1.0
        left.bar(places, heights, 0.9 / (len(labels) + 1), label=label, color=colour, alpha=alpha)
    left.set_xticks([place + 0.4 for place in range(len(networks))], list(networks))
    left.set(ylabel="seconds a step")
    _name_lines(left)
    for name, network in measured["networks"].items():
        rows = with_updates(network)
        overheads = [amortised_overhead(rows, every, "projecting", "off", "step") for every in AMORTISED]
        if None not in overheads:
            # Rounding of the clock may make a small difference negative, which a logarithm cannot show.
            percents = [max(100 * value, 1e-5) for value in overheads if value is not None]
            right.plot(AMORTISED, percents, marker="o", label=name)
    right.set(xscale="log", yscale="log", xlabel="steps between projections")
    right.set(ylabel="percent added to the mean step")
    _name_lines(right)
    return figure


def _scaling(measured: dict[str, Any]) -> Figure:
    """Draw the shares of devices, and the times over width and depth."""
    figure, (devices, widths, depths) = _new(12.5, 3.8, 1, 3)
    rows = {int(count): row for count, row in measured["devices"]["rows"].items() if is_measured(row)}
    shares = [row["facts"]["largest_share"] for row in rows.values()]
    devices.plot(list(rows), shares, marker="o", color=OURS, label="the busiest device")
    devices.plot(list(rows), [1 / count for count in rows], "--", color=YARDSTICK, label="an equal part")
    devices.set(xlabel="devices", ylabel="part of the work", xscale="log", yscale="log", title="Sharing")
    devices.set_xticks(list(rows), [str(count) for count in rows])
    devices.minorticks_off()
    _name_lines(devices)
    _growth(widths, measured["widths"], "channels", "Width")
    _growth(depths, measured["depths"], "layers", "Depth")
    return figure


def _loop(measured: dict[str, Any]) -> Figure:
    """Draw what a run adds to its bare steps, every round a dot."""
    figure, (axes,) = _new(6.5, 2.6, 1, 1)
    for name, values in parts_of_a_step(measured["rows"]).items():
        axes.plot([100 * value for value in values], [name] * len(values), "o", color=OURS, alpha=0.6)
    axes.axvline(0, color=YARDSTICK)
    axes.set(title="What training adds to its bare steps", xlabel="percent of a bare step; a dot a round")
    axes.margins(y=0.3)
    axes.invert_yaxis()
    return figure


def _growth(axes: Axes, studies: Mapping[str, dict[str, Any]], label: str, title: str) -> None:
    for name, colour in (("svd", PEER), ("auto", OURS), ("floor", YARDSTICK)):
        rows = {int(value): study["rows"].get(name) for value, study in studies.items()}
        measured = {value: row["median"] for value, row in rows.items() if row and is_measured(row)}
        axes.plot(list(measured), list(measured.values()), marker="o", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds", title=title)
    axes.set_xticks([int(value) for value in studies], [str(value) for value in studies])
    axes.minorticks_off()
    _name_lines(axes)


def _name_lines(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
