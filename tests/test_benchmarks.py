"""Every command of the benchmarks in its smallest form, and the measuring itself."""

import doctest
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import svb_jax
from benchmarks import device_rows, jax_steps, tables
from benchmarks.__main__ import main
from benchmarks.kernels import as_matrix, clip_exactly, drifted_kernels, save_kernels
from benchmarks.measurement import Plan, Row, measure
from benchmarks.processes import Pool

DOCUMENTED = ["__main__", "device_rows", "formatting", "kernels", "measurement"]
PLAN = Plan(rounds=2, seconds=1e-6, limit=20)


@pytest.fixture
def pool():
    with Pool() as pool:
        yield pool


def row(function: str, **task) -> Row:
    return Row(function, f"tests.benchmark_rows:{function}", task, group="tests")


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
        "slow": Row("slow", "tests.benchmark_rows:logged", {"log": str(log), "letter": "s", "sleep": 60}),
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
        "vanishing": Row("vanishing", "tests.benchmark_rows:vanishing", {"code": 7}),
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


def test_overheads():
    rows = {
        "sgd": {"seconds": [1.0, 2.0, 4.0], "median": 2.0},
        "off": {"seconds": [1.1, 2.0, 3.6], "median": 2.0},
        "projecting": {"seconds": [6.0, 6.0, 6.0], "median": 6.0},
        "lost": {"status": "too slow"},
    }
    assert tables.paired_ratios(rows, "off", "sgd") == [1.1, 1.0, 0.9]
    assert tables.ratio(rows, "projecting", "sgd") == 3.0
    assert tables.ratio(rows, "lost", "sgd") is None
    assert tables.amortised_overhead(rows, 10, "projecting", "off", "sgd") == pytest.approx(0.2)
    updates = {
        name: {"seconds": [time], "median": time} for name, time in (("off", 0.1), ("projecting", 0.5))
    }
    network = tables.with_updates({"rows": rows, "updates": updates})
    assert tables.amortised_overhead(network, 10, "projecting", "off", "step") == pytest.approx(0.02)


def test_what_a_run_adds_to_its_steps():
    def measured(seconds, steps):
        return {"seconds": seconds, "median": 1.0, "facts": {"steps": steps}}

    rows = {
        "step": measured([1.0, 2.0], 1),
        "plain_step": measured([0.9, 2.0], 1),
        "input": measured([0.2, 0.8], 10),
        "loop": measured([0.5, 2.0], 10),
    }
    parts = tables.parts_of_a_step(rows)
    assert parts["input"] == pytest.approx([0.02, 0.04])
    assert parts["augmentation"] == pytest.approx([0.1, 0.0])
    assert parts["loop"] == pytest.approx([0.05, 0.1])
    assert tables.parts_of_a_step(rows | {"loop": {"status": "too slow"}}) == {}


def test_shares_of_devices_are_looked_up_in_the_program():
    params = {name: np.zeros((8, 2)) for name in "abc"} | {"d": np.zeros((4, 4))}
    # The three matrices of 32 go after that of 64, which one of two devices takes.
    program = "%c = constant dense<[1, 2]> : tensor<2xi32>  %d = constant dense<[1, 0]> : tensor<2xi32>"
    shares = device_rows.count_shares(params, 2, program)
    assert sorted(shares["decompositions"]) == [2, 2]
    assert shares["largest_share"] == 96 / 160
    assert shares["tables_in_program"] == shares["tables"] == 2
    assert sorted(shares["multiply_adds"]) == [2 * 72, 2 * 64 + 64 + 72]
    assert device_rows.count_shares(params, 2, program[:60])["tables_in_program"] == 1


def test_large_matrices_have_tables_of_their_own():
    params = {name: np.zeros((1024, 1024)) for name in "abc"}
    numbers = [[1, 0], [0, 1], [1, 0]]
    program = "\n".join(f"%c = constant dense<{each}> : tensor<2xi32>" for each in numbers)
    shares = device_rows.count_shares(params, 2, program)
    assert shares["tables_in_program"] == shares["tables"] == 3
    assert shares["largest_share"] == pytest.approx(2 / 3)
    # A table counts for one stack only.
    without_last = program.rsplit("\n", 1)[0]
    assert device_rows.count_shares(params, 2, without_last)["tables_in_program"] == 2


