"""Leaves chosen by the pattern of their path, alike in every library's tree."""

import re

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

from svb_jax import paths, project, scan_stacks, svb
from svb_jax._src.masks import as_mask
from svb_jax._src.paths import named_leaves, value_by_path

KEY = jax.random.key(0)


def chosen(mask, params):
    """Return the paths at which a mask is true."""
    return {leaf.path for leaf in named_leaves(mask(params)) if leaf.value is True}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.Dense(4, name="stem")(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.stem, self.head = nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)


class EquinoxBlock(eqx.Module):
    stem: eqx.nn.Linear
    head: eqx.nn.Linear


LINEN = Block().init(KEY, jnp.ones((1, 2)))["params"]
HAIKU = hk.transform(lambda x: hk.Linear(3, name="head")(hk.Linear(4, name="stem")(x))).init(
    KEY, jnp.ones((1, 2))
)
NNX = NnxBlock(nnx.Rngs(0))
EQUINOX = EquinoxBlock(eqx.nn.Linear(2, 4, key=KEY), eqx.nn.Linear(4, 3, key=KEY))
NETWORKS = {
    "linen": LINEN,
    "linen variables": {"params": LINEN},
    "FrozenDict": flax.core.freeze(LINEN),
    "nnx state": nnx.state(NNX, nnx.Param),
    "nnx split": nnx.split(NNX)[1],
    "nnx module": NNX,
    "haiku": HAIKU,
    "equinox": EQUINOX,
    "equinox, filtered": eqx.filter(EQUINOX, eqx.is_array),
}


@pytest.mark.parametrize("params", NETWORKS.values(), ids=NETWORKS)
def test_a_pattern_chooses_the_same_leaves_in_every_library(params):
    for pattern in ("head", "*/head/*", "h*d"):
        found = chosen(paths(pattern), params)
        assert {path.split("/")[-2] for path in found} == {"head"}
        assert len(found) == 2
    everything_else = chosen(paths(exclude="head"), params)
    assert {path.split("/")[-2] for path in everything_else} == {"stem"}


def test_a_tree_of_booleans_that_is_callable_is_not_called():
    layers = [eqx.nn.Linear(2, 2, use_bias=False, key=KEY) for _ in range(2)]
    params = jax.tree.map(lambda _: 3 * jnp.eye(2), eqx.nn.Sequential(layers))
    where = eqx.tree_at(lambda m: m[0].weight, jax.tree.map(lambda _: False, params), True)
    assert callable(where)
    tx = svb(optax.identity(), 0.5, where=where)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for landed in (project(params, 0.5, where=where), optax.apply_updates(params, updates)):
        np.testing.assert_allclose(landed[0].weight, 1.5 * np.eye(2), atol=1e-6)
        np.testing.assert_array_equal(landed[1].weight, 3 * np.eye(2))


@pytest.mark.parametrize("params", NETWORKS.values(), ids=NETWORKS)
def test_a_mask_by_path_works_in_optax(params):
    zeroed = optax.masked(optax.set_to_zero(), paths("head"))
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = zeroed.update(ones, zeroed.init(params), params)
    for leaf in named_leaves(updates):
        np.testing.assert_array_equal(leaf.value, 0 if "head" in leaf.path else 1)
    labelled = optax.multi_transform({True: optax.set_to_zero(), False: optax.identity()}, paths("head"))
    again, _ = labelled.update(ones, labelled.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, again, updates)


TREE = {
    "attention": {"query": {"kernel": 1}},
    "encoder": {
        "block_0": {"attention": {"query": {"kernel": 1}}},
        "block_1": {"mlp": {"kernel": 1, "bias": 1}},
    },
    "encoder_2": {"kernel": 1},
}
QUERY, NESTED_QUERY = "attention/query/kernel", "encoder/block_0/attention/query/kernel"
MLP = {"encoder/block_1/mlp/kernel", "encoder/block_1/mlp/bias"}
PATTERNS = {
    "a name, anywhere": ("attention", {QUERY, NESTED_QUERY}),
    "a name from the top": ("/attention", {QUERY}),
    "a path, with all below": ("encoder/block_1", MLP),
    "a path, only whole names": ("encoder/block", None),
    "a path starts at the top": ("block_1/mlp", None),
    "a leading star also for nothing": ("*/attention/*", {QUERY, NESTED_QUERY}),
    "a star crosses names": ("encoder/*/kernel", {NESTED_QUERY, "encoder/block_1/mlp/kernel"}),
    "a star in a name": ("block_*", {NESTED_QUERY} | MLP),
    "one of these": ("block_[1-9]", MLP),
    "any one character": ("encoder_?", {"encoder_2/kernel"}),
    "a trailing slash": ("encoder_2/", {"encoder_2/kernel"}),
    "upper case is another name": ("Attention", None),
}


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns_match_as_documented(pattern, expected):
    if expected is None:
        with pytest.raises(
            ValueError, match=re.escape(f"paths found no leaf that {pattern!r} matches; the nearest")
        ):
            paths(pattern)(TREE)
    else:
        assert chosen(paths(pattern), TREE) == expected


