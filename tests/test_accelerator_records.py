"""The figures for accelerators in README and in the guide to the benchmarks are those on record."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "benchmarks/results/accelerators.json").read_text())
SECTIONS = {part["title"]: part["rows"] for part in RECORD["sections"]}
# A line in the guide: a program on one v5e chip, the row that is compared with SGD or with the floor, and
# the figure.
CONVNET_20, RESNET_68, WRN_28_10 = (
    f"{network}: training step" for network in ("convnet_20", "preact_resnet_68", "wrn_28_10")
)
CONVNET_38_ALONE, WRN_28_10_ALONE = (
    f"{network}: projection alone" for network in ("convnet_38", "wrn_28_10")
)
LINES = {
    "ConvNet-20, step without a projection, cycles": (CONVNET_20, "step_auto", "cycles_idle"),
    "the same, ConvNet-20's bounds in the chain": (CONVNET_20, "chain_auto", "cycles_idle"),
    "ConvNet-20, projecting step, cycles": (CONVNET_20, "step_auto", "cycles_due"),
    "ConvNet-20, code": (CONVNET_20, "step_auto", "code_bytes"),
    "ConvNet-20, compile, CPU seconds": (CONVNET_20, "step_auto", "compile_cpu_seconds"),
    "ResNet-68, step without a projection, cycles": (RESNET_68, "step_auto", "cycles_idle"),
    "the same, ResNet-68's bounds in the chain": (RESNET_68, "chain_auto", "cycles_idle"),
    "ResNet-68, projecting step, cycles": (RESNET_68, "step_auto", "cycles_due"),
    "ResNet-68, code": (RESNET_68, "step_auto", "code_bytes"),
    "ResNet-68, compile, CPU seconds": (RESNET_68, "step_auto", "compile_cpu_seconds"),
    "WRN-28-10, step without a projection, cycles": (WRN_28_10, "step_auto", "cycles_idle"),
    "WRN-28-10, projecting step, cycles": (WRN_28_10, "step_auto", "cycles_due"),
    "WRN-28-10, code of a step": (WRN_28_10, "step_auto", "code_bytes"),
    "WRN-28-10, compile a step, CPU seconds": (WRN_28_10, "step_auto", "compile_cpu_seconds"),
    "ConvNet-38, projection alone, cycles": (CONVNET_38_ALONE, "project_auto", "cycles_due"),
    "ConvNet-38, compile it, CPU seconds": (CONVNET_38_ALONE, "project_auto", "compile_cpu_seconds"),
    "WRN-28-10, projection alone, cycles": (WRN_28_10_ALONE, "project_auto", "cycles_due"),
    "WRN-28-10, projection alone, code": (WRN_28_10_ALONE, "project_auto", "code_bytes"),
    "WRN-28-10, compile it, CPU seconds": (WRN_28_10_ALONE, "project_auto", "compile_cpu_seconds"),
}


def figure(program, row, quantity):
    """Return a figure of a program on one v5e chip; the most cycles, where there is a range."""
    found = SECTIONS[f"v5e-1, {program}"][row]["facts"][quantity]
    return max(found) if quantity == "cycles_due" else found


def show(number, quantity):
    if quantity == "cycles_idle":
        return f"{number:,.0f}"
    if quantity == "compile_cpu_seconds":
        return f"{number:.{0 if number >= 10 else 1}f}"
    return f"{number / 1e6:.2f} M" if quantity == "cycles_due" else f"{number / 1e6:.1f} MB"


@pytest.mark.parametrize("label", LINES)
def test_the_guide_has_the_figures_on_record(label):
    program, row, quantity = LINES[label]
    baseline = "sgd" if "step" in program else "floor"
    numbers = [figure(program, each, quantity) for each in (baseline, row)]
    ratio = f"{numbers[1] / numbers[0]:.{3 if quantity == 'cycles_idle' else 2}f}"
    expected = f"| {' | '.join([label, *(show(number, quantity) for number in numbers), ratio])} |"
    assert expected in (ROOT / "docs/benchmarks.md").read_text(), f"docs/benchmarks.md needs: {expected}"


@pytest.mark.parametrize(
    ("label", "program", "digits"),
    [("ConvNet-20", CONVNET_20, 3), ("ResNet-68", RESNET_68, 3), ("WRN-28-10", WRN_28_10, 1)],
)
def test_readme_has_the_steps_on_record(label, program, digits):
    plain, idle = (figure(program, row, "cycles_idle") / 1e6 for row in ("sgd", "step_auto"))
    due = figure(program, "step_auto", "cycles_due") / 1e6
    expected = f"| {label} | {plain:.{digits}f} M | {idle:.{digits}f} M | {due:.{min(digits, 2)}f} M |"
    assert expected in (ROOT / "README.md").read_text(), f"README.md needs: {expected}"
