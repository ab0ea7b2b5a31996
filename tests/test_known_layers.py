"""How the default reads every layer of Flax, Haiku and Equinox that has weights: all of it, in one table."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from svb_jax import describe

KEY = jax.random.key(0)
RAISES = "cannot tell"
LEFT_ALONE = "found no weight matrix"


# Each returns a function that makes the parameters, or their shapes.


def linen(module, *shape, dtype=jnp.float32):
    return lambda: jax.eval_shape(module.init, KEY, jnp.ones((1, *shape), dtype))["params"]


def cell(module):
    def params():
        carry = module.initialize_carry(KEY, (1, 6))
        return jax.eval_shape(module.init, KEY, carry, jnp.ones((1, 6)))["params"]

    return params


def haiku(layer, *shape, dtype=jnp.float32):
    network = hk.transform_with_state(lambda x: layer(x))
    return lambda: jax.eval_shape(network.init, KEY, jnp.ones((1, *shape), dtype))[0]


def of_nnx(make):
    return lambda: nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param)


def equinox(layer, *arguments, **options):
    return lambda: eqx.filter(layer(*arguments, key=KEY, **options), eqx.is_inexact_array)


def gates(names, inputs=6, hidden=4):
    """Return what is expected of a cell with a kernel for each gate."""
    return {
        f"{side}{gate}/kernel": (1, (hidden, size))
        for gate in names
        for side, size in (("i", inputs), ("h", hidden))
    }


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral((2, 2), axis=(-2, -1))(x)


# What is expected: (how many matrices, (outputs, inputs)) by path, or what is raised.
LAYERS = {
    "linen Dense": (linen(nn.Dense(4), 6), {"kernel": (1, (4, 6))}),
    "linen DenseGeneral, rank 3": (linen(nn.DenseGeneral((2, 2)), 6), RAISES),
    "linen DenseGeneral, rank 4": (
        linen(General(), 3, 2),
        RAISES,
    ),
    "linen Einsum": (linen(nn.Einsum((6, 4), "bi,io->bo"), 6), {"kernel": (1, (4, 6))}),
    "linen Conv over one axis": (linen(nn.Conv(4, (3,)), 5, 2), RAISES),
    "linen Conv over two axes": (linen(nn.Conv(4, (3, 3)), 5, 5, 2), {"kernel": (1, (4, 18))}),
    "linen Conv of grey images": (linen(nn.Conv(4, (3, 3)), 5, 5, 1), {"kernel": (1, (4, 9))}),
    "linen Conv over three axes": (linen(nn.Conv(4, (3, 3, 3)), 5, 5, 5, 2), RAISES),
    "linen ConvTranspose": (linen(nn.ConvTranspose(4, (3, 3)), 5, 5, 2), {"kernel": (1, (4, 18))}),
    "linen ConvLocal": (linen(nn.ConvLocal(4, (3,)), 5, 2), RAISES),
    "linen Embed": (linen(nn.Embed(9, 4), dtype=jnp.int32), LEFT_ALONE),
    "linen LayerNorm": (linen(nn.LayerNorm(), 6), LEFT_ALONE),
    "linen PReLU": (linen(nn.PReLU(), 6), LEFT_ALONE),
    "linen attention": (linen(nn.MultiHeadDotProductAttention(2), 3, 6), RAISES),
    "linen GRUCell": (cell(nn.GRUCell(4)), gates("rzn")),
    "linen LSTMCell": (cell(nn.LSTMCell(4)), gates("ifgo")),
    "linen OptimizedLSTMCell": (cell(nn.OptimizedLSTMCell(4)), gates("ifgo")),
    "linen MGUCell": (cell(nn.MGUCell(4)), gates("fn")),
    "linen SimpleCell": (cell(nn.SimpleCell(4)), {"i/kernel": (1, (4, 6)), "h/kernel": (1, (4, 4))}),
    "nnx Linear": (of_nnx(lambda rngs: nnx.Linear(6, 4, rngs=rngs)), {"kernel": (1, (4, 6))}),
    "nnx LinearGeneral": (of_nnx(lambda rngs: nnx.LinearGeneral(6, (2, 2), rngs=rngs)), RAISES),
    "nnx Conv": (of_nnx(lambda rngs: nnx.Conv(2, 4, (3, 3), rngs=rngs)), {"kernel": (1, (4, 18))}),
    "nnx Embed": (of_nnx(lambda rngs: nnx.Embed(9, 4, rngs=rngs)), LEFT_ALONE),
    "nnx LoRA": (of_nnx(lambda rngs: nnx.LoRA(6, 2, 4, rngs=rngs)), LEFT_ALONE),
    "nnx BatchNorm": (of_nnx(lambda rngs: nnx.BatchNorm(4, rngs=rngs)), LEFT_ALONE),
    "nnx attention": (of_nnx(lambda rngs: nnx.MultiHeadAttention(2, 6, rngs=rngs)), RAISES),
    "nnx GRUCell": (
        of_nnx(lambda rngs: nnx.GRUCell(6, 4, rngs=rngs)),
        {"dense_i/kernel": (3, (4, 6)), "dense_h/kernel": (3, (4, 4))},
    ),
    "nnx LSTMCell": (
        of_nnx(lambda rngs: nnx.LSTMCell(6, 4, rngs=rngs)),
        {path.replace("if/", "if_/"): size for path, size in gates("ifgo").items()},
    ),
    "nnx OptimizedLSTMCell": (
        of_nnx(lambda rngs: nnx.OptimizedLSTMCell(6, 4, rngs=rngs)),
        {"dense_i/kernel": (4, (4, 6)), "dense_h/kernel": (4, (4, 4))},
    ),
    "nnx SimpleCell": (
        of_nnx(lambda rngs: nnx.SimpleCell(6, 4, rngs=rngs)),
        {"dense_i/kernel": (1, (4, 6)), "dense_h/kernel": (1, (4, 4))},
    ),
    "haiku Linear": (haiku(lambda x: hk.Linear(4)(x), 6), {"linear/w": (1, (4, 6))}),
    "haiku Conv1D": (haiku(lambda x: hk.Conv1D(4, 3)(x), 5, 2), RAISES),
    "haiku Conv2D": (haiku(lambda x: hk.Conv2D(4, 3)(x), 5, 5, 2), {"conv2_d/w": (1, (4, 18))}),
    "haiku Conv2DTranspose": (
        haiku(lambda x: hk.Conv2DTranspose(4, 3)(x), 5, 5, 2),
        {"conv2_d_transpose/w": (1, (4, 18))},
    ),
    "haiku Conv3D": (haiku(lambda x: hk.Conv3D(4, 3)(x), 5, 5, 5, 2), RAISES),
    "haiku DepthwiseConv2D": (haiku(lambda x: hk.DepthwiseConv2D(1, 3)(x), 5, 5, 4), RAISES),
    "haiku SeparableDepthwiseConv2D": (
        haiku(lambda x: hk.SeparableDepthwiseConv2D(1, 3)(x), 5, 5, 4),
        RAISES,
    ),
    "haiku Embed": (haiku(lambda x: hk.Embed(9, 4)(x), dtype=jnp.int32), LEFT_ALONE),
    "haiku BatchNorm": (haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, True), 6), LEFT_ALONE),
    "haiku attention": (
        haiku(lambda x: hk.MultiHeadAttention(2, 3, w_init=jnp.zeros)(x, x, x), 4, 6),
        {f"multi_head_attention/{name}/w": (1, (6, 6)) for name in ("query", "key", "value", "linear")},
    ),
    "haiku GRU": (
        haiku(lambda x: hk.GRU(4)(x, jnp.ones((1, 4))), 6),
        {"gru/w_i": (3, (4, 6)), "gru/w_h": (3, (4, 4))},
    ),
    "haiku LSTM": (
        haiku(lambda x: hk.LSTM(4)(x, hk.LSTMState(jnp.ones((1, 4)), jnp.ones((1, 4)))), 6),
        {"lstm/linear/w": (1, (16, 10))},
    ),
    "haiku VanillaRNN": (
        haiku(lambda x: hk.VanillaRNN(4)(x, jnp.ones((1, 4))), 6),
        {"vanilla_rnn/linear/w": (1, (4, 6)), "vanilla_rnn/linear_1/w": (1, (4, 4))},
    ),
    "equinox Linear": (equinox(eqx.nn.Linear, 6, 4), {"weight": (1, (4, 6))}),
    "equinox Conv1d": (equinox(eqx.nn.Conv1d, 2, 4, 3), {"weight": (1, (4, 6))}),
    "equinox Conv2d": (equinox(eqx.nn.Conv2d, 2, 4, 3), {"weight": (1, (4, 18))}),
    "equinox Conv3d": (equinox(eqx.nn.Conv3d, 2, 4, 3), {"weight": (1, (4, 54))}),
    "equinox Conv2d, groups": (
        equinox(eqx.nn.Conv2d, 6, 4, 3, groups=2),
        {"weight": (2, (2, 27))},
    ),
    "equinox Conv2d, depthwise": (
        equinox(eqx.nn.Conv2d, 4, 4, 3, groups=4),
        {"weight": (4, (1, 9))},
    ),
    "equinox ConvTranspose2d": (equinox(eqx.nn.ConvTranspose2d, 2, 4, 3), {"weight": (1, (4, 18))}),
    "equinox Embedding": (equinox(eqx.nn.Embedding, 9, 4), LEFT_ALONE),
    "equinox LayerNorm": (lambda: eqx.nn.LayerNorm(6), LEFT_ALONE),
    "equinox GRUCell": (
        equinox(eqx.nn.GRUCell, 6, 4),
        {"weight_ih": (3, (4, 6)), "weight_hh": (3, (4, 4))},
    ),
    "equinox LSTMCell": (
        equinox(eqx.nn.LSTMCell, 6, 4),
        {"weight_ih": (4, (4, 6)), "weight_hh": (4, (4, 4))},
    ),
    "equinox attention": (
        equinox(eqx.nn.MultiheadAttention, 2, 6),
        {f"{name}_proj/weight": (1, (6, 6)) for name in ("query", "key", "value", "output")},
    ),
    "equinox, layers stacked": (
        lambda: jax.vmap(lambda key: eqx.nn.Linear(6, 4, key=key))(jax.random.split(KEY)),
        RAISES,
    ),
}


@pytest.mark.parametrize(("params", "expected"), LAYERS.values(), ids=LAYERS)
def test_the_default_reads_each_layer_as_it_is_or_raises(params, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            describe(params())
    else:
        found = {row.path: (row.num_matrices, row.matrix_shape) for row in describe(params()).rows}
        assert {path: size for path, size in found.items() if size[0]} == expected
