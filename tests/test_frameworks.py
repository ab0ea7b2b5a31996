"""Kernels of real layers, put together from matrices of prescribed spectrum, come back with it clipped.

Where a layer is one matrix product an output pixel, its own response to unit inputs is checked too: the bound
must hold for what the layer computes, not only for how we read its kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from svb_jax import (
    MatrixAxes,
    attention,
    bound_singular_values,
    depthwise,
    every_matrix,
    grouped_convolutions,
    oihw,
    project,
    scan_stacks,
    svb,
)
from tests.prescribed import EPSILON, before_and_after, clipped, spectrum

KEY = jax.random.key(0)


class Kernel(NamedTuple):
    """How a library's kernel is made of matrices (inputs, outputs)."""

    path: str
    shape: tuple[int, int]
    assemble: Callable[[list[np.ndarray]], np.ndarray]
    count: int = 1

    def before_and_after(self):
        pairs = [before_and_after(*self.shape, seed) for seed in range(self.count)]
        return tuple(self.assemble(list(matrices)) for matrices in zip(*pairs, strict=True))

    def clipped_spectrum(self):
        return np.sort(np.concatenate([clipped(spectrum(min(self.shape), s)) for s in range(self.count)]))


def reshaped(path, shape, kernel_shape):
    return Kernel(path, shape, lambda matrices: matrices[0].reshape(kernel_shape))


class Case(NamedTuple):
    params: Any
    kernels: list[Kernel]
    dimension_numbers: Any = None
    response: Callable[[Any, jax.Array], jax.Array] | None = None
    input_shape: tuple[int, ...] = ()


def linen(module, input_shape, kernels, dimension_numbers=None, has_response=True):
    params = module.init(KEY, jnp.ones((1, *input_shape)))["params"]
    response = (lambda params, x: module.apply({"params": params}, x)) if has_response else None
    return Case(params, kernels, dimension_numbers, response, input_shape)


def haiku(layer, input_shape, kernels, dimension_numbers=None):
    network = hk.without_apply_rng(hk.transform(lambda x: layer()(x)))
    params = network.init(KEY, jnp.ones((1, *input_shape)))
    return Case(params, kernels, dimension_numbers, network.apply, input_shape)


def equinox(layer, input_shape, kernels, dimension_numbers=None):
    params, static = eqx.partition(layer, eqx.is_array)
    return Case(
        params, kernels, dimension_numbers, lambda p, x: jax.vmap(eqx.combine(p, static))(x), input_shape
    )


def with_nnx(layer, input_shape, kernels, dimension_numbers=None, has_response=True):
    graph, params = nnx.split(layer)
    response = (lambda params, x: nnx.merge(graph, params)(x)) if has_response else None
    return Case(params, kernels, dimension_numbers, response, input_shape)


