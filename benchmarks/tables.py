"""Measurements as Markdown: aligned, so that they read well on a terminal too."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.formatting import (
    ABSENT,
    is_measured,
    megabytes,
    percent,
    reasons,
    seconds,
    spread,
    table,
    times,
)

AMORTISED = (391, 100, 10, 1)
"""Steps between projections for which the mean cost is computed."""

Rows = Mapping[str, dict[str, Any]]


def render(result: dict[str, Any]) -> str:
    """Return everything that one command measured, as Markdown."""
    body = {"projection": _projection, "step": _step, "scaling": _scaling, "loop": _loop}[result["command"]]
    sections = [f"## {result['command'].capitalize()}", _surroundings(result), *body(result["measured"])]
    return "\n\n".join(sections)


def ratio(rows: Rows, name: str, base: str) -> float | None:
    """Return a row's time over another's, both medians; None where one is missing."""
    if not (is_measured(rows.get(name)) and is_measured(rows.get(base))):
        return None
    return rows[name]["median"] / rows[base]["median"]


def paired_ratios(rows: Rows, name: str, base: str) -> list[float] | None:
    """Return a row's time over another's, round by round, which drifts of the machine do not reach."""
    if not (is_measured(rows.get(name)) and is_measured(rows.get(base))):
        return None
    return [mine / other for mine, other in zip(rows[name]["seconds"], rows[base]["seconds"], strict=True)]


def amortised_overhead(rows: Rows, every: int, projecting: str, other: str, base: str) -> float | None:
    """Return what a projection every so many steps adds to the mean step, as a part of the plain step."""
    if not all(is_measured(rows.get(name)) for name in (projecting, other, base)):
        return None
    extra = rows[projecting]["median"] - rows[other]["median"]
    return extra / every / rows[base]["median"]


def with_updates(network: Mapping[str, Rows]) -> dict[str, Any]:
    """Return a network's rows, updates alone in place of whole steps, and SGD's whole one as ``step``."""
    return {**network["rows"], **network["updates"], "step": network["rows"].get("sgd")}


def parts_of_a_step(rows: Rows) -> dict[str, list[float]]:
    """Return what a run's parts add to the bare step, as parts of it, round by round."""
    if not all(is_measured(row) for row in rows.values()):
        return {}
    a_step = {name: [value / row["facts"]["steps"] for value in row["seconds"]] for name, row in rows.items()}
    rounds = [dict(zip(a_step, values, strict=True)) for values in zip(*a_step.values(), strict=True)]
    return {
        "input": [each["input"] / each["step"] for each in rounds],
        "augmentation": [1 - each["plain_step"] / each["step"] for each in rounds],
        "loop": [each["loop"] / each["step"] for each in rounds],
    }


def _surroundings(result: dict[str, Any]) -> str:
    where, settings = result["environment"], result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    commit = where["commit"][:12] + (" with changes" if where["has_uncommitted_changes"] else "")
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
    variables = ", ".join(f"{key}={value}" for key, value in where["variables"].items()) or "none"
    return (
        f"{where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 1e9:.0f} GB. "
        f"Load at the start {where['load_average']:.2f}. Variables that set threads: {variables}. "
        f"{versions}. Commit {commit}, {where['date']}. Settings: {chosen}. Times are medians over rounds."
    )


def _projection(networks: dict[str, Any]) -> list[str]:
    sections = []
    for name, network in networks.items():
        size = 4 * network["parameters"]
        sections.append(
            f"### {name}: {network['matrices']} matrices, {network['parameters'] / 1e6:.2f} M numbers "
            f"({megabytes(size)})"
        )
        header = ["row", "time", "spread", "to auto", "to floor", "error", "XLA memory", "resident memory"]
        rows = network["rows"]
        sections += [table(header, [_projection_line(rows, row, size) for row in rows]), *reasons(rows)]
    return sections


def _projection_line(rows: Rows, name: str, size: int) -> list[str]:
    result = rows[name]
    if not is_measured(result):
        return [result["label"], result["status"], *[ABSENT] * 6]
    error, facts = result.get("error"), result["facts"]
    planned = facts["temp_bytes"] + facts["output_bytes"] if "temp_bytes" in facts else None
    return [
        result["label"] + _setting(facts),
        seconds(result["median"]),
        spread(result),
        times(ratio(rows, name, "auto")),
        times(ratio(rows, name, "floor")),
        ABSENT if error is None else f"{error:.1e}",
        _memory(planned, size),
        _memory(result.get("resident_bytes"), size),
    ]


