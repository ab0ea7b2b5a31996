"""What section IV of the paper speaks of, measured on the weights of a deep linear network.

The network maps a row vector x to ``x @ kernels[0] @ ... @ kernels[-1]``; a kernel is the transpose of the
paper's W. The data's input-output correlation is ``inputs @ diag(sigma) @ outputs.T``: its m-th direction
enters along column m of ``inputs``, with strength sigma[m], and leaves along column m of ``outputs``.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

Kernels = Sequence[np.ndarray]


class Directions(NamedTuple):
    """The independent directions of input-output correlation.

    Attributes:
      inputs: Orthonormal columns, one a direction.
      outputs: Orthonormal columns, one a direction.
      sigma: The strengths.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    sigma: np.ndarray


def strengths(kernels: Kernels, directions: Directions) -> np.ndarray:
    """How strongly the whole network passes on each direction: the paper's product of s over the layers.

    Example:
      >>> doubling = [np.diag([2.0, 1.0]), np.diag([1.5, 1.0])]
      >>> strengths(doubling, Directions(np.eye(2), np.eye(2), np.ones(2)))
      array([3., 1.])
    """
    return np.einsum("im,io,om->m", directions.inputs, reduce(np.matmul, kernels), directions.outputs)


def energies(kernels: Kernels, directions: Directions) -> np.ndarray:
    """Half the squared gap between each direction's strength in the network and in the data."""
    return 0.5 * (directions.sigma - strengths(kernels, directions)) ** 2


def gains(kernels: Kernels, directions: Directions) -> np.ndarray:
    """How much each layer stretches each direction as it comes through, (directions, layers).

    They stand for the paper's s: where the layers' singular vectors are aligned they are equal to it, and
    their product over the layers is always the length at which the direction leaves.

    Example:
      >>> quarter_turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
      >>> gains([2 * quarter_turn, np.diag([1.0, 3.0])], Directions(np.eye(2), np.eye(2), np.ones(2)))
      array([[2., 3.],
             [2., 1.]])
    """
    lengths = _lengths(directions.inputs.T, kernels)
    return (lengths[1:] / lengths[:-1]).T


def error_components(kernels: Kernels, directions: Directions) -> np.ndarray:
    """The length of each direction's unit error at every depth, (layers + 1, directions), input first."""
    return _lengths(directions.outputs.T, [kernel.T for kernel in reversed(kernels)])[::-1]


def mixing(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The strengths at which directions of a layer's output enter directions of the next layer's input.

    Row m, column m' is the paper's s_m of the upper layer, times s_m' of the lower, times the projection of
    the lower one's output direction m' on the upper one's input direction m, without its sign.

    Example:
      >>> mixing(np.diag([3.0, 0.5]), np.diag([1.0, 2.0])).round(6)
      array([[0., 1.],
             [3., 0.]])
    """
    u, s, _ = np.linalg.svd(lower.T, full_matrices=False)
    _, s_upper, vt_upper = np.linalg.svd(upper.T, full_matrices=False)
    return np.abs(s_upper[:, None] * (vt_upper @ u) * s)


def _lengths(vectors: np.ndarray, kernels: Kernels) -> np.ndarray:
    """The lengths of row vectors before and after each layer, (layers + 1, vectors)."""
    stages = [vectors]
    for kernel in kernels:
        stages.append(stages[-1] @ kernel)
    return np.array([np.linalg.norm(stage, axis=1) for stage in stages])
