"""Matrices of prescribed singular values, and by hand what a bound must make of them."""

from typing import NamedTuple

import numpy as np

EPSILON = 0.5
LOWER, UPPER = 1 / 1.5, 1.5

# Any two neighbours lie beyond different ends of the band, or one of them inside it.
SPECTRUM = np.array([3.0, 0.1, 1.2, 0.4, 2.0, 0.9, 0.5, 1.4])


class Frame(NamedTuple):
    """Singular vectors, to be given any singular values."""

    u: np.ndarray
    vt: np.ndarray

    def matrix(self, values) -> np.ndarray:
        return self.u * np.asarray(values) @ self.vt


def frame(rows: int, columns: int, seed: int = 0) -> Frame:
    rng = np.random.default_rng(seed)
    rank = min(rows, columns)
    u, _ = np.linalg.qr(rng.standard_normal((rows, rank)))
    v, _ = np.linalg.qr(rng.standard_normal((columns, rank)))
    return Frame(u, v.T)


def spectrum(size: int, seed: int = 0) -> np.ndarray:
    """Return singular values of which some lie beyond either end of the band."""
    return np.roll(SPECTRUM, -seed)[:size]


def clipped(values, lower: float = LOWER, upper: float = UPPER) -> np.ndarray:
    return np.minimum(np.maximum(values, lower), upper)


def before_and_after(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix that straddles the band, and the nearest one inside."""
    vectors, values = frame(rows, columns, seed), spectrum(min(rows, columns), seed)
    return vectors.matrix(values), vectors.matrix(clipped(values))