def _setting(facts: dict[str, Any]) -> str:
    return f" ({facts['threads']} threads, {facts['orientation']})" if "threads" in facts else ""


def _memory(extra: int | None, size: int) -> str:
    return ABSENT if extra is None else f"{megabytes(extra)} ({extra / size:.1f}×)"


def _step(measured: dict[str, Any]) -> list[str]:
    sections = []
    for name, network in measured["networks"].items():
        rows = network["rows"]
        sections.append(f"### {name}")
        header = ["step", "time", "spread", "to SGD", "middle half of rounds"]
        sections += [table(header, [_step_line(rows, row) for row in rows]), *reasons(rows)]
        sections += [*_parts(rows), *_updates(rows, network["updates"]), *_amortised(network)]
        if "compiling" in network:
            sections.append(_compiling(network["compiling"]))
    if measured["convolutions"]:
        sections += ["### Single convolutions", _convolutions(measured["convolutions"])]
    return sections


def _step_line(rows: Rows, name: str) -> list[str]:
    result = rows[name]
    if not is_measured(result):
        return [result["label"], result["status"], *[ABSENT] * 3]
    ratios = paired_ratios(rows, name, "sgd")
    middle = ABSENT
    if ratios and len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        middle = f"{_change(low)} … {_change(high)}"
    to_sgd = ABSENT if ratios is None else _change(statistics.median(ratios))
    return [result["label"], seconds(result["median"]), spread(result), to_sgd, middle]


def _change(value: float) -> str:
    return percent(value - 1) if 0.5 < value < 2 else times(value)


def _parts(rows: Rows) -> list[str]:
    """Return where the time of a plain step goes, in each framework that was measured whole."""
    lines, whole = [], {}
    for label, prefix in (("JAX", ""), ("PyTorch", "torch_")):
        names = [prefix + name for name in ("forward", "gradients", "sgd")]
        if all(is_measured(rows.get(name)) for name in names):
            forward, gradients, step = (rows[name]["median"] for name in names)
            whole[label] = [forward, gradients - forward, step - gradients, step]
            lines.append([label, *map(seconds, whole[label])])
    if len(whole) == 2:
        # A part is a difference of two times: where it is lost in noise, so is its ratio.
        ratios = (
            ours / theirs if min(ours, theirs) > 0 else None
            for ours, theirs in zip(*whole.values(), strict=True)
        )
        lines.append(["JAX to PyTorch", *map(times, ratios)])
    return [table(["plain step", "forward", "backward", "optimizer", "whole"], lines)] if lines else []


def _updates(rows: Rows, updates: Rows) -> list[str]:
    """Return what the optimizer does alone, and what the bounds add to it as a part of a whole step."""
    if not all(is_measured(row) for row in (rows.get("sgd"), *updates.values())):
        return []
    step, plain = rows["sgd"]["median"], updates["sgd"]["median"]
    lines = [
        [row["label"], seconds(row["median"]), spread(row), percent((row["median"] - plain) / step, 3)]
        for row in updates.values()
    ]
    return [table(["the optimizer's update alone", "time", "spread", "more, as a part of SGD's step"], lines)]


def _amortised(network: Mapping[str, Rows]) -> list[str]:
    lines, rows = [], with_updates(network)
    for label, names in (
        ("SVB+BBN", ("projecting", "off", "step")),
        ("PyTorch, SVD per layer", ("torch_projecting", "torch_sgd", "torch_sgd")),
    ):
        overheads = [amortised_overhead(rows, every, *names) for every in AMORTISED]
        if None not in overheads:
            lines.append([label, *(percent(value, 4) for value in overheads if value is not None)])
    if not lines:
        return []
    header = ["projections' part of the mean step, computed", *(f"every {every}" for every in AMORTISED)]
    return [table(header, lines)]


