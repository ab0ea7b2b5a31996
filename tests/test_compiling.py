"""``svb compile``: the training step of a row, planned by shapes alone."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from svb_jax.ahead_of_time import compile_plan, find_target
from svb_jax.experiments import catalogue, table1
from svb_jax.experiments.__main__ import main
from svb_jax.experiments.compiling import lower_step, plan_table
from svb_jax.experiments.listing import List, costs
from svb_jax.experiments.plans import load_plan, plan_path, save_plan
from svb_jax.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
SMALL = TrainConfig(
    model="convnet_8", dataset="cifar10", width=0.25, batch_size=4, svb_epsilon=0.5, bbn_epsilon=1.0, epochs=2
)


@pytest.fixture(scope="module")
def plan():
    return compile_plan(lambda: lower_step(SMALL, jax.devices()[:1]), chips=1)[0]


def test_the_step_of_a_run_is_planned_without_data(plan, capsys):
    from rich.console import Console

    assert plan.conditionals >= 2
    assert plan.temp_bytes > 0
    Console(width=120).print(plan_table("table1/small", SMALL, find_target("h100-1"), plan))
    printed = capsys.readouterr().out
    assert "table1/small on h100-1" in printed
    assert "fits: 0." in printed
    assert "of 84.94 GB" in printed


def test_a_recorded_plan_shows_in_the_costs_of_all_rows_with_its_program(plan, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = replace(find_target("v5e-8"), clock_hz=1e9)
    # Of another machine than the one it was compiled for: an hour is 3.6e12 of its cycles.
    steps = table1.ROWS["svb+bbn"].epochs * 391
    plan = replace(plan, cycles_idle=36e12 / steps, temp_bytes=3_000_000_000)
    save_plan("table1/svb+bbn", table1.ROWS["svb+bbn"], target, plan)
    other_band = replace(table1.ROWS["svb+bbn"], svb_epsilon=0.1)
    assert load_plan(other_band, "v5e-8") == load_plan(table1.ROWS["svb+bbn"], "v5e-8")
    assert load_plan(table1.ROWS["svb"], "v5e-8") is None

    List(names=("table1",), costs=True).run()
    by_row = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "/" in line
    }
    assert by_row["table1/svb+bbn"][-2:] == ["3.00", "10"]
    assert by_row["table1/svb"][-2:] == ["-", "-"]


def test_the_guide_to_the_paper_has_the_costs_on_record(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = re.findall(
        r"^\| `([\w+.-]+/[\w+.-]+)` \|(.*)\|$", (ROOT / "docs/reproduce.md").read_text(), re.MULTILINE
    )
    assert len(lines) == 8
    for name, cells in lines:
        experiment, [row] = catalogue.find(name)
        assert (
            tuple(cell.strip() for cell in cells.split("|")[-3:]) == costs(experiment.rows[row], "v5e-8")[-3:]
        )


def test_a_damaged_plan_is_named(tmp_path):
    path = plan_path(SMALL, "v5e-8", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"got {path}")):
        load_plan(SMALL, "v5e-8", tmp_path)


def test_chips_must_divide_the_batch():
    with pytest.raises(ValueError, match="that 3 chips x 1 micro-batches divide, got 4"):
        lower_step(SMALL, jax.devices()[:1] * 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table1"], "compile needs one row that trains a network, of table1/sgd"),
        (["table1/svb", "--target", "v5e-7"], "needs a target out of v5e-1"),
    ],
)
def test_wrong_usage_is_explained(arguments, sentence, capsys):
    assert main(["compile", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_missing_compiler_is_named(capsys):
    assert main(["compile", "table1/svb"]) == 1
    assert "compiling for v5e-8 needs libtpu: pip install libtpu" in capsys.readouterr().err
