"""The kernels to project: shapes of real networks, spectra as training leaves them, exact answers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

Kernels = dict[str, np.ndarray]


def drifted_kernels(shapes: Mapping[str, tuple[int, ...]], condition: float, seed: int = 0) -> Kernels:
    """Return float32 kernels with singular values spread log-uniformly around one.

    That is an orthogonal matrix after some drift. Under a condition number of 3.4 values lie between 0.54 and
    1.84, and the band of epsilon = 0.5 clips a third of them; under 2.35 it clips one in twenty.

    Args:
      shapes: Of the kernels, output last, by name.
      condition: The ratio of the largest singular value to the smallest.
      seed: Of the random directions.
    """
    generator = np.random.default_rng(seed)
    return {name: _drifted(generator, shape, condition) for name, shape in shapes.items()}


def clip_exactly(kernels: Kernels, epsilon: float) -> Kernels:
    """Return the kernels with their singular values in the band, computed in float64."""
    return {name: _clip(kernel, 1 / (1 + epsilon), 1 + epsilon) for name, kernel in kernels.items()}


def as_matrix(kernel: np.ndarray) -> np.ndarray:
    """Return a kernel as a matrix, its outputs the columns.

    Example:
      >>> as_matrix(np.zeros((3, 3, 16, 32))).shape
      (144, 32)
    """
    return kernel.reshape(-1, kernel.shape[-1])


def count_numbers(kernels: Kernels) -> int:
    """Return how many numbers the kernels hold."""
    return sum(kernel.size for kernel in kernels.values())


def save_kernels(path: Path, kernels: Kernels) -> None:
    """Write kernels where another process can read them."""
    np.savez(path, allow_pickle=False, **kernels)


def load_kernels(path: Path) -> Kernels:
    """Read what ``save_kernels`` wrote."""
    with np.load(path) as archive:
        return dict(archive)


def _drifted(generator: np.random.Generator, shape: tuple[int, ...], condition: float) -> np.ndarray:
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    rank = min(rows, columns)
    left, right = (
        np.linalg.qr(generator.standard_normal((side, rank), np.float32))[0] for side in (rows, columns)
    )
    values = condition ** np.linspace(-0.5, 0.5, rank, dtype=np.float32)
    return ((left * values) @ right.T).astype(np.float32).reshape(shape)


def _clip(kernel: np.ndarray, lower: float, upper: float) -> np.ndarray:
    u, s, vt = np.linalg.svd(as_matrix(kernel).astype(np.float64), full_matrices=False)
    return ((u * np.clip(s, lower, upper)) @ vt).reshape(kernel.shape)
