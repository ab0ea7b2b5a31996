"""Matrices too large for one device are clipped where they lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import svb_jax
from svb_jax._src.clip import in_place
from svb_jax._src.leaves import matrix_leaves
from tests.prescribed import EPSILON, LOWER, UPPER, before_and_after, frame

MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
STACKS = svb_jax.scan_stacks("*")
CASES = {
    "rows": ((64, 8), P("d"), None),
    "columns, which the rows are split for": ((64, 8), P(None, "d"), None),
    "wide, both sides": ((8, 64), P("d", "m"), None),
    "rows that the devices do not divide": ((52, 8), P(None, ("d", "m")), None),
    "every layer of a stack": ((3, 60, 8), P(None, "d"), STACKS),
    "layers as well": ((4, 64, 8), P("d", "m"), STACKS),
    "heads": ((48, 2, 4), P("d", "m"), svb_jax.attention),
}


@pytest.fixture(autouse=True)
def small_devices(monkeypatch):
    monkeypatch.setattr(in_place, "LARGEST_TO_MOVE", 100)


def prescribed(shape, is_stack):
    count = shape[0] if is_stack else 1
    sides = shape[1:] if is_stack else (shape[0], int(np.prod(shape[1:])))
    pairs = [before_and_after(*sides, seed) for seed in range(count)]
    return [np.float32([pair[i] for pair in pairs]).reshape(shape) for i in (0, 1)]


def gathered(text):
    """Return the sizes of what the program gathers."""
    shapes = re.findall(r"\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    return [int(np.prod(list(map(int, filter(None, shape.split(",")))))) for shape in shapes]


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("name", "kinds"),
    [(name, kinds) for kinds in ((AUTO, AUTO), (EXPLICIT, EXPLICIT)) for name in CASES]
    + [("wide, both sides", (AUTO, EXPLICIT)), ("layers as well", (EXPLICIT, AUTO))],
)
def test_every_matrix_is_clipped_and_none_is_gathered(name, kinds):
    shape, spec, axes = CASES[name]
    before, after = prescribed(shape, axes is STACKS)
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=kinds)
    params = {"query": {"kernel": jax.device_put(before, NamedSharding(mesh, spec))}}
    tx = svb_jax.bound_singular_values(
        EPSILON, dimension_numbers=axes, shardings=jax.tree.map(lambda leaf: leaf.sharding, params)
    )
    with jax.set_mesh(mesh):
        zeros = jax.tree.map(jnp.zeros_like, params)
        program = jax.jit(tx.update).lower(zeros, tx.init(params), params).compile()
        updates, state = program(zeros, tx.init(params), params)
    update = updates["query"]["kernel"]
    np.testing.assert_allclose(before + np.asarray(update), after, rtol=0, atol=5e-6)
    assert update.sharding.is_equivalent_to(params["query"]["kernel"].sharding, before.ndim)
    assert int(state.stats["svb"].num_missed) == 0
    text = program.as_text()
    assert "all-reduce" in text
    # What was seen of each matrix may be, but no matrix.
    assert max(gathered(text), default=0) <= 4


@pytest.mark.nan_inputs
def test_what_vanished_is_lifted_and_what_is_not_finite_left_alone():
    deficient = frame(56, 4).matrix([3.0, 1.0, 0.0, 0.0])
    stack = np.float32([deficient, np.full((56, 4), np.nan), np.zeros((56, 4))])
    params = {"kernel": jax.device_put(stack, NamedSharding(MESH, P(None, "d")))}
    clipped = np.asarray(svb_jax.project(params, EPSILON, dimension_numbers=STACKS, mesh=MESH)["kernel"])
    for index in (0, 2):
        values = np.linalg.svd(np.float64(clipped[index]), compute_uv=False)
        assert values.min() > LOWER * (1 - 5e-6)
        assert values.max() < UPPER * (1 + 5e-6)
    np.testing.assert_array_equal(clipped[1], stack[1])


def test_small_matrices_beside_them_go_to_their_owners():
    pairs = {"large": before_and_after(64, 8, 0), "small": before_and_after(8, 8, 1)}
    params = {
        name: {"kernel": jax.device_put(np.float32(before), NamedSharding(MESH, P("d")))}
        for name, (before, _) in pairs.items()
    }
    clipped = svb_jax.project(params, EPSILON, mesh=MESH)
    for name, (_, after) in pairs.items():
        np.testing.assert_allclose(clipped[name]["kernel"], after, rtol=0, atol=5e-6)


def test_a_decomposition_that_was_asked_for_goes_to_an_owner():
    [leaf] = matrix_leaves({"kernel": jnp.zeros((64, 8))})
    split, whole = (("d",), ()), ((), ())
    assert in_place.is_too_large(leaf, split, "auto")
    assert not in_place.is_too_large(leaf, split, "svd")
    assert not in_place.is_too_large(leaf, whole, "auto")