def test_fusions_that_differ_in_their_names_alone_are_equal():
    program = """HloModule step

%first (x.1: f32[2]) -> f32[2] {
  %x.1 = f32[2]{0} parameter(0)
  ROOT %sum.1 = f32[2]{0} add(%x.1, %x.1), metadata={op_name="a/add"}
}

%second (x.2: f32[2]) -> f32[2] {
  %x.2 = f32[2]{0} parameter(0)
  ROOT %sum.2 = f32[2]{0} add(%x.2, %x.2), metadata={op_name="b/add"}
}

%third (x.3: f32[2]) -> f32[2] {
  %x.3 = f32[2]{0} parameter(0)
  ROOT %product.1 = f32[2]{0} multiply(%x.3, %x.3), metadata={op_name="b/mul"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} fusion(%a), kind=kLoop, calls=%first, metadata={op_name="a/add"}
  %c = f32[2]{0} fusion(%b), kind=kLoop, calls=%second
  %d = f32[2]{0} fusion(%c), kind=kCustom, calls=%first
  ROOT %e = f32[2]{0} fusion(%d), kind=kLoop, calls=%third
}
"""
    first, second, third = jax_steps.list_fusions(program)
    assert first == second != third


def test_only_the_projecting_step_projects():
    task = {"model": "mlp", "width": 0.05, "batch": 2, "condition": 3.4, "optimizer": "svb+bbn"}
    ranges = {}
    for projects in (False, True):
        workload = jax_steps.train(task | {"projects": projects})
        state, _ = workload.run(workload.fresh())
        values = np.concatenate(jax.tree.leaves(svb_jax.singular_values(state.params)), axis=None)
        ranges[projects] = values.min(), values.max()
    assert ranges[True] == pytest.approx((2 / 3, 1.5), rel=1e-4)
    assert ranges[False][0] < 0.6
    assert ranges[False][1] > 1.6


def run(tmp_path: Path, command: str, *options: str) -> dict:
    assert main([command, *options, "--rounds", "1", "--results", str(tmp_path)]) == 0
    assert (tmp_path / f"{command}.png").stat().st_size > 10_000
    return json.loads((tmp_path / f"{command}.json").read_text())


def test_projection_in_its_smallest_form(tmp_path, capsys):
    rows = ["auto", "scipy", "torch", "floor"]
    result = run(tmp_path, "projection", "--models", "deep_linear", "--rows", *rows)
    measured = result["measured"]["deep_linear"]["rows"]
    assert list(measured) == rows
    assert measured["auto"]["error"] < 1e-6
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
    measured = result["measured"]["networks"]["mlp"]
    assert {row["status"] for row in (*measured["rows"].values(), *measured["updates"].values())} == {
        "measured"
    }
    printed = capsys.readouterr().out
    assert "the optimizer's update alone" in printed
    assert "every 391" in printed


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
    facts = result["measured"]["devices"]["rows"]["2"]["facts"]
    assert facts["tables_in_program"] == facts["tables"]
    assert facts["batched_in_program"] == 0 < facts["decompositions_in_program"]
    assert facts["difference_from_one_device"] <= 1e-6
    assert "auto to floor" in capsys.readouterr().out


def test_loop_in_its_smallest_form(tmp_path, capsys):
    options = ["--model", "deep_linear", "--dataset", "synthetic", "--image-size", "8", "--seconds", "0.001"]
    result = run(tmp_path, "loop", *options)
    rows = result["measured"]["rows"]
    assert {name: row["facts"]["steps"] for name, row in rows.items()} == {
        **{"step": 1, "plain_step": 1},
        **{"input": 4, "loop": 4},  # 512 images in batches of 128
    }
    assert all(row["median"] > 0 for row in rows.values())
    assert "the loop around it: metrics" in capsys.readouterr().out


@pytest.mark.slow
def test_every_row_of_a_step_is_measured(tmp_path):
    rows = ["sgd", "spectral_norm", "forward", "gradients"]
    options = ["--models", "convnet_8", "--batch", "2", "--compile-rounds", "1", "--rows", *rows]
    measured = run(tmp_path, "step", *options)["measured"]
    network = measured["networks"]["convnet_8"]
    assert {row["status"] for row in network["rows"].values()} == {"measured"}
    assert {row["status"] for row in network["compiling"].values()} == {"measured"}
    convolutions = {name: row for name, row in measured["convolutions"].items() if name.startswith("jax")}
    assert {row["status"] for row in convolutions.values()} == {"measured"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["speed"], "There is no command 'speed'"),
        (["projection", "--rows", "qr"], "benchmarks projection needs rows out of auto"),
        (["projection", "--models", "wrn"], "svb_jax.models needs one of"),
        (["report", "--results", "nowhere"], "needs measurements in nowhere"),
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
    assert all(f"  {command} " in printed for command in ("projection", "step", "scaling", "loop", "report"))
    assert sys.executable not in printed
