"""Every row has the settings and the numbers that the paper prints, at every scale."""

import dataclasses
from pathlib import Path

import pytest

from svb_jax import models
from svb_jax.experiments import (
    catalogue,
    convergence,
    figure2,
    rates,
    record,
    runner,
    table1,
    table2,
    table3,
    table4,
)
from svb_jax.experiments.experiment import Printed
from svb_jax.experiments.listing import List, cost
from svb_jax.experiments.scales import SCALES
from svb_jax.training import sampling
from svb_jax.training.config import TrainConfig
from svb_jax.training.optimizer import Span

ROOT = Path(__file__).parents[1]
PRINTED = [name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.paper]
PRINTED_ROWS = [(name, row) for name in PRINTED for row in catalogue.EXPERIMENTS[name].rows]
TRAINED = [name for name in catalogue.EXPERIMENTS if name not in ("deep_linear", "transformer")]
ROWS = [(name, row) for name in TRAINED for row in catalogue.EXPERIMENTS[name].rows]


def bands(config: TrainConfig) -> tuple[float | None, float | None]:
    return config.svb_epsilon, config.bbn_epsilon


def test_every_figure_and_table_is_there():
    assert list(catalogue.EXPERIMENTS) == [
        *(
            "convergence",
            "convergence_resnet",
            "rates",
            "figure1",
            "figure2",
            "table1",
            "table2",
            "table3",
            "table4",
            "deep_linear",
        ),
        "transformer",
    ]


def test_figure2_has_every_line_of_both_depths():
    for depth in (20, 38):
        rows = {name: row for name, row in figure2.ROWS.items() if name.startswith(f"{depth}-")}
        assert {row.model for row in rows.values()} == {f"convnet_{depth}"}
        alone = [(epsilon, None) for epsilon in (0.01, 0.05, 0.2, 0.5, 1)]
        together = [(fixed, epsilon) for fixed in (0.05, 0.5) for epsilon in (0.2, 0.5, 1, 2, 4)]
        assert list(map(bands, rows.values())) == [(None, None), *alone, *together]


def test_figure2_panels_hold_all_lines_and_those_of_one_depth_only():
    shown = [row for rows in figure2.EXPERIMENT.panels.values() for row in rows]
    assert set(shown) == set(figure2.ROWS)
    assert len(figure2.EXPERIMENT.panels) == 6
    for title, rows in figure2.EXPERIMENT.panels.items():
        assert all(row.startswith(title[:2]) for row in rows)


def test_figure2_prints_the_best_error_of_each_method():
    numbers = [figure2.PAPER[row].error for row in ("20-sgd", "20-svb-0.2", "20-svb-0.05+bbn-4")]
    assert numbers == [9.21, 8.03, 7.85]
    numbers = [figure2.PAPER[row].error for row in ("38-sgd", "38-svb-1", "38-svb-0.5+bbn-0.2")]
    assert numbers == [12.08, 9.90, 9.66]


def test_table1_as_printed():
    assert [str(number) for number in table1.PAPER.values()] == [
        *("6.10 (6.22 ± 0.14)", "5.65 (5.79 ± 0.10)", "5.37 (5.49 ± 0.11)")
    ]
    assert list(map(bands, table1.ROWS.values())) == [(None, None), (0.5, None), (0.5, 1.0)]
    assert {row.model for row in table1.ROWS.values()} == {"preact_resnet_68"}
    assert table1.EXPERIMENT.seeds == 5


def test_table2_as_printed():
    errors = [number.error for number in table2.PAPER.values()]
    assert errors == [5.40, 4.17, 21.48, 18.30, 4.50, 3.58, 20.78, 18.32]
    assert {bands(row) for row in table2.ROWS.values()} == {(None, None), (0.5, 1.0)}
    quoted = [(row.cifar10, row.cifar100, row.layers) for row in table2.PRIOR_ART]
    assert quoted == [
        *((8.81, None, None), (8.39, None, 19), (7.97, None, None), (7.54, 32.24, 19), (6.43, 25.16, 110)),
        *((4.91, None, 1202), (4.92, 22.71, 1001), (4.17, 20.50, 28), (3.77, 19.73, None)),
    ]


