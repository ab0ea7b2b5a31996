"""The NNX network is the Linen one, and trains with SVB and BBN through ``nnx.Optimizer``."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import svb_jax
from svb_jax import models

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.fixture(scope="module")
def trained():
    """Run the examples of the documentation, of which NNX is the last, and return what they defined."""
    namespace = {}
    for example in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(example, namespace)
    return namespace


def test_the_example_learns(trained):
    losses = np.asarray(trained["losses"])
    assert losses[-1] < 0.8 * losses[0]


def test_the_example_bounds_every_singular_value(trained):
    params = nnx.state(trained["model"], nnx.Param)
    spectra = svb_jax.singular_values(params)
    assert len(spectra) == 8
    for values in spectra.values():
        assert values.min() >= 1 / 1.05 - 1e-5
        assert values.max() <= 1.05 + 1e-5


def test_the_example_bounds_every_batch_norm(trained):
    spreads = []
    for norm in trained["model"].norms:
        ratio = np.asarray(norm.scale[...] / jnp.sqrt(norm.var[...] + 1e-5))
        spreads.append(ratio.max() / ratio.min())
    # Both ends lie on either side of one mean.
    assert max(spreads) <= 1.05**2 + 1e-4


def test_the_example_would_leave_both_bands_by_itself(trained):
    stats = svb_jax.projection_stats(trained["optimizer"].opt_state)
    assert all(isinstance(value, jax.Array) for value in stats.values())
    assert stats["svb/step"] == stats["bbn/step"] == 8
    assert stats["svb/share_clipped"] > 0
    assert stats["bbn/share_clipped"] > 0


def copy_variables(variables, network):
    """Fill the NNX network with the Linen network's parameters and statistics."""
    params, stats = variables["params"], variables["batch_stats"]
    for number, (conv, norm) in enumerate(zip(network.convs, network.norms, strict=True), start=1):
        conv.kernel[...] = params[f"conv{number:02d}"]["kernel"]
        for leaf, value in (params[f"bn{number:02d}"] | stats[f"bn{number:02d}"]).items():
            getattr(norm, leaf)[...] = value
    network.head.kernel[...] = params["head"]["kernel"]


def test_outputs_and_statistics_are_those_of_the_linen_network():
    linen = models.make("convnet_8", width=0.25)
    images = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    variables = jax.jit(linen.init)(jax.random.key(1, impl="unsafe_rbg"), images)
    network = nnx.jit(lambda: models.NNXConvNet(depth=1, width=0.25, rngs=nnx.Rngs(0)))()
    copy_variables(variables, network)
    call = nnx.jit(lambda network, images: network(images))

    train = jax.jit(lambda v, x: linen.apply(v, x, train=True, mutable=["batch_stats"]))
    logits, updated = train(variables, images)
    np.testing.assert_allclose(call(network, images), logits, atol=1e-5)
    for number, norm in enumerate(network.norms, start=1):
        np.testing.assert_allclose(norm.var[...], updated["batch_stats"][f"bn{number:02d}"]["var"], atol=1e-6)

    network.eval()
    logits = jax.jit(linen.apply)({**variables, **updated}, images)
    np.testing.assert_allclose(call(network, images), logits, atol=1e-5)
