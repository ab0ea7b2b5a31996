"""The study of a small GPT: its text, its network, its band, and the norm of its Jacobian."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

import svb_jax
from svb_jax.experiments import characters, tables, transformer
from svb_jax.experiments.sensitivity import jacobian_norms
from tests.test_report import ROOT, cells, recorded

SMALL = transformer.smoke(transformer.ROWS["no-norm-band-0.016"])


def test_the_text_is_the_same_characters_in_the_same_order():
    text = characters.load(length=5_000)
    again = characters.load(length=5_000)
    assert text.sha256 == again.sha256
    joined = np.concatenate([text.train, text.validation])
    letters = "".join(characters.NEWLINE_AND_PRINTABLE[number] for number in joined)
    assert "assert_stmt" in letters
    assert len(letters) == 5_000


def test_a_jacobian_norm_is_the_largest_singular_value():
    matrix = np.random.default_rng(0).normal(size=(5, 3)) @ np.diag([4.0, 1.0, 0.5])
    norms = jacobian_norms(lambda x: jnp.asarray(matrix, jnp.float32) @ x, jnp.ones((2, 3)))
    np.testing.assert_allclose(norms, np.linalg.svd(matrix, compute_uv=False)[0], rtol=1e-4)


def test_a_character_sees_no_later_one():
    model = transformer.make_model(SMALL, 96)
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, 96)
    variables = model.init(jax.random.key(1), tokens)
    changed = tokens.at[0, 10].add(1)
    before, after = (np.asarray(model.apply(variables, each)) for each in (tokens, changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert np.abs(before[:, 10:] - after[:, 10:]).max() > 1e-3


def test_a_bounded_run_ends_with_every_matrix_in_the_band(tmp_path):
    config = dataclasses.replace(SMALL, run_dir=tmp_path / "run")
    transformer.train(config)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 1 / 1.5 - 1e-5 <= result["sigma_min"] < 0.9
    assert 1.1 < result["sigma_max"] <= 1.5 + 1e-5
    with np.load(tmp_path / "run" / "spectrum.npz") as spectra:
        kernels = [name for name in spectra.files if name.startswith("final/")]
    # Four of attention and two of the perceptron in its one block, and the head.
    assert len(kernels) == 7


def test_rows_without_a_band_are_left_free():
    tx = transformer.make_optimizer(transformer.ROWS["adamw-0.016"], 0.016)
    assert svb_jax.projection_stats(tx.init({"head": {"kernel": jnp.eye(3)}})) == {}


def test_the_guide_has_the_numbers_of_the_records():
    runs = recorded(transformer.EXPERIMENT, "full").runs
    table = tables.results_table(transformer.EXPERIMENT, runs)
    guide = (ROOT / "docs/transformer.md").read_text()
    for kind in ("", "no-norm-"):
        for rate in transformer.PLAIN:
            rows = [f"{kind}adamw-{rate}", f"{kind}band-{rate}"]
            losses = [cells(table, row)["validation loss nats"].strip("*") for row in rows]
            difference = cells(table, rows[1])["difference, paired"].partition(";")[0]
            norms = [np.mean([run.result["jacobian_norm"] for run in runs[row]]) for row in rows]
            shown = ["-" if np.isnan(norm) else f"{norm:.1f}" for norm in norms]
            assert f"| {' | '.join([rate, *losses, difference, *shown])} |" in guide