def test_several_patterns_and_exceptions():
    assert chosen(paths("mlp", "encoder_2", exclude=["bias"]), TREE) == {
        "encoder/block_1/mlp/kernel",
        "encoder_2/kernel",
    }


def test_a_pattern_that_matches_nothing_is_told_the_nearest_paths():
    with pytest.raises(ValueError, match=r"'Dense_O/kernel' matches; the nearest: 'Dense_0/kernel'"):
        paths("Dense_O/kernel")({"Dense_0": {"kernel": 1}, "out": {"bias": 1}})


def test_optax_may_ask_for_a_states_structure_without_parameters():
    params = {"blocks": {"kernel": jnp.ones((2, 3, 3))}, "head": {"kernel": jnp.ones((3, 3))}}
    tx = svb(optax.adam(0.1), {"blocks": 0.5, "*": 0.1}, dimension_numbers=scan_stacks("blocks"))
    state = tx.init(params)
    moved = optax.tree_map_params(tx, lambda leaf: leaf + 1, state)
    assert jax.tree.structure(moved) == jax.tree.structure(state)


def test_a_band_for_a_pattern_that_matches_nothing_is_refused():
    params = {"head": {"kernel": jnp.eye(3)}}
    bands = {"haed": 0.1, "*": 0.5}
    with pytest.raises(
        ValueError, match="epsilon found no leaf that 'haed' matches; the nearest: 'head/kernel'"
    ):
        project(params, bands)
    with pytest.raises(ValueError, match="epsilon found no leaf that 'haed' matches"):
        svb(optax.sgd(0.1), bands).init(params)


def test_what_another_mask_hides_is_not_missed():
    assert chosen(paths("head", "stem"), {"head": optax.MaskedNode(), "stem": {"kernel": 1}}) == {
        "stem/kernel"
    }


def test_names_with_slashes_are_told_apart_from_nested_ones():
    leaves = named_leaves({"a": {"b": 1}, "a/b": 2, "c": 3})
    assert [leaf.names for leaf in leaves] == [("a", "b"), ("a/b",), ("c",)]
    assert [leaf.path for leaf in leaves] == ["a/b", "a/b", "c"]
    assert len({leaf.label for leaf in leaves}) == 3


def test_a_path_reads_as_the_user_wrote_it():
    tree = {"blocks": [{"kernel": np.zeros(1)}, {"kernel": np.zeros(1)}]}
    assert [leaf.label for leaf in named_leaves(tree)] == ["blocks/0/kernel", "blocks/1/kernel"]


def test_the_first_pattern_that_matches_gives_the_value():
    values = {"*/attention/*": 0.1, "encoder": 0.2}
    assert value_by_path("svb", values, NESTED_QUERY) == 0.1
    assert value_by_path("svb", values, "encoder/block_1/mlp/kernel") == 0.2
    with pytest.raises(ValueError, match=r"svb needs a pattern for every matrix, .* matches 'head/kernel'"):
        value_by_path("svb", values, "head/kernel")


def test_where_takes_patterns_booleans_and_functions():
    params = {"head": {"kernel": 1}, "stem": {"kernel": 1}}
    for where in ("head", ["head"], ("head",), paths("head")):
        assert chosen(as_mask(where), params) == {"head/kernel"}
    tree = {"head": True, "stem": np.bool_(False)}
    assert as_mask(tree) is tree
    assert as_mask(None) is None
    module = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(2, 2, use_bias=False, key=KEY), True)
    assert as_mask(module) is module


@pytest.mark.parametrize("where", [1, {"head": "Conv_0"}, {"head": 1.0}, ["head", True]])
def test_where_refuses_anything_else(where):
    with pytest.raises(ValueError, match="svb_jax needs where= to be a pattern of paths or a list of them"):
        as_mask(where)