def side_by_side(*shape):
    """Groups of outputs, one after another, each reading its own inputs."""
    return lambda matrices: np.concatenate([m.reshape(shape) for m in matrices], axis=-1)


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(8, 6)(jnp.zeros(x.shape[0], int)) + x
        return nn.Dense(4)(nn.LayerNorm()(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2)(stack(name="stack")(x, None)[0])


class AttentionLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.MultiHeadDotProductAttention(2, name="attention")(x, x), None


class ScannedAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(AttentionLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return stack(name="blocks")(x, None)[0]


class Cell(nn.Module):
    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, x):
        return self.cell(self.cell.initialize_carry(KEY, x.shape), x)


class TokensOfEquinox(eqx.Module):
    embedding: eqx.nn.Embedding
    head: eqx.nn.Linear


def haiku_gru(x):
    return hk.GRU(4)(x, jnp.ones((1, 4)))


def gates(matrices):
    """The outputs of all gates side by side, as Haiku and NNX keep them."""
    return np.concatenate(matrices, axis=1)


def gates_first(matrices):
    """The same with the output first, as Equinox keeps them."""
    return np.concatenate([m.T for m in matrices])


DENSE = reshaped("kernel", (6, 4), (6, 4))
CONV = reshaped("kernel", (6, 4), (3, 1, 2, 4))
GROUPED = Kernel("kernel", (6, 2), side_by_side(3, 1, 2, 2), count=3)
DEPTHWISE = Kernel("kernel", (3, 1), side_by_side(3, 1, 1, 1), count=4)
QUERY_KEY_VALUE_OUT = [
    *(reshaped(f"{name}/kernel", (6, 6), (6, 2, 3)) for name in ("query", "key", "value")),
    reshaped("out/kernel", (6, 6), (2, 3, 6)),
]


def nnx_kernel(kernel):
    return kernel._replace(path=f"{kernel.path}/value")


RNGS = nnx.Rngs(0)
CONV_EQUINOX = Kernel("weight", (6, 4), lambda m: m[0].T.reshape(4, 2, 3, 1))
GROUPS_EQUINOX = Kernel(
    "weight", (6, 2), lambda ms: np.concatenate([m.T.reshape(2, 2, 3, 1) for m in ms]), count=3
)
GROUPED_EQUINOX = eqx.nn.Conv2d(6, 6, (3, 1), groups=3, key=KEY)

CASES = {
    "linen dense": linen(nn.Dense(4), (6,), [DENSE]),
    "linen embedding and LayerNorm": linen(
        Tokens(), (6,), [DENSE._replace(path="Dense_0/kernel")], has_response=False
    ),
    "linen conv": linen(nn.Conv(4, (3, 1), padding="VALID"), (3, 1, 2), [CONV]),
    "linen conv1d": linen(
        nn.Conv(4, (3,), padding="VALID"),
        (3, 2),
        [reshaped("kernel", (6, 4), (3, 2, 4))],
        {"kernel": MatrixAxes((0, 1), 2)},
    ),
    "linen grouped conv": linen(
        nn.Conv(6, (3, 1), padding="VALID", feature_group_count=3),
        (3, 1, 6),
        [GROUPED],
        grouped_convolutions({"kernel": 3}),
    ),
    "linen depthwise conv": linen(
        nn.Conv(4, (3, 1), padding="VALID", feature_group_count=4),
        (3, 1, 4),
        [DEPTHWISE],
        grouped_convolutions({"kernel": 4}),
    ),
    "linen conv transpose": linen(nn.ConvTranspose(4, (3, 1)), (1, 1, 2), [CONV], has_response=False),
    "linen conv transpose, kernel transposed": linen(
        nn.ConvTranspose(4, (3, 1), transpose_kernel=True),
        (1, 1, 2),
        [Kernel("kernel", (6, 4), lambda m: m[0].reshape(3, 1, 2, 4).swapaxes(2, 3))],
        {"kernel": MatrixAxes((0, 1, 3), 2), "bias": None},
        has_response=False,
    ),
    "linen scan": linen(
        Scanned(),
        (4,),
        [
            Kernel("stack/Dense_0/kernel", (4, 4), np.stack, count=3),
            reshaped("Dense_0/kernel", (4, 2), (4, 2)),
        ],
        scan_stacks("stack"),
        has_response=False,
    ),
    "linen attention": linen(
        nn.MultiHeadDotProductAttention(2), (3, 6), QUERY_KEY_VALUE_OUT, attention, has_response=False
    ),
    "linen scanned attention": linen(
        ScannedAttention(),
        (3, 6),
        [
            *(
                Kernel(
                    f"blocks/attention/{name}/kernel",
                    (6, 6),
                    lambda ms: np.stack([m.reshape(6, 2, 3) for m in ms]),
                    count=3,
                )
                for name in ("query", "key", "value")
            ),
            Kernel(
                "blocks/attention/out/kernel",
                (6, 6),
                lambda ms: np.stack([m.reshape(2, 3, 6) for m in ms]),
                count=3,
            ),
        ],
        scan_stacks("blocks", inner=attention),
        has_response=False,
    ),
    "linen GRU": linen(
        Cell(nn.GRUCell(4)),
        (6,),
        [
            *(reshaped(f"cell/i{gate}/kernel", (6, 4), (6, 4)) for gate in "rzn"),
            *(reshaped(f"cell/h{gate}/kernel", (4, 4), (4, 4)) for gate in "rzn"),
        ],
        has_response=False,
    ),
    "FrozenDict": Case(flax.core.freeze({"kernel": jnp.ones((6, 4)), "bias": jnp.ones(4)}), [DENSE]),
    "nnx linear": with_nnx(nnx.Linear(6, 4, rngs=RNGS), (6,), [nnx_kernel(DENSE)]),
    "nnx grouped conv": with_nnx(
        nnx.Conv(6, 6, (3, 1), padding="VALID", feature_group_count=3, rngs=RNGS),
        (3, 1, 6),
        [nnx_kernel(GROUPED)],
        grouped_convolutions({"kernel": 3}),
    ),
    "nnx attention": with_nnx(
        nnx.MultiHeadAttention(2, 6, rngs=RNGS),
        (),
        [nnx_kernel(kernel) for kernel in QUERY_KEY_VALUE_OUT],
        attention,
        has_response=False,
    ),
    "nnx GRU": with_nnx(
        nnx.GRUCell(6, 4, rngs=RNGS),
        (),
        [
            Kernel("dense_i/kernel/value", (6, 4), gates, count=3),
            Kernel("dense_h/kernel/value", (4, 4), gates, count=3),
        ],
        has_response=False,
    ),
    "haiku GRU": Case(
        hk.transform(haiku_gru).init(KEY, jnp.ones((1, 6))),
        [Kernel("gru/w_i", (6, 4), gates, count=3), Kernel("gru/w_h", (4, 4), gates, count=3)],
    ),
    "haiku conv transpose": haiku(
        lambda: hk.Conv2DTranspose(4, (3, 1), padding="VALID"),
        (1, 1, 2),
        [Kernel("conv2_d_transpose/w", (6, 4), lambda m: m[0].reshape(3, 1, 2, 4).swapaxes(2, 3))],
    )._replace(response=None),
    "haiku embedding": Case(
        hk.transform(lambda x: hk.Linear(4)(hk.Embed(8, 6)(x))).init(KEY, jnp.zeros(1, int)),
        [DENSE._replace(path="linear/w")],
    ),
    "haiku depthwise conv": haiku(
        lambda: hk.DepthwiseConv2D(1, (3, 1), padding="VALID"),
        (3, 1, 4),
        [DEPTHWISE._replace(path="depthwise_conv2_d/w")],
        depthwise("depthwise_conv2_d"),
    ),
    "haiku linear": haiku(lambda: hk.Linear(4), (6,), [DENSE._replace(path="linear/w")]),
    "haiku conv": haiku(
        lambda: hk.Conv2D(4, (3, 1), padding="VALID"), (3, 1, 2), [CONV._replace(path="conv2_d/w")]
    ),
    "equinox linear": equinox(
        eqx.nn.Linear(6, 4, key=KEY), (6,), [Kernel("weight", (6, 4), lambda m: m[0].T)]
    ),
    "equinox conv": equinox(eqx.nn.Conv2d(2, 4, (3, 1), key=KEY), (2, 3, 1), [CONV_EQUINOX]),
    "equinox conv, said": equinox(eqx.nn.Conv2d(2, 4, (3, 1), key=KEY), (2, 3, 1), [CONV_EQUINOX], oihw),
    "equinox conv1d": equinox(
        eqx.nn.Conv1d(2, 4, 3, key=KEY),
        (2, 3),
        [Kernel("weight", (6, 4), lambda m: m[0].T.reshape(4, 2, 3))],
    ),
    "equinox grouped conv": equinox(GROUPED_EQUINOX, (6, 3, 1), [GROUPS_EQUINOX]),
    "equinox GRU": Case(
        eqx.filter(eqx.nn.GRUCell(6, 4, key=KEY), eqx.is_array),
        [
            Kernel("weight_ih", (6, 4), gates_first, count=3),
            Kernel("weight_hh", (4, 4), gates_first, count=3),
        ],
    ),
    "equinox LSTM, said": Case(
        eqx.filter(eqx.nn.LSTMCell(6, 4, key=KEY), eqx.is_array),
        [
            Kernel("weight_ih", (6, 4), gates_first, count=4),
            Kernel("weight_hh", (4, 4), gates_first, count=4),
        ],
        oihw,
    ),
    "equinox embedding": Case(
        TokensOfEquinox(eqx.nn.Embedding(8, 6, key=KEY), eqx.nn.Linear(6, 4, key=KEY)),
        [Kernel("head/weight", (6, 4), lambda m: m[0].T)],
    ),
    "equinox grouped conv, a tree of axes": equinox(
        GROUPED_EQUINOX,
        (6, 3, 1),
        [GROUPS_EQUINOX],
        eqx.tree_at(
            lambda c: (c.weight, c.bias), GROUPED_EQUINOX, (MatrixAxes((1, 2, 3), 0, groups=3), None)
        ),
    ),
    "plain lists and tuples": Case(
        [(jnp.ones((6, 4)), jnp.ones(4)), (jnp.ones((4, 2)), jnp.ones(2))],
        [reshaped("0/0", (6, 4), (6, 4)), reshaped("1/0", (4, 2), (4, 2))],
        every_matrix,
    ),
    "plain dict, Muon's axes": Case(
        {"conv": {"kernel": jnp.ones((3, 1, 2, 4))}, "free": {"kernel": jnp.ones((6, 4))}},
        [CONV._replace(path="conv/kernel")],
        lambda params: {"conv": {"kernel": optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)}, "free": None},
    ),
}


