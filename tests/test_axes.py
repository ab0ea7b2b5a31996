"""Which leaves are read as matrices, and how: names, ranks and the ready-made dimension numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import MatrixAxes, attention, by_name, every_matrix, grouped_convolutions, oihw, scan_stacks
from svb_jax.axes import path_string


def ones(*shape):
    return jnp.ones(shape)


NETWORK = {
    "embed": {"embedding": ones(9, 6)},
    "conv": {"kernel": ones(3, 3, 2, 4), "bias": ones(4)},
    "linear": {"w": ones(4, 5)},
    "dense": {"weight": ones(5, 7)},
    "bn": {"scale": ones(4), "bias": ones(4)},
    "volume": {"kernel": ones(2, 3, 3, 2, 4)},
    "vector": {"kernel": ones(4)},
}


def chosen(dimension_numbers, params):
    """Return the axes of the leaves that are matrices, by path."""
    axes = jax.tree_util.tree_flatten_with_path(
        dimension_numbers(params), is_leaf=lambda node: isinstance(node, MatrixAxes)
    )[0]
    return {path_string(path): tuple(value) for path, value in axes}


def test_the_default_goes_by_name_and_puts_the_output_last():
    assert chosen(by_name, NETWORK) == {
        "conv/kernel": ((0, 1, 2), 3, 1),
        "linear/w": ((0,), 1, 1),
        "dense/weight": ((0,), 1, 1),
        "volume/kernel": ((0, 1, 2, 3), 4, 1),
    }


def test_every_matrix_goes_by_rank():
    assert chosen(every_matrix, [ones(2, 3), (ones(4), ones(2, 3, 4)), {"embedding": ones(5, 6)}]) == {
        "0": ((0,), 1, 1),
        "1/1": ((0, 1), 2, 1),
        "2/embedding": ((0,), 1, 1),
    }


def test_oihw_puts_the_output_first():
    params = {"c": {"weight": ones(4, 2, 3, 3), "bias": ones(4, 1, 1)}, "l": {"weight": ones(5, 4)}}
    assert chosen(oihw, params) == {"c/weight": ((1, 2, 3), 0, 1), "l/weight": ((1,), 0, 1)}


def test_attention_maps_features_to_all_heads_and_back():
    qkv, out = {"kernel": ones(6, 2, 3), "bias": ones(2, 3)}, {"kernel": ones(2, 3, 6)}
    params = {"self": {"query": qkv, "key": qkv, "value": qkv, "out": out}, "mlp": {"kernel": ones(6, 4)}}
    assert chosen(attention, params) == {
        "self/query/kernel": ((0,), (1, 2), 1),
        "self/key/kernel": ((0,), (1, 2), 1),
        "self/value/kernel": ((0,), (1, 2), 1),
        "self/out/kernel": ((0, 1), 2, 1),
        "mlp/kernel": ((0,), 1, 1),
    }


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (0, (5, 3, 4), ((1,), 2, 1)),
        (1, (3, 5, 4), ((0,), 2, 1)),
        (-1, (3, 4, 5), ((0,), 1, 1)),
        (0, (5, 3, 3, 2, 4), ((1, 2, 3), 4, 1)),
    ],
)
def test_scan_stacks_leave_their_axis_out(axis, shape, expected):
    params = {
        "blocks": {"inner": {"kernel": ones(*shape), "bias": ones(5, 4)}, "norm": {"scale": ones(5, 4)}},
        "head": {"kernel": ones(4, 2)},
    }
    assert chosen(scan_stacks("blocks", axis=axis), params) == {
        "blocks/inner/kernel": expected,
        "head/kernel": ((0,), 1, 1),
    }


def test_grouped_convolutions_are_named_by_path():
    params = {"a": {"kernel": ones(3, 3, 2, 6)}, "b": {"kernel": ones(3, 3, 2, 6)}}
    assert chosen(grouped_convolutions({"a/kernel": 3}), params) == {
        "a/kernel": ((0, 1, 2), 3, 3),
        "b/kernel": ((0, 1, 2), 3, 1),
    }


@pytest.mark.parametrize("hidden", [{"kernel": optax.MaskedNode()}, optax.MaskedNode()])
@pytest.mark.parametrize("named", [grouped_convolutions({"a/kernel": 3}), scan_stacks("a")])
def test_a_named_kernel_may_be_hidden_by_a_mask(named, hidden):
    assert chosen(named, {"a": hidden, "b": {"kernel": ones(2, 6)}}) == {"b/kernel": ((0,), 1, 1)}


def test_a_path_reads_as_the_user_wrote_it():
    tree = {"blocks": [{"kernel": np.zeros(1)}, {"kernel": np.zeros(1)}]}
    paths = [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert paths == ["blocks/0/kernel", "blocks/1/kernel"]
