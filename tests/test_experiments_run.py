"""What ``run`` runs, skips and keeps; and one row of every experiment, trained for seconds."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from svb_jax import models
from svb_jax.experiments import catalogue, listing, record, report, runner, table1
from svb_jax.experiments.__main__ import main
from svb_jax.training.config import TrainConfig
from svb_jax.training.loop import Diverged
from svb_jax.training.optimizer import Span, hyperparameters, make_optimizer
from svb_jax.training.parallel import AXIS, Engine
from svb_jax.training.run_folder import describe_hardware
from svb_jax.training.sampling import steps_per_epoch
from svb_jax.training.state import create_state
from svb_jax.training.step import Batch, make_train_step
from tests.test_report import write_run

ALL_ROWS = [f"{name}/{row}" for name, experiment in catalogue.EXPERIMENTS.items() for row in experiment.rows]


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory):
    """One folder for all, so that rows which differ in a number only share what was compiled."""
    # Steps of seconds are not worth the minutes that it takes to compile them well.
    jax.config.update("jax_disable_most_optimizations", True)
    yield tmp_path_factory.mktemp("runs")
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def calls(monkeypatch):
    """Put a table1 into the catalogue that writes its runs by hand; yields what it was asked to train."""
    trained = []

    def train(config: TrainConfig) -> None:
        trained.append(config)
        if config.bbn_epsilon is not None:
            raise Diverged("The loss is nan at step 3.")
        row = "sgd" if config.svb_epsilon is None else "svb"
        write_run(config.run_dir.parents[3], table1.EXPERIMENT, row, config.seed, 40.0)

    stub = dataclasses.replace(table1.EXPERIMENT, train=train)
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"table1": stub})
    return trained


def run(tmp_path, *names: str, **options) -> None:
    options = {"scale": "small", "runs": tmp_path / "runs", "results": tmp_path / "results", **options}
    runner.Run(names=names, **options).run()


def test_a_result_without_its_error_is_not_recorded(calls, tmp_path):
    run(tmp_path, "table1/sgd", results=tmp_path / "elsewhere")
    [path] = (tmp_path / "runs").glob("**/result.json")
    path.write_text(path.read_text().replace('"test_error"', '"error"'))
    (path.parent / "SHA256SUMS").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"run needs test_error in the result of table1/sgd, small, seed 0"):
        run(tmp_path, "table1/sgd")
    assert not (tmp_path / "results").exists()


def test_run_keeps_a_record_of_each_run_and_does_none_twice(calls, tmp_path):
    run(tmp_path, "table1/sgd", "table1/svb", seeds=(0, 4))
    done = [(config.svb_epsilon, config.seed) for config in calls]
    assert done == [(None, 0), (0.5, 0), (None, 4), (0.5, 4)]
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("results/*/*/*/*"))
    assert kept == [
        f"results/table1/{row}/small/seed{seed}.json" for row in ("sgd", "svb") for seed in (0, 4)
    ]
    run(tmp_path, "table1/sgd", "table1/svb", seeds=(0, 4))
    assert len(calls) == 4


def test_run_skips_what_is_recorded_elsewhere_and_what_is_complete_here(calls, tmp_path):
    run(tmp_path, "table1/svb")
    run(tmp_path, "table1/svb", runs=tmp_path / "other machine")
    assert len(calls) == 1
    record.path_of("table1", "svb", "small", 0, tmp_path / "results").unlink()
    run(tmp_path, "table1/svb")
    assert len(calls) == 1
    assert record.path_of("table1", "svb", "small", 0, tmp_path / "results").is_file()


def test_run_hands_its_options_on(calls, tmp_path, capsys):
    run(tmp_path, "table1/sgd", devices=3, data_dir=tmp_path / "sets")
    (config,) = calls
    hint = f"Next: svb report --runs {tmp_path / 'runs'} --results {tmp_path / 'results'}"
    assert capsys.readouterr().out.splitlines()[-1] == hint
    assert (config.devices, config.data_dir) == (3, tmp_path / "sets")
    assert config.run_dir == tmp_path / "runs/table1/sgd/small/seed0"


def test_a_run_that_diverges_is_told_and_stops_no_other(calls, tmp_path):
    with pytest.raises(Diverged, match=r"table1/svb\+bbn, small, seed 0"):
        run(tmp_path, "table1/svb+bbn", "table1/sgd")
    assert len(calls) == 2
    assert len(list(tmp_path.glob("results/table1/*"))) == 1


@pytest.mark.parametrize(("most_mapped", "kept"), [(0, 0), (10**9, 1)])
def test_a_run_lets_go_of_compiled_programs_when_there_are_many(most_mapped, kept, monkeypatch, tmp_path):
    step = jax.jit(lambda x: x + 1)

    def train(config: TrainConfig) -> None:
        step(1.0)
        assert step._cache_size() == 1
        write_run(config.run_dir.parents[3], table1.EXPERIMENT, "sgd", config.seed, 40.0)

    stub = dataclasses.replace(table1.EXPERIMENT, train=train)
    maps = tmp_path / "maps"
    maps.write_text("00400000-00452000 r-xp\n" * 3)
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"table1": stub})
    monkeypatch.setattr(runner, "MAPPED", maps)
    monkeypatch.setattr(runner, "MOST_MAPPED", most_mapped)
    run(tmp_path, "table1/sgd")
    assert step._cache_size() == kept


@pytest.mark.parametrize(("usable", "words"), [({3}, "1 core)"), ({0, 1, 5}, "3 cores)")])
def test_results_name_the_cores_that_a_run_may_use(usable, words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: usable, raising=False)
    assert describe_hardware(jax.devices("cpu")[:1]).endswith(words)


def test_wrong_names_end_with_code_2(capsys):
    assert main(["run", "tabel1"]) == 2
    assert "Did you mean 'table1'" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "4294967296"])
def test_seeds_that_no_generator_takes_are_refused_before_anything_runs(seed, tmp_path, capsys):
    assert (
        main(["run", "deep_linear", "--scale", "smoke", "--runs", str(tmp_path), "--seeds", "0", seed]) == 2
    )
    assert capsys.readouterr().err == f"run needs seeds of at least 0 and below 2**32, got {seed}.\n"
    assert list(tmp_path.iterdir()) == []


def check_smoke(name: str, runs, tmp_path) -> None:
    experiment, (row,) = catalogue.find(name)
    run(tmp_path, name, scale="smoke", runs=runs)
    assert not (tmp_path / "results").exists()
    finished = record.read_run(runs / experiment.name / row / "smoke" / "seed0")
    bound = getattr(experiment.rows[row], "svb_epsilon", None)
    assert set(finished.spectra["initial"]) == set(finished.spectra["final"])
    config = experiment.configure(row, scale="smoke", seed=0)
    if isinstance(config, TrainConfig):
        assert [entry["epoch"] for entry in finished.metrics] == [1, 2]
        assert 0 <= finished.result["test_error"] <= 100
        matrices = models.summary(config.model, width=config.width, depth=config.depth).matrices
        assert set(finished.spectra["final"]) == set(matrices)
        assert (finished.result["test_error_projected"] is None) == (bound is None)
        assert ("svb/sigma_max" in finished.metrics[-1]) == (bound is not None)


@pytest.mark.parametrize("name", catalogue.EXPERIMENTS)
def test_one_row_of_every_experiment_at_smoke_scale(name, smoke_runs, tmp_path):
    check_smoke(f"{name}/{catalogue.EXPERIMENTS[name].smoke_row}", smoke_runs, tmp_path)


def test_smoke_runs_make_a_report(smoke_runs, tmp_path):
    if not list(smoke_runs.glob("table1/*/smoke/seed0/result.json")):
        check_smoke("table1/svb+bbn", smoke_runs, tmp_path)
    report.Report(names=("table1",), out=tmp_path, runs=smoke_runs, results=tmp_path / "none").run()
    assert "table1, smoke" in (tmp_path / "report.md").read_text()


def kinds_of_full_rows() -> dict[str, TrainConfig]:
    """One row of each network, data set, batch size and choice of bounds: the others trace the same."""
    kinds = {}
    for name in ALL_ROWS:
        experiment, (row,) = catalogue.find(name)
        config = experiment.rows[row]
        if isinstance(config, TrainConfig):
            kind = (config.model, config.dataset, config.batch_size, experiment.method(row))
            kinds.setdefault(kind, (name, config))
    return dict(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds_of_full_rows())
def test_training_step_of_every_full_row_traces_at_full_size(name):
    config = kinds_of_full_rows()[name]
    model = models.make(config.model, num_classes=listing.CLASSES[config.dataset], axis_name=AXIS)
    per_epoch = steps_per_epoch(listing.IMAGES[config.dataset], config.batch_size)
    span, hyper = Span(per_epoch, config.epochs * per_epoch), hyperparameters(config)
    optimizer = make_optimizer(config, hyper, span, axis_name=AXIS)
    state = jax.eval_shape(lambda: create_state(model, optimizer, 0, model.image_shape))
    step = make_train_step(config, model, span, augments=config.dataset != "imagenet2012", mirror=True)
    batch = Batch(
        images=jax.ShapeDtypeStruct((1, 1, config.batch_size, *model.image_shape), np.uint8),
        labels=jax.ShapeDtypeStruct((1, 1, config.batch_size), np.int32),
        stop=jax.ShapeDtypeStruct((1,), np.float32),
    )
    mapped = Engine("shard_map", 1).compile(step, num_replicated=2)
    after, _ = jax.eval_shape(mapped, state, hyper, batch)
    sizes = [leaf.size for leaf in jax.tree.leaves(after.params)]
    assert sum(sizes) == listing.cost(config).parameters
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, state)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_every_row_at_smoke_scale(name, smoke_runs, tmp_path):
    check_smoke(name, smoke_runs, tmp_path)
