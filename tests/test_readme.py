"""The README's code runs as it is printed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import svb_jax

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(*words):
    """Run the blocks that hold these words, one after another, and return their names."""
    namespace = {"__name__": "readme"}
    for word in words:
        (block,) = [block for block in BLOCKS if word in block]
        exec(compile(block, f"README.md ({word})", "exec"), namespace)
    return namespace


def spectra(params):
    return np.concatenate([np.ravel(values) for values in svb_jax.singular_values(params).values()])


@pytest.mark.parametrize("block", [block for block in BLOCKS if "nnx.Optimizer" not in block])
def test_block_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_train_state_hands_the_statistics_on():
    names = run("jax.grad(", "class TrainState")
    params = jax.tree.map(lambda x: 10 * x, names["params"])
    state = names["TrainState"].create(
        apply_fn=names["model"].apply, params=params, tx=names["tx"], batch_stats=names["batch_stats"]
    )
    for _ in range(2):
        grads = jax.tree.map(jnp.zeros_like, params)
        state = state.apply_gradients(grads=grads, batch_stats=names["batch_stats"])
    assert int(svb_jax.projection_stats(state.opt_state)["bbn/step"]) == 2
    np.testing.assert_allclose(
        [spectra(state.params).min(), spectra(state.params).max()], [1.5, 1.5], rtol=1e-5
    )


def test_nnx_bounds_the_model():
    names = run("nnx.Optimizer")
    values = spectra(names["nnx"].state(names["model"], names["nnx"].Param))
    assert 1 / 1.5 - 5e-6 < values.min() < values.max() < 1.5 + 5e-6
