"""Which leaves are read as matrices, and how: names, ranks and the ready-made dimension numbers."""

import functools
import re

import jax.numpy as jnp
import optax
import pytest

from svb_jax import (
    MatrixAxes,
    attention,
    by_name,
    by_path,
    depthwise,
    every_matrix,
    grouped_convolutions,
    oihw,
    project,
    scan_stacks,
)
from svb_jax._src.paths import named_leaves


def ones(*shape):
    return jnp.ones(shape)


NETWORK = {
    "embed": {"embedding": ones(9, 6)},
    "conv": {"kernel": ones(3, 3, 2, 4), "bias": ones(4)},
    "linear": {"w": ones(4, 5)},
    "dense": {"weight": ones(5, 7)},
    "bn": {"scale": ones(4), "bias": ones(4)},
    "vector": {"kernel": ones(4)},
}


def chosen(dimension_numbers, params):
    """Return the axes of the leaves that are matrices, by path."""
    leaves = named_leaves(dimension_numbers(params), is_leaf=lambda node: isinstance(node, MatrixAxes))
    return {leaf.label: tuple(leaf.value) for leaf in leaves}


def test_the_default_goes_by_name_and_puts_the_output_last():
    assert chosen(by_name, NETWORK) == {
        "conv/kernel": ((0, 1, 2), 3, 1),
        "linear/w": ((0,), 1, 1),
        "dense/weight": ((0,), 1, 1),
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
    params["gru"] = {"w_i": ones(6, 12), "w_h": ones(4, 12)}
    assert chosen(attention, params) == {
        "self/query/kernel": ((0,), (1, 2), 1),
        "self/key/kernel": ((0,), (1, 2), 1),
        "self/value/kernel": ((0,), (1, 2), 1),
        "self/out/kernel": ((0, 1), 2, 1),
        "mlp/kernel": ((0,), 1, 1),
        "gru/w_i": ((0,), 1, 3),
        "gru/w_h": ((0,), 1, 3),
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


def test_a_scanned_layer_is_read_as_inner_reads_one_of_them():
    layers = {
        "query": {"kernel": ones(3, 32, 4, 8)},
        "out": {"kernel": ones(3, 4, 8, 32)},
        "mlp": {"kernel": ones(3, 32, 64)},
    }
    params = {"blocks": layers, "query": {"kernel": ones(32, 4, 8)}}
    assert chosen(scan_stacks("blocks", inner=attention), params) == {
        "blocks/query/kernel": ((1,), (2, 3), 1),
        "blocks/out/kernel": ((1, 2), 3, 1),
        "blocks/mlp/kernel": ((1,), 2, 1),
        "query/kernel": ((0,), (1, 2), 1),
    }


def test_stacks_nest_and_inner_may_count_axes_from_the_end():
    params = {"blocks": {"experts": {"wi": ones(2, 7, 3, 4)}, "wq": ones(2, 3, 4)}}
    each = by_path({"wi": MatrixAxes(-2, -1), "wq": None})
    assert chosen(scan_stacks("blocks", inner=scan_stacks("experts", inner=each)), params) == {
        "blocks/experts/wi": (2, 3, 1)
    }


SHAPES = {"qkv": (8, 3, 2, 4), "qkv_proj": (8, 24), "query": (8, 2, 4), "out": (2, 4, 8)}


@pytest.mark.parametrize(
    ("per_head", "expected"),
    [
        (
            False,
            {
                "qkv/kernel": ((0,), (2, 3), 1),
                "qkv_proj/kernel": ((0,), 1, 3),
                "query/kernel": ((0,), (1, 2), 1),
                "out/kernel": ((0, 1), 2, 1),
            },
        ),
        (
            True,
            {
                "qkv/kernel": ((0,), (3,), 1),
                "query/kernel": ((0,), (2,), 1),
                "out/kernel": ((1,), 2, 1),
            },
        ),
    ],
)
def test_attention_reads_fused_kernels_and_heads(per_head, expected):
    params = {name: {"kernel": ones(*SHAPES[name])} for name in SHAPES if f"{name}/kernel" in expected}
    assert chosen(functools.partial(attention, per_head=per_head), params) == expected


AMBIGUOUS = {
    "rank 3": (by_name, {"conv": {"kernel": ones(3, 2, 4)}}, "conv/kernel"),
    "rank 5": (by_name, {"conv": {"kernel": ones(3, 3, 3, 8, 8)}}, "conv/kernel"),
    "rank 6": (by_name, {"conv": {"kernel": ones(2, 3, 3, 3, 8, 8)}}, "conv/kernel"),
    "stacked queries": (by_name, {"query": {"kernel": ones(3, 32, 4, 8)}}, "query/kernel"),
    "stacked outputs": (
        by_name,
        {"query": optax.MaskedNode(), "out": {"kernel": ones(3, 4, 8, 32)}},
        "out/kernel",
    ),
    "queries by their short name": (by_name, {"wq": {"kernel": ones(3, 32, 4, 8)}}, "wq/kernel"),
    "outputs of attention alone": (
        by_name,
        {"self_attention": {"out": {"kernel": ones(3, 4, 8, 32)}}},
        "self_attention/out/kernel",
    ),
    "a dense layer of rank 4": (
        by_name,
        {"DenseGeneral_0": {"kernel": ones(2, 3, 4, 5)}},
        "DenseGeneral_0/kernel",
    ),
    "PyTorch's order or Flax's": (by_name, {"conv": {"weight": ones(4, 2, 3, 3)}}, "conv/weight"),
    "fused": (by_name, {"qkv": {"kernel": ones(32, 3, 4, 8)}}, "qkv/kernel"),
    "attention, stacked queries": (attention, {"query": {"kernel": ones(3, 32, 4, 8)}}, "query/kernel"),
    "attention, stacked outputs": (
        attention,
        {"query": {"kernel": ones(8, 2, 4)}, "out": {"kernel": ones(3, 4, 8, 32)}},
        "out/kernel",
    ),
    "attention, fused for fewer keys": (attention, {"qkv": {"kernel": ones(32, 48)}}, "qkv/kernel"),
    "a stack of attention by name": (
        scan_stacks("blocks"),
        {"blocks": {"query": {"kernel": ones(3, 32, 4, 8)}}},
        "blocks/query/kernel",
    ),
    "a recurrent cell without its state": (by_name, {"weight_ih": ones(12, 6)}, "weight_ih"),
    "heads in a flat kernel": (
        functools.partial(attention, per_head=True),
        {"query": {"kernel": ones(8, 8)}},
        "query/kernel",
    ),
}


@pytest.mark.parametrize(("numbers", "params", "path"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_could_be_several_things_raises_with_its_path_and_the_ways_out(numbers, params, path):
    with pytest.raises(ValueError, match=re.escape(f"cannot tell how {path!r}")) as told:
        numbers(params)
    for way in ("svb_jax.attention", "svb_jax.scan_stacks(", "svb_jax.oihw", "svb_jax.by_path({"):
        assert way in str(told.value)


def test_a_stack_whose_layers_cannot_be_read_says_that_inner_is_missing():
    with pytest.raises(ValueError, match="cannot tell") as told:
        scan_stacks("blocks")({"blocks": {"query": {"kernel": ones(3, 32, 4, 8)}}})
    assert told.value.__notes__ == ["scan_stacks took axis 0 off: say how one layer is read with inner=."]


def test_a_convolution_may_be_called_out_where_no_attention_is_beside_it():
    assert chosen(by_name, {"out": {"kernel": ones(3, 3, 2, 4)}}) == {"out/kernel": ((0, 1, 2), 3, 1)}


def test_by_path_reads_what_inner_could_not():
    params = {"a": {"kernel": ones(5, 2, 4)}, "b": {"kernel": ones(2, 4)}, "c": {"kernel": ones(2, 4)}}
    assert chosen(by_path({"a/kernel": MatrixAxes((0, 1), 2), "b": None}), params) == {
        "a/kernel": ((0, 1), 2, 1),
        "c/kernel": ((0,), 1, 1),
    }


def test_depthwise_kernels_have_a_matrix_a_channel_in_either_layout():
    flax = {"stem": {"kernel": ones(3, 3, 2, 4)}, "dw": {"kernel": ones(3, 3, 1, 8), "bias": ones(8)}}
    assert chosen(depthwise("dw", multiplier=2), flax) == {
        "stem/kernel": ((0, 1, 2), 3, 1),
        "dw/kernel": ((0, 1, 2), 3, 4),
    }
    assert chosen(depthwise("dw", inner=oihw), {"dw": {"weight": ones(8, 1, 3, 3)}}) == {
        "dw/weight": ((1, 2, 3), 0, 8)
    }
    with pytest.raises(ValueError, match="depthwise needs kernels with one input channel"):
        depthwise("stem")(flax)


ONE_INPUT = {"kernel": ones(3, 3, 1, 4)}


def test_one_stem_for_grey_images_is_an_ordinary_convolution():
    project({"stem": ONE_INPUT}, 0.5, method="svd")


@pytest.mark.parametrize(
    "params", [{"a": ONE_INPUT, "b": ONE_INPUT}, {"depthwise_conv": ONE_INPUT}], ids=["two", "its name"]
)
def test_kernels_that_may_be_depthwise_raise_until_it_is_said(params):
    with pytest.raises(ValueError, match="whether these kernels with one input channel are depthwise"):
        project(params, 0.5, method="svd")
    for said in (by_name, depthwise("*")):
        project(params, 0.5, method="svd", dimension_numbers=said)


def test_embeddings_are_left_alone_by_name():
    tables = {name: {"weight": ones(9, 4)} for name in ("token_embedding", "embed_tokens", "wte")}
    params = tables | {"head": {"weight": ones(4, 2)}}
    assert chosen(by_name, params) == {"head/weight": ((0,), 1, 1)}
    assert chosen(oihw, params) == {"head/weight": ((1,), 0, 1)}


def test_names_that_join_to_the_same_path_are_told_apart():
    params = {"a": {"kernel": ones(2, 3)}, "a/kernel": ones(2, 3)}
    numbers = {"a": {"kernel": None}, "a/kernel": MatrixAxes(0, 1)}
    bounded = project(params, 0.0, dimension_numbers=numbers, method="svd")
    assert float(bounded["a"]["kernel"][0, 0]) == 1.0
    assert float(bounded["a/kernel"][0, 0]) != 1.0


def test_empty_leaves_are_passed_over():
    params = {"empty": {"weight": ones(0, 4)}, "full": {"weight": 2 * jnp.eye(3)}}
    bounded = project(params, 0.0, dimension_numbers=oihw, method="svd")
    assert bounded["empty"]["weight"].shape == (0, 4)
    assert float(bounded["full"]["weight"][0, 0]) == pytest.approx(1, abs=1e-6)


def test_float8_is_told_that_it_is_too_coarse():
    with pytest.raises(ValueError, match=r"'kernel' must be real floating point, of 16 bits or more.*float8"):
        project({"kernel": jnp.ones((3, 3), jnp.float8_e4m3fn)}, 0.5)


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
