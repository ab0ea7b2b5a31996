"""Every command of the benchmarks in its smallest form, and the measuring itself."""

import doctest
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import svb_jax
from benchmarks import busy, jax_steps, tables
from benchmarks.__main__ import main
from benchmarks.kernels import as_matrix, clip_exactly, drifted_kernels, load_kernels, save_kernels
from benchmarks.loop import with_parts
from benchmarks.measurement import Plan, Row, measure
from benchmarks.processes import Pool
from benchmarks.projection import ROWS
from benchmarks.step import with_overheads
from benchmarks.workload import Task, Workload

DOCUMENTED = ["__main__", "kernels", "measurement", "tables"]
PLAN = Plan(rounds=2, seconds=1e-6, limit=20)


# Rows for the tests of the measuring itself, which run in processes of their own.


def logged(task: Task) -> Workload:
    def run(argument: str) -> None:
        with Path(task["log"]).open("a") as log:
            log.write(argument)
        time.sleep(task.get("sleep", 0))

    return Workload(run=run, fresh=lambda: task["letter"], facts={"letter": task["letter"]})


def failing(task: Task) -> Workload:
    raise KeyError(task["key"])


def vanishing(task: Task) -> Workload:
    def run(_: None) -> None:
        os._exit(task["code"])

    return Workload(run=run)


def stretched(task: Task) -> Workload:
    """Give back its kernels, the last one longer by a part."""

    def run(_: None) -> Any:
        kernels = load_kernels(Path(task["kernels"]))
        last = list(kernels)[-1]
        return kernels | {last: kernels[last] * (1 + task["part"])}

    return Workload(run=run, kernels=lambda kernels: kernels)


def allocating(task: Task) -> Workload:
    def run(_: None) -> None:
        held = np.ones(task["megabytes"] << 17)
        time.sleep(0.1)
        held.fill(0)

    return Workload(run=run)


def clocked(task: Task) -> Workload:
    return Workload(run=lambda _: task["claim"], seconds=float)


@pytest.fixture
def pool():
    with Pool() as pool:
        yield pool


def row(function: str, **task) -> Row:
    return Row(function, f"tests.test_benchmarks:{function}", task, group="tests")


@pytest.mark.parametrize("module", DOCUMENTED)
def test_examples_in_the_documentation(module):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(f"benchmarks.{module}"), optionflags=options)
    assert result.attempted > 0
    assert result.failed == 0


def test_rows_are_called_in_turn_and_another_is_first_each_round(pool, tmp_path):
    log = str(tmp_path / "log")
    rows = {letter: row("logged", log=log, letter=letter) for letter in "abc"}
    measured = measure(pool, rows, Plan(rounds=3, seconds=1e-6, limit=20))
    warm_up, rounds = "abc", "abc" + "bca" + "cab"
    assert Path(log).read_text() == warm_up + rounds
    assert [len(result["seconds"]) for result in measured.values()] == [3, 3, 3]
    assert measured["b"]["facts"] == {"letter": "b"}


def test_a_row_that_takes_too_long_is_stopped_named_and_not_repeated(pool, tmp_path):
    log = tmp_path / "log"
    rows = {
        "slow": Row("slow", "tests.test_benchmarks:logged", {"log": str(log), "letter": "s", "sleep": 60}),
        "quick": row("logged", log=str(log), letter="q"),
    }
    measured = measure(pool, rows, Plan(rounds=2, seconds=1e-6, limit=1.0))
    assert measured["slow"] == {
        **{"label": "slow", "status": "too slow", "detail": "over 1 s"},
        **{"facts": {"letter": "s"}},
    }
    assert measured["quick"]["status"] == "measured"
    assert log.read_text() == "s" + "q" * 3


def test_rows_that_cannot_run_say_why_and_leave_the_others_alone(pool, tmp_path):
    rows = {
        "absent": Row("absent", "no_such_package.rows:svd", group="tests"),
        "failing": row("failing", key="it"),
        "vanishing": Row("vanishing", "tests.test_benchmarks:vanishing", {"code": 7}),
        "logged": row("logged", log=str(tmp_path / "log"), letter="x"),
    }
    measured = measure(pool, rows, PLAN)
    reasons = {name: (result["status"], result.get("detail")) for name, result in measured.items()}
    assert reasons == {
        "absent": ("not installed", "no_such_package"),
        "failing": ("failed", "KeyError: 'it'"),
        "vanishing": ("failed", "its process ended with code 7"),
        "logged": ("measured", None),
    }


def test_the_error_is_that_of_the_worst_kernel(pool, tmp_path):
    kernels, path = {"a": np.eye(3), "b": np.ones((2, 2, 4, 3))}, tmp_path / "kernels.npz"
    save_kernels(path, kernels)
    measured = measure(pool, {"b": row("stretched", kernels=str(path), part=1e-3)}, PLAN, exact=path)
    assert measured["b"]["error"] == pytest.approx(1e-3, rel=1e-9)


