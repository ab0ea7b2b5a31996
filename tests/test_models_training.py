"""Every network starts orthogonal and trains, at a reduced size; two at full size, marked slow."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import models
from svb_jax._src.spectrum import singular_values

IMAGE_SHAPES = {"inception_resnet_imagenet": (75, 75, 3), "mlp": (8, 8, 1), "deep_linear": (8, 8, 1)}
# Names left out differ from one of these by depth or by width alone.
SETTINGS = {
    "convnet_8": {"width": 0.25},
    "preact_resnet_20": {"width": 0.25, "depth": 1},
    "wrn_28_10": {"width": 0.05, "depth": 1},
    "wrn_28_10_authors": {"width": 0.05, "depth": 1},
    "inception_resnet_cifar": {"width": 0.05, "depth": 1},
    "inception_resnet_imagenet": {"width": 0.05, "depth": 1},
    "mlp": {"width": 0.25},
    "deep_linear": {"width": 0.25},
}
# Each is run once or twice: what counts is the time to compile, which the default generator multiplies.
KEY = jax.random.key(0, impl="unsafe_rbg")
quick_jit = partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)


def batch_for(name, size=4):
    shape = (size, *IMAGE_SHAPES.get(name, (8, 8, 3)))
    images = jax.random.normal(jax.random.key(1), shape)
    return images, jnp.arange(size) % 10


@cache
def reduced(name):
    """Return the reduced network's initial variables."""
    return quick_jit(models.make(name, **SETTINGS[name]).init)(KEY, batch_for(name)[0])


def train_step(model, variables, images, labels):
    """Return the loss, the gradients and the variables after one step of gradient descent."""

    def loss_of(params):
        logits, updated = model.apply(
            {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updated

    (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
    params = jax.tree.map(lambda param, grad: param - 1e-3 * grad, variables["params"], grads)
    return loss, grads, {**variables, **updated, "params": params}


def check_all_ones(name, params, **settings):
    spectra = singular_values(params)
    assert set(spectra) == set(models.summary(name, **settings).matrices)
    for values in spectra.values():
        np.testing.assert_allclose(values, 1.0, atol=1e-5)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_singular_value_starts_at_one(name):
    check_all_ones(name, reduced(name)["params"], **SETTINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_every_singular_value_starts_at_one_at_full_size(name):
    images = jnp.zeros((1, *models.MODELS[name].input_shape))
    check_all_ones(name, models.make(name).init(KEY, images)["params"])


def check_step(step, variables, images, labels):
    loss, grads, updated = step(variables, images, labels)
    assert np.isfinite(loss)
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.any(np.asarray(grad) != 0), path
    assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {jnp.dtype(jnp.float32)}
    assert step(updated, images, labels)[0] < loss


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float32) for name in SETTINGS),
        *((name, jnp.bfloat16) for name in SETTINGS if name != "inception_resnet_imagenet"),
        pytest.param("inception_resnet_imagenet", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_reaches_every_parameter(name, dtype):
    model = models.make(name, dtype=dtype, **SETTINGS[name])
    step = quick_jit(partial(train_step, model))
    check_step(step, reduced(name), *batch_for(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrn_28_10", "inception_resnet_cifar"])
def test_a_training_step_at_full_size(name):
    model = models.make(name)
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    check_step(jax.jit(partial(train_step, model)), model.init(KEY, images), images, jnp.arange(2))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_bfloat16_is_what_every_layer_computes_in(name):
    model = models.make(name, dtype=jnp.bfloat16, **SETTINGS[name])
    run = partial(model.init_with_output, jax.random.key(0), capture_intermediates=True)
    logits, variables = jax.eval_shape(run, batch_for(name)[0])
    assert logits.dtype == jnp.float32
    layers = [leaf for path, leaf in jax.tree.leaves_with_path(variables["intermediates"]) if len(path) > 2]
    assert {leaf.dtype for leaf in layers} == {jnp.dtype(jnp.bfloat16)}
