"""From leaves to stacks of matrices and back, with entries that tell where they came from."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import MatrixAxes
from svb_jax._src.leaves import matrix_leaves
from tests.prescribed import matrices_by_path

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


@pytest.mark.parametrize(("shape", "axes", "by_hand"), READINGS.values(), ids=READINGS)
def test_a_leaf_reads_as_its_matrices_and_back(shape, axes, by_hand):
    value = spelt(shape)
    [leaf] = matrix_leaves({"x": value}, {"x": axes})
    matrices = leaf.to_matrices(jnp.asarray(value))
    np.testing.assert_array_equal(matrices, by_hand(value))
    np.testing.assert_array_equal(leaf.from_matrices(matrices), value)


def test_axes_are_matched_by_path_and_may_leave_leaves_out():
    params = {"blocks": [{"w": spelt((2, 3)), "v": spelt((3, 2))}, {"w": spelt((2, 3))}]}
    found = matrices_by_path(params, {"blocks": [{"v": MatrixAxes(0, 1)}, {"w": MatrixAxes(1, 0)}]})
    assert {path: stack.shape for path, stack in found.items()} == {
        "blocks/0/v": (1, 3, 2),
        "blocks/1/w": (1, 3, 2),
    }