def test_a_row_may_say_itself_which_time_counts(pool):
    measured = measure(pool, {"clocked": row("clocked", claim=0.25)}, PLAN)
    assert measured["clocked"]["seconds"] == [0.25, 0.25]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_that_a_call_takes_for_a_while_is_seen(pool):
    measured = measure(pool, {"big": row("allocating", megabytes=64)}, PLAN)
    assert 60e6 < measured["big"]["resident_bytes"] < 80e6


def test_drifted_kernels_have_the_prescribed_spectrum():
    kernels = drifted_kernels({"conv": (3, 3, 4, 5), "head": (5, 9)}, condition=4.0)
    for kernel in kernels.values():
        values = np.linalg.svd(as_matrix(kernel).astype(np.float64), compute_uv=False)
        np.testing.assert_allclose(values, 2.0 ** np.linspace(1, -1, 5), rtol=1e-5)
        assert kernel.dtype == np.float32


def test_exact_answers():
    kernels = {"kernel": np.diag([3.0, 1.2, 0.1]).astype(np.float32)}
    clipped = clip_exactly(kernels, epsilon=0.5)["kernel"]
    np.testing.assert_allclose(clipped, np.diag([1.5, np.float32(1.2), 2 / 3]), atol=1e-15)


def test_ratios_are_taken_within_rounds():
    rows = {
        "sgd": {"label": "SGD", "seconds": [1.0, 2.0, 4.0], "median": 2.0, "least": 1.0, "most": 4.0},
        "off": {"label": "other", "seconds": [1.1, 2.0, 3.6], "median": 2.0, "least": 1.1, "most": 3.6},
        "lost": {"label": "lost", "status": "too slow", "detail": "over 1 s"},
    }
    part = tables.section("Steps", rows, median="sgd")
    assert tables.ratios(part, "off", "median", "sgd") == [1.1, 1.0, 0.9]
    assert tables.ratios(part, "lost", "median", "sgd") == []
    _, _, _, off, lost = tables.table(part).splitlines()
    assert off == "| other | 2.00 s (1.10 s – 3.60 s) | 1.00× (0.950 – 1.05) |"
    assert lost == "| lost  |                 too slow |                    – |"


def test_ranges_are_compared_end_by_end():
    rows = {
        "auto": {"label": "auto", "facts": {"cycles_due": [20, 60]}},
        "floor": {"label": "floor", "facts": {"cycles_due": [10, 10]}},
    }
    part = tables.section("Projection", rows, cycles_due="floor")
    assert tables.ratios(part, "auto", "cycles_due", "floor") == [2.0, 6.0]


def test_what_the_bounds_add_is_a_part_of_the_whole_step():
    updates = {name: {"median": time} for name, time in (("sgd", 0.1), ("projecting", 0.5))}
    overheads = with_overheads(updates | {"lost": {"status": "too slow"}}, {"median": 2.0})
    assert overheads["projecting"]["more_than_sgd_share"] == pytest.approx(0.2)
    assert overheads["lost"] == {"status": "too slow"}
    assert with_overheads(updates, {"status": "too slow"}) == updates


def test_what_a_run_adds_to_its_steps():
    def measured(seconds, steps):
        return {"seconds": seconds, "facts": {"steps": steps}}

    rows = {
        "step": measured([1.0, 2.0, 1.0], 1),
        "plain_step": measured([0.9, 2.0, 0.8], 1),
        "input": measured([0.2, 0.8, 0.3], 10),
        "loop": measured([0.5, 2.0, 0.7], 10),
    }
    parts = {name: row["of_a_step_share"] for name, row in with_parts(rows).items()}
    assert parts == pytest.approx({"step": 1.0, "plain_step": 0.1, "input": 0.03, "loop": 0.07})
    lost = rows | {"loop": {"status": "too slow"}}
    assert with_parts(lost) == lost


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a process's time is read from /proc")
def test_a_busy_process_computes_meanwhile_and_not_afterwards():
    with busy.busy_process() as process:
        stat = Path(f"/proc/{process.pid}/stat")
        # The 14th field, in ticks of 10 ms: without computing, the loop ends by the test's time limit only.
        while int(stat.read_text().split()[13]) < 50:
            time.sleep(0.05)
        assert process.poll() is None
    assert process.poll() is not None


def test_only_the_projecting_step_projects():
    task = {"model": "mlp", "width": 0.05, "batch": 2, "image_size": 32, "condition": 3.4}
    task |= {"optimizer": "svb+bbn"}
    ranges = {}
    for projects in (False, True):
        workload = jax_steps.train(task | {"projects": projects})
        state, _ = workload.run(workload.fresh())
        values = np.concatenate(jax.tree.leaves(svb_jax.singular_values(state[0])), axis=None)
        ranges[projects] = values.min(), values.max()
    assert ranges[True] == pytest.approx((2 / 3, 1.5), rel=1e-4)
    assert ranges[False][0] < 0.6
    assert ranges[False][1] > 1.6