def leaves_by_path(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}


def with_leaves(tree, leaves):
    """Return the tree with these leaves in place of its own, in the shapes that the library made."""

    def new(path, old):
        value = leaves.get(jax.tree_util.keystr(path, simple=True, separator="/"), old)
        assert value.shape == old.shape
        return jnp.asarray(value, old.dtype)

    return jax.tree_util.tree_map_with_path(new, tree)


def projection(case, params):
    # By the route that compiles fastest: here it is the reading of kernels that matters.
    return project(params, EPSILON, dimension_numbers=case.dimension_numbers, method="svd")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_come_back_with_their_spectrum_clipped(case):
    pairs = {kernel.path: kernel.before_and_after() for kernel in case.kernels}
    params = with_leaves(case.params, {path: before for path, (before, _) in pairs.items()})
    projected = projection(case, params)
    assert jax.tree.structure(projected) == jax.tree.structure(params)
    expected = leaves_by_path(params) | {path: after for path, (_, after) in pairs.items()}
    for path, leaf in leaves_by_path(projected).items():
        np.testing.assert_allclose(leaf, expected[path], atol=2e-6 if path in pairs else 0, err_msg=path)


RESPONDING = {name: case for name, case in CASES.items() if case.response}


@pytest.mark.parametrize("case", RESPONDING.values(), ids=RESPONDING)
def test_the_layer_itself_responds_within_the_band(case):
    (kernel,) = case.kernels
    params = jax.tree.map(jnp.zeros_like, case.params)
    params = with_leaves(params, {kernel.path: kernel.before_and_after()[0]})
    params = projection(case, params)
    size = int(np.prod(case.input_shape))
    units = jnp.eye(size).reshape(size, *case.input_shape)
    values = np.linalg.svd(case.response(params, units).reshape(size, -1), compute_uv=False)
    np.testing.assert_allclose(np.sort(values), kernel.clipped_spectrum(), atol=2e-6)


def test_an_nnx_optimizer_trains_within_the_band():
    before, after = before_and_after(6, 4)
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(before, jnp.float32)
    optimizer = nnx.Optimizer(model, svb(optax.sgd(0.1), EPSILON), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    np.testing.assert_allclose(model.kernel[...], after, atol=2e-6)


def test_an_equinox_model_trains_within_the_band():
    before, after = before_and_after(6, 4)
    model = eqx.nn.MLP(6, 4, 4, depth=0, key=KEY)
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, jnp.asarray(before.T, jnp.float32))
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = bound_singular_values(EPSILON)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(eqx.apply_updates(model, updates).layers[0].weight, after.T, atol=2e-6)