def _compiling(rows: Rows) -> str:
    lines = []
    for name, result in rows.items():
        is_there = is_measured(result)
        cells = [seconds(result["median"]), spread(result)] if is_there else [result["status"], ABSENT]
        counts = [
            f"{result['facts'][kind]:,}" if is_there else ABSENT for kind in ("fusions", "different_fusions")
        ]
        lines.append([result["label"], *cells, times(ratio(rows, name, "sgd")), *counts])
    return table(["trace and compile", "time", "spread", "to SGD", "fusions", "different ones"], lines)


def _convolutions(rows: Rows) -> str:
    lines = []
    for name, result in rows.items():
        framework, rest = name.split("/", 1)
        if framework == "jax":
            other = rows[f"torch/{rest}"]
            cells = [seconds(row["median"]) if is_measured(row) else row["status"] for row in (result, other)]
            label = result["label"].removeprefix("jax ")
            lines.append([label, *cells, times(ratio(rows, name, f"torch/{rest}"))])
    return table(["3 x 3 convolution", "JAX", "PyTorch", "ratio"], lines)


def _scaling(measured: dict[str, Any]) -> list[str]:
    sections = ["### Devices (virtual ones, on the cores there are)", _devices(measured["devices"]["rows"])]
    for title, label in (("widths", "width"), ("depths", "layers")):
        sections += [f"### {title.capitalize()}", _growth(label, measured[title])]
    if "network" in measured:
        network = measured["network"]
        sections += [f"### A whole network, {network['matrices']} matrices", _growth("", {"": network})]
    return sections


def _devices(rows: Rows) -> str:
    header = [
        *("devices", "time", "decompositions each", "multiply-adds each, most"),
        *("largest part of the work", "tables in the program", "difference from one device"),
    ]
    lines = []
    for name, result in rows.items():
        if not is_measured(result):
            lines.append([name, result["status"], *[ABSENT] * 5])
            continue
        facts = result["facts"]
        each: Sequence[int] = facts["decompositions"]
        lines.append(
            [
                name,
                seconds(result["median"]),
                str(each[0]) if len(set(each)) == 1 else f"{min(each)} to {max(each)}",
                f"{max(facts['multiply_adds']) / 1e9:.2f} G",
                f"1/{1 / facts['largest_share']:.2f}",
                f"{facts['tables_in_program']} of {facts['tables']}",
                f"{facts['difference_from_one_device']:.1e}",
            ]
        )
    return table(header, lines)


def _growth(label: str, studies: Mapping[str, dict[str, Any]]) -> str:
    names = list(next(iter(studies.values()))["rows"])
    lines = []
    for value, study in studies.items():
        rows = study["rows"]
        cells = [seconds(rows[name]["median"]) if is_measured(rows[name]) else ABSENT for name in names]
        ratios = [times(ratio(rows, "svd", "auto")), times(ratio(rows, "auto", "floor"))]
        lines.append([str(value), f"{study['parameters'] / 1e6:.2f} M", *cells, *ratios])
    return table([label, "numbers", *names, "svd to auto", "auto to floor"], lines)


def _loop(measured: dict[str, Any]) -> list[str]:
    rows = measured["rows"]
    lines = []
    for result in rows.values():
        if is_measured(result):
            steps = result["facts"]["steps"]
            a_step = {name: result[name] / steps for name in ("median", "least", "most")}
            lines.append([result["label"], str(steps), seconds(a_step["median"]), spread(a_step)])
        else:
            lines.append([result["label"], result["status"], ABSENT, ABSENT])
    sections = [table(["row", "steps a call", "time a step", "spread"], lines), *reasons(rows)]
    parts = {name: _middle(values) for name, values in parts_of_a_step(rows).items()}
    return [*sections, *([_loop_parts(parts)] if parts else [])]


def _loop_parts(parts: Mapping[str, tuple[float, float, float]]) -> str:
    labels = {
        "input": "input pipeline",
        "augmentation": "augmentation, inside the step",
        "loop": "the loop around it: metrics, bar, a checkpoint an epoch",
    }
    lines = [
        [labels[name], percent(median), f"{percent(low)} … {percent(high)}"]
        for name, (low, median, high) in parts.items()
    ]
    return table(["part of the bare step", "median of rounds", "middle half of rounds"], lines)


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
