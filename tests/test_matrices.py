"""From leaves to stacks of matrices and back, with entries that tell where they came from."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import MatrixAxes
from svb_jax.matrices import from_stacks, matrices_by_path, matrix_leaves, to_stacks
from svb_jax.packing import pack_small

# Every entry spells its own index: entry (1, 2, 3) of a leaf is 123.
HWIO = (2, 1, 3, 4)
LAYERS_IN_OUT = (3, 2, 4)


def spelt(shape):
    digits = np.indices(shape)
    return sum(digit * 10 ** (len(shape) - 1 - axis) for axis, digit in enumerate(digits)).astype(np.float32)


READINGS = {
    "dense": ((3, 4), MatrixAxes(0, 1), lambda w: [w]),
    "transposed": ((3, 4), MatrixAxes(1, 0), lambda w: [w.T]),
    "negative axes": ((3, 4), MatrixAxes(-2, -1), lambda w: [w]),
    "HWIO": (HWIO, MatrixAxes((0, 1, 2), 3), lambda w: [np.array([w[0, 0], w[1, 0]]).reshape(6, 4)]),
    "OIHW": ((4, 3, 2, 1), MatrixAxes((1, 2, 3), 0), lambda w: [np.array([o.ravel() for o in w]).T]),
    "stack": (LAYERS_IN_OUT, MatrixAxes(1, 2), lambda w: [w[0], w[1], w[2]]),
    "last axis a stack": ((2, 4, 3), MatrixAxes(0, 1), lambda w: [w[..., 0], w[..., 1], w[..., 2]]),
    "heads merged": (LAYERS_IN_OUT, MatrixAxes(0, (1, 2)), lambda w: [np.array([x.ravel() for x in w])]),
    "merged in this order": (
        LAYERS_IN_OUT,
        MatrixAxes((1, 0), 2),
        lambda w: [np.concatenate(w.swapaxes(0, 1))],
    ),
    "groups": ((3, 4), MatrixAxes(0, 1, groups=2), lambda w: [w[:, :2], w[:, 2:]]),
    "groups in a stack": (
        LAYERS_IN_OUT,
        MatrixAxes(1, 2, groups=2),
        lambda w: [part for layer in w for part in (layer[:, :2], layer[:, 2:])],
    ),
    "Muon's": (HWIO, optax.contrib.MuonDimensionNumbers((0, 1, 2), 3), lambda w: [w.reshape(6, 4)]),
}


@pytest.mark.parametrize(("shape", "axes", "by_hand"), READINGS.values(), ids=READINGS)
def test_a_leaf_reads_as_these_matrices_and_back(shape, axes, by_hand):
    leaf = spelt(shape)
    (reading,) = matrix_leaves({"x": leaf}, {"x": axes})
    matrices = reading.to_matrices(jnp.asarray(leaf))
    np.testing.assert_array_equal(matrices, by_hand(leaf))
    np.testing.assert_array_equal(reading.from_matrices(matrices), leaf)
    assert (reading.count, *reading.matrix_shape) == matrices.shape


TREE = {
    "a": jnp.asarray(spelt((2, 3))),
    "b": jnp.asarray(spelt((3, 2, 3)) + 0.5),
    "c": jnp.asarray(spelt((2, 3)) + 0.25, jnp.bfloat16),
    "d": jnp.asarray(spelt((3, 2))),
    "free": jnp.ones((2, 3)),
}
AXES = {
    "a": MatrixAxes(0, 1),
    "b": MatrixAxes(1, 2),
    "c": MatrixAxes(0, 1),
    "d": MatrixAxes(0, 1),
    "free": None,
}


def test_equal_shapes_stand_in_one_stack_and_go_home():
    leaves = matrix_leaves(TREE, AXES)
    values = [TREE[leaf.path].astype(jnp.float32) for leaf in leaves]
    packing = pack_small(values)
    [row] = packing.pack(values)
    ordered = [leaves[position] for position in packing.rows[0]]
    stacks = to_stacks(ordered, row)
    assert sorted(stacks.shapes) == [(1, 3, 2), (5, 2, 3)]
    for leaf, value in zip(leaves, values, strict=True):
        [stack] = [stack for stack in stacks.split() if stack.shape[1:] == leaf.matrix_shape]
        for matrix in leaf.to_matrices(value):
            assert any(np.array_equal(matrix, other) for other in stack)
    np.testing.assert_array_equal(from_stacks(ordered, stacks), row)


@pytest.mark.parametrize(("shape", "axes", "by_hand"), READINGS.values(), ids=READINGS)
def test_a_row_reads_as_the_matrices_of_its_leaves_and_back(shape, axes, by_hand):
    values = [spelt(shape), 0.5 + spelt(shape)]
    leaves = matrix_leaves({"x": values[0], "y": values[1]}, {"x": axes, "y": axes})
    for kept in (leaves, leaves[:1]):
        packing = pack_small(values[: len(kept)])
        [row] = packing.pack(values[: len(kept)])
        stacks = to_stacks(kept, jnp.asarray(row))
        [matrices] = stacks.split()
        np.testing.assert_array_equal(matrices, [m for value in values[: len(kept)] for m in by_hand(value)])
        np.testing.assert_array_equal(from_stacks(kept, stacks), row)


def test_axes_are_matched_by_path_and_may_leave_leaves_out():
    params = {"blocks": [{"w": spelt((2, 3)), "v": spelt((3, 2))}, {"w": spelt((2, 3))}]}
    found = matrices_by_path(params, {"blocks": [{"v": MatrixAxes(0, 1)}, {"w": MatrixAxes(1, 0)}]})
    assert {path: stack.shape for path, stack in found.items()} == {
        "blocks/0/v": (1, 3, 2),
        "blocks/1/w": (1, 3, 2),
    }
