"""The TrainState for Linen is Flax's own, and hands the statistics on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import svb_jax
from svb_jax.linen import TrainState


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4, use_bias=False)(x)
        return nn.BatchNorm(use_running_average=not train)(x)


X = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
VARIABLES = Net().init(jax.random.key(0), X, train=False)


def create(cls, tx, **variables):
    return cls.create(apply_fn=Net().apply, tx=tx, **variables)


@jax.jit
def step(state):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, changed = state.apply_fn(variables, X, train=True, mutable=["batch_stats"])
        return (y**2 * jnp.arange(1.0, 5.0)).mean(), changed["batch_stats"]

    grads, batch_stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats)


def test_bbn_gets_the_statistics_as_the_step_left_them():
    tx = svb_jax.bbn(svb_jax.svb(optax.sgd(0.2), epsilon=0.1), epsilon=0.1)
    state = step(create(TrainState, tx, **VARIABLES))
    ratio = state.params["BatchNorm_0"]["scale"] / jnp.sqrt(state.batch_stats["BatchNorm_0"]["var"] + 1e-5)
    assert not np.allclose(state.batch_stats["BatchNorm_0"]["var"], 1.0)
    # A free step of this size takes the scales further apart than the band is wide.
    free = step(create(TrainState, optax.sgd(0.2), **VARIABLES)).params["BatchNorm_0"]["scale"]
    assert free.max() / free.min() > 1.21 + 1e-3
    assert ratio.max() / ratio.min() <= 1.21 + 1e-4
    assert svb_jax.projection_stats(state.opt_state)["bbn/step"] == 1
    assert state.tx is tx
    assert int(step(state).step) == 2


def test_without_a_bound_it_is_flax_own():
    grads = jax.tree.map(jnp.ones_like, VARIABLES["params"])
    ours = create(TrainState, optax.adam(0.1), **VARIABLES)
    ours = ours.apply_gradients(grads=grads, batch_stats=VARIABLES["batch_stats"])
    plain = create(train_state.TrainState, optax.adam(0.1), params=VARIABLES["params"])
    plain = plain.apply_gradients(grads=grads)
    np.testing.assert_array_equal(ours.params["Dense_0"]["kernel"], plain.params["Dense_0"]["kernel"])


def test_flax_own_is_told_of_ours():
    state = create(train_state.TrainState, svb_jax.bbn(optax.sgd(0.1), 0.5), params=VARIABLES["params"])
    with pytest.raises(ValueError, match=r"svb_jax\.linen\.TrainState"):
        state.apply_gradients(grads=VARIABLES["params"])