def test_table3_as_printed():
    errors = [number.error for number in table3.PAPER.values()]
    assert errors == [3.78, 3.24, 19.92, 17.47, 3.64, 3.06, 19.25, 16.90]
    assert {bands(row) for row in table3.ROWS.values()} == {(None, None), (0.5, 0.2)}
    for row in table3.ROWS.values():
        assert (row.epochs, row.learning_rate_stages) == (300, 150)
        assert row.batch_size == {"cifar10": 64, "cifar100": 128}[row.dataset]
    (densenet,) = table3.PRIOR_ART
    assert (densenet.cifar10, densenet.cifar100, densenet.layers) == (3.46, 17.18, 190)


def test_table4_runs_both_readings_of_its_second_row():
    assert list(map(bands, table4.ROWS.values())) == [(None, None), (0.5, None), (0.5, 1.0)]
    assert {row.learning_rate for row in table4.ROWS.values()} == {0.045}
    assert table4.PAPER["sgd"] == Printed(error=21.61, top5=5.91)
    assert (table4.PAPER["svb"].error, table4.PAPER["svb"].top5) == (21.20, 5.57)


@pytest.mark.parametrize("name", PRINTED)
def test_full_rows_follow_the_common_recipe(name):
    for row in catalogue.EXPERIMENTS[name].rows.values():
        assert (row.momentum, row.nesterov, row.weight_decay) == (0.9, True, 1e-4)
        assert (row.final_learning_rate, row.project_every_epochs) == (0.001, 1.0)
        assert row.project_after_last_epoch is False
        if name not in ("table3", "table4"):
            assert (row.epochs, row.batch_size, row.learning_rate) == (160, 128, 0.5)


@pytest.mark.parametrize(("name", "row"), PRINTED_ROWS)
def test_every_row_has_a_paper_number_and_one_of_its_baseline(name, row):
    experiment = catalogue.EXPERIMENTS[name]
    assert row in experiment.paper
    if experiment.method(row) == "sgd":
        assert experiment.baseline(row) is None
    else:
        base = experiment.baseline(row)
        assert base is not None
        assert experiment.method(base) == "sgd"
        changed = {"svb_epsilon", "bbn_epsilon"}
        pair = [dataclasses.asdict(experiment.rows[which]) for which in (row, base)]
        assert all(pair[0][key] == pair[1][key] for key in pair[0] if key not in changed)


@pytest.mark.parametrize("scale", SCALES)
def test_scales_leave_alone_what_a_row_is_about(scale):
    kept = ("svb_epsilon", "bbn_epsilon", "bbn_kind", "learning_rate", "final_learning_rate", "momentum")
    for name, row in ROWS:
        before = catalogue.EXPERIMENTS[name].rows[row]
        after = SCALES[scale](before)
        assert [getattr(after, key) for key in kept] == [getattr(before, key) for key in kept]
        assert after.model in models.MODELS


def test_small_scale_is_real_cifar_at_half_size():
    row = SCALES["small"](figure2.ROWS["20-svb-0.5"])
    assert (row.dataset, row.first, row.image_size, row.epochs) == ("cifar10", 6_400, 16, 10)
    assert (row.learning_rate_stages, row.width, row.depth) == (10, 1.0, None)
    assert SCALES["small"](table1.ROWS["svb"]).depth == 3


def test_medium_scale_is_all_of_cifar_at_half_size():
    row = SCALES["medium"](figure2.ROWS["20-svb-0.5"])
    assert (row.dataset, row.first, row.image_size, row.epochs) == ("cifar10", None, 16, 15)
    assert (row.learning_rate_stages, row.project_every_epochs) == (80, 1)
    assert SCALES["medium"](table1.ROWS["svb"]).depth == 3


def test_long_scale_is_medium_with_more_epochs():
    row = figure2.ROWS["20-svb-0.5"]
    assert SCALES["long"](row) == dataclasses.replace(SCALES["medium"](row), epochs=40)


