"""The quantities of section IV on networks built from prescribed singular values, and a short study."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest

import svb_jax
from svb_jax.experiments import deep_linear, direction_plots, directions, record, report
from svb_jax.experiments.directions import Directions

STRENGTHS = np.array([[2.0, 1.0, 0.5], [1.5, 1.0, 0.25], [1.0, 2.0, 4.0]])
"""The singular values of three layers, one column a direction."""


def orthogonal(seed: int, size: int = 3) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


@pytest.fixture
def bases():
    return [orthogonal(seed) for seed in range(4)]


@pytest.fixture
def aligned(bases):
    """Kernels whose output directions are the next one's input directions, with the given strengths."""
    kernels = [a @ np.diag(s) @ b.T for (a, b), s in zip(pairwise(bases), STRENGTHS, strict=True)]
    return kernels, Directions(bases[0], bases[-1], np.array([3.0, 1.0, 1.0]))


def test_strength_of_a_direction_is_the_product_of_its_singular_values(aligned):
    assert directions.strengths(*aligned) == pytest.approx([3.0, 2.0, 0.5])
    assert directions.energies(*aligned) == pytest.approx([0.0, 0.5, 0.125])


def test_gains_are_the_singular_values_where_layers_are_aligned(aligned):
    assert directions.gains(*aligned) == pytest.approx(STRENGTHS.T)


def test_errors_grow_by_the_singular_values_on_their_way_back(aligned):
    expected = [[3.0, 2.0, 0.5], [1.5, 2.0, 1.0], [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]]
    assert directions.error_components(*aligned) == pytest.approx(np.array(expected))


def test_aligned_layers_mix_nothing_and_turned_ones_do():
    lower, upper = np.diag([4.0, 3.0]), np.diag([2.0, 1.0])
    assert directions.mixing(lower, upper) == pytest.approx(np.array([[8.0, 0.0], [0.0, 3.0]]))
    cos, sin = np.cos(0.3), np.sin(0.3)
    turned = directions.mixing(lower, np.array([[cos, sin], [-sin, cos]]) @ upper)
    assert turned == pytest.approx(np.array([[8 * cos, 6 * sin], [4 * sin, 3 * cos]]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    config = deep_linear.EXPERIMENT.configure("svb-0.2", scale="smoke", seed=3, runs=runs)
    deep_linear.train(config)
    return config


def test_study_ends_in_the_band_and_learns(finished):
    result = json.loads((finished.run_dir / "result.json").read_text())
    first, *_, last = record.read_run(finished.run_dir).metrics
    assert last["energy"] < 0.1 * first["energy"]
    assert 1 / 1.2 - 1e-5 <= last["sigma_min"] <= last["sigma_max"] <= 1.2 + 1e-5
    # Four directions, six layers, and the errors before and after each.
    assert np.shape(result["gains"]) == (4, 6)
    assert np.shape(result["error_components"]) == (7, 4)
    lengths = np.prod(result["gains"], axis=1)
    assert np.all(np.abs(result["strengths"]) <= lengths * 1.001)


def test_study_repeats_itself(finished, tmp_path):
    again = dataclasses.replace(finished, run_dir=tmp_path / "table/row/smoke/seed3")
    deep_linear.train(again)
    numbers = [json.loads((c.run_dir / "result.json").read_text())["strengths"] for c in (finished, again)]
    assert numbers[0] == numbers[1]


def test_initial_weights_are_what_the_row_says():
    orthogonal_row = svb_jax.singular_values(deep_linear.make_params(deep_linear.BASE))
    assert all(values == pytest.approx(1, abs=1e-5) for values in orthogonal_row.values())
    gaussian = svb_jax.singular_values(deep_linear.make_params(deep_linear.GAUSSIAN))
    assert min(values.min() for values in gaussian.values()) < 0.2
    assert max(values.max() for values in gaussian.values()) > 1.5


def test_study_is_reported_with_all_its_figures(finished):
    records = record.collect(finished.run_dir.parents[4] / "none", finished.run_dir.parents[3])
    (chapter,) = report.chapters_of([deep_linear.EXPERIMENT], records)
    page = report.to_html([chapter])
    assert page.count("<figure>") == 5
    assert "directions learned" in page


def test_energies_are_drawn_over_the_decades_that_they_span(finished):
    records = record.collect(finished.run_dir.parents[4] / "none", finished.run_dir.parents[3])
    (chapter,) = report.chapters_of([deep_linear.EXPERIMENT], records)
    for axes in direction_plots.energy(deep_linear.EXPERIMENT, chapter.runs).axes:
        drawn = np.concatenate([line.get_ydata() for line in axes.get_lines()])
        low, high = axes.get_ylim()
        assert drawn.min() / 3 < low <= drawn.min() <= drawn.max() <= high < 3 * drawn.max()