def run(tmp_path: Path, command: str, *options: str) -> dict:
    assert main([command, *options, "--rounds", "1", "--results", str(tmp_path)]) == 0
    assert (tmp_path / f"{command}.png").stat().st_size > 10_000
    return json.loads((tmp_path / f"{command}.json").read_text())


def test_projection_in_its_smallest_form(tmp_path, capsys):
    rows = ["auto", "busy_1", *(name for name in ROWS if "without" in name), "scipy", "torch", "floor"]
    result = run(tmp_path, "projection", "--models", "deep_linear", "--rows", *rows)
    [network] = result["sections"]
    measured = network["rows"]
    assert list(measured) == rows
    assert measured["auto"]["error"] < 1e-6
    assert all(measured[name]["error"] < 1e-6 for name in rows if name.startswith(("busy", "without")))
    assert measured["scipy"]["error"] < 3e-6
    assert measured["floor"]["error"] is None
    printed = capsys.readouterr().out
    assert "svb_jax auto" in printed
    if importlib.util.find_spec("torch") is None:
        assert "torch.linalg.svd per layer, as it starts: not installed, torch" in printed
    assert main(["report", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_step_in_its_smallest_form(tmp_path, capsys):
    options = ["--models", "mlp", "--width", "0.05", "--compile-rounds", "0", "--no-convolutions"]
    result = run(tmp_path, "step", *options, "--rows", "sgd", "off", "projecting")
    step, update = (part["rows"] for part in result["sections"])
    assert {row["status"] for row in (*step.values(), *update.values())} == {"measured"}
    printed = capsys.readouterr().out
    assert "the optimizer's update alone" in printed
    assert "more than sgd share" in printed


def test_scaling_in_its_smallest_form(tmp_path, capsys):
    options = [
        "--model",
        "mlp",
        "--devices",
        "2",
        "--widths",
        "8",
        "--depths",
        "2",
        "--network",
        "None",
    ]
    result = run(tmp_path, "scaling", *options)
    devices, width, _ = (part["rows"] for part in result["sections"])
    facts = devices["2"]["facts"]
    assert facts["traffic_bytes"] > 0
    assert facts["difference_from_one_device"] <= 1e-6
    assert list(width) == ["auto", "svd", "floor"]
    assert "to floor" in capsys.readouterr().out


def test_loop_in_its_smallest_form(tmp_path, capsys):
    options = ["--model", "deep_linear", "--dataset", "synthetic", "--image-size", "8", "--seconds", "0.001"]
    result = run(tmp_path, "loop", *options)
    [part] = result["sections"]
    rows = part["rows"]
    assert {name: row["facts"]["steps"] for name, row in rows.items()} == {
        **{"step": 1, "plain_step": 1},
        **{"input": 4, "loop": 4},  # 512 images in batches of 128
    }
    assert all(row["median"] > 0 for row in rows.values())
    assert "of a step share" in capsys.readouterr().out


@pytest.mark.slow
def test_every_row_of_a_step_is_measured(tmp_path):
    rows = ["sgd", "spectral_norm", "forward", "gradients"]
    options = ["--models", "convnet_8", "--batch", "2", "--compile-rounds", "1", "--rows", *rows]
    sections = run(tmp_path, "step", *options)["sections"]
    assert [part["title"].partition(":")[0] for part in sections] == ["convnet_8"] * 3 + [
        "Single convolutions"
    ]
    rows = [row for part in sections for name, row in part["rows"].items() if not name.startswith("torch")]
    assert {row["status"] for row in rows} == {"measured"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["speed"], "There is no command 'speed'"),
        (["projection", "--rows", "qr"], "benchmarks projection needs rows out of auto"),
        (["projection", "--models", "wrn"], "svb_jax.models needs one of"),
        (["report", "--results", "nowhere"], "needs measurements in nowhere"),
        (["accelerators", "--targets", "v9-1"], "needs a target out of v5e-1"),
        (["accelerators", "--networks", "vgg"], "needs networks out of convnet_20"),
    ],
)
def test_wrong_usage_is_explained(arguments, sentence, capsys):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_an_interpreter_that_is_none_is_refused(capsys):
    try:
        code = main(["projection", "--torch-python", "no-such-python"])
    except SystemExit as left:  # as newer versions of tyro leave, which read the error themselves
        code = left.code
    assert code == 2
    assert "no-such-python" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(
        f"  {command} " in printed
        for command in ("projection", "step", "scaling", "loop", "accelerators", "report")
    )
    assert sys.executable not in printed