def test_convergence_compares_every_row_with_sgd_at_its_own_rate():
    experiment = convergence.EXPERIMENT
    assert {experiment.baseline(row) for row in experiment.rows if row != "sgd"} == {"sgd"}
    assert experiment.baseline("sgd") is None
    rates_of = {row: config.learning_rate for row, config in experiment.rows.items()}
    assert rates_of["sgd-0.5"] == 0.5
    assert set(rates_of.values()) <= set(rates.RATES)


def test_convergence_projects_once_an_epoch_or_every_ten_steps():
    span = Span(steps_per_epoch=sampling.steps_per_epoch(50_000, 128), total_steps=5_865)
    configs = {row: convergence.EXPERIMENT.configure(row, scale="medium", seed=0) for row in convergence.ROWS}
    every = {row: span.every(config.project_every_epochs) for row, config in configs.items()}
    assert every.pop("svb-every-10") == 10
    assert set(every.values()) == {391}


def test_rates_are_judged_on_held_out_training_images():
    configs = [rates.EXPERIMENT.configure(row, scale="medium", seed=0) for row in rates.ROWS]
    assert {config.holdout for config in configs} == {5_000}
    assert {config.epochs for config in configs} == {5}
    assert all(config.holdout is None for config in convergence.ROWS.values())


def test_convergence_has_the_rates_that_were_best_on_held_out_images():
    records = record.collect(ROOT / "experiments/results", ROOT / "none")
    errors = {run.row: run.result["test_error"] for run in records if run.experiment == "rates"}
    for row in ("sgd", "svb"):
        best = min((name for name in errors if name.startswith(f"{row}-")), key=errors.__getitem__)
        assert best == f"{row}-{convergence.ROWS[row].learning_rate:g}"
    assert "0.05 for both" in " ".join(rates.EXPERIMENT.notes)


def test_smoke_scale_needs_no_data():
    assert {SCALES["smoke"](catalogue.EXPERIMENTS[name].rows[row]).dataset for name, row in ROWS} == {
        "digits"
    }


def test_costs_of_every_full_row_are_those_of_the_paper():
    counted = {f"{name}/{row}": cost(catalogue.EXPERIMENTS[name].rows[row]) for name, row in ROWS}
    millions = {key: round(value.parameters / 1e6, 2) for key, value in counted.items()}
    assert millions["figure2/20-sgd"] == 0.27
    assert millions["figure1/svb"] == 0.56
    assert millions["table1/sgd"] == 1.05
    assert millions["table2/wrn-cifar10-sgd"] == 36.81
    assert millions["table3/wrn-28-16-cifar10-sgd"] == 94.20
    assert round(counted["table4/svb"].parameters / 1e6, 1) == 32.5
    assert counted["table1/sgd"].steps == 391 * 160
    assert counted["table3/wrn-28-10-cifar10-sgd"].steps == 782 * 300
    assert counted["table3/wrn-28-10-cifar100-sgd"].steps == 391 * 300
    assert counted["table4/sgd"].steps == 10_010 * 160
    # Forward and backward: six operations a multiply-add, for 128 images a step.
    twenty = counted["figure2/20-sgd"]
    assert twenty.petaflops == pytest.approx(6 * twenty.multiply_adds * 128 * 391 * 160 / 1e15)


def test_list_prints_every_row_with_its_cost(capsys):
    List(costs=True).run()
    printed = capsys.readouterr().out
    for name, experiment in catalogue.EXPERIMENTS.items():
        for row in experiment.rows:
            assert f"{name}/{row}" in printed


@pytest.mark.parametrize(("asked", "nearest"), [("tabel3", "table3"), ("table1/sbv", "svb"), ("", "table1")])
def test_an_unknown_name_is_answered_with_the_nearest(asked, nearest):
    with pytest.raises(catalogue.UnknownNameError, match=nearest):
        catalogue.find(asked)


def test_run_without_a_name_is_refused():
    with pytest.raises(ValueError, match="needs the name"):
        runner.Run().run()
