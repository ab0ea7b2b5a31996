"""The routes to the nearest matrix in a band, for one matrix or a batch of equal ones.

``svd`` decomposes the matrix itself, ``gram`` the product of its short side, ``polar`` only multiplies, and
``auto`` is ``gram`` where its eigenvalues show that it is good, else ``svd``. A batch goes one way together.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.polar import clip_by_polar

Method = Literal["auto", "svd", "gram", "polar"]

# Squaring a matrix loses eps * condition² of its smallest singular values. Up to the first limit that is no
# more than a float32 SVD loses; up to the second, clipping what came out once more makes the band good again.
ONE_PASS_CONDITION = 4.0
TWO_PASS_CONDITION = 16.0

# Below this width a product in two parts takes as long as a whole one.
SMALLEST_TO_HALVE = 256

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Reading(NamedTuple):
    """What a projection saw, summed up over the matrices so far."""

    smallest: jax.Array
    largest: jax.Array
    clipped: jax.Array
    values: jax.Array
    exact: jax.Array
    skipped: jax.Array


class Clipped(NamedTuple):
    """A matrix, or a batch, after a route took it, and a reading of each."""

    matrix: jax.Array
    reading: Reading


def empty_reading(like: jax.Array) -> Reading:
    """Return the reading of no matrix at all, in the shape of ``like``.

    Made like something, because shard_map tells values that differ from device to device from others.
    """
    zero = jnp.zeros_like(like, jnp.int32)
    smallest, largest = jnp.full_like(zero, jnp.inf, jnp.float32), jnp.full_like(zero, -jnp.inf, jnp.float32)
    return Reading(smallest, largest, zero, zero, zero, zero)


def add_reading(reading: Reading, seen: Reading, is_counted: ArrayLike = True) -> Reading:
    """Return the sum of a reading and that of a matrix, or of those in a batch that count."""
    nothing = empty_reading(seen.values)
    seen = jax.tree.map(lambda ours, none: jnp.where(is_counted, ours, none), seen, nothing)
    return Reading(
        jnp.minimum(reading.smallest, jnp.min(seen.smallest)),
        jnp.maximum(reading.largest, jnp.max(seen.largest)),
        *(total + jnp.sum(more, dtype=jnp.int32) for total, more in zip(reading[2:], seen[2:], strict=True)),
    )


class Decomposition(NamedTuple):
    """The eigenvalues and vectors of a matrix's short side; NaN where its square was not finite."""

    eigenvalues: jax.Array
    vectors: jax.Array

    @property
    def values(self) -> jax.Array:
        """Return the singular values."""
        return jnp.sqrt(jnp.maximum(self.eigenvalues, 0))

    def smallest(self, padding: ArrayLike) -> jax.Array:
        """Return the smallest eigenvalue after the first ``padding``: zeros that filled the matrix up."""
        return lax.dynamic_index_in_dim(self.eigenvalues, padding, axis=-1, keepdims=False)

    def is_conditioned(self, limit: float, padding: ArrayLike) -> jax.Array:
        """Return whether the condition number is below ``limit`` and the square kept its digits."""
        limits = jnp.finfo(self.eigenvalues.dtype)
        smallest, largest = self.smallest(padding), self.eigenvalues[..., -1]
        is_scaled_well = (largest > limits.tiny / limits.eps**2) & (largest < limits.max * limits.eps)
        return jnp.all(is_scaled_well & (smallest * limit**2 >= largest))

    def clip(self, matrix: jax.Array, lower: jax.Array, upper: jax.Array, padding: ArrayLike) -> jax.Array:
        """Return the matrix with its singular values in the band, vanished ones as they are."""
        limits = jnp.finfo(matrix.dtype)
        largest = self.values[..., -1:]
        # Below this a direction is rounding error: there is nothing to lift.
        vanished = self.values**2 <= limits.eps * self.values.shape[-1] * largest**2
        keep = _keep(largest, upper)
        gain = jnp.clip(self.values, lower, upper) / jnp.where(vanished, 1, self.values) - keep
        gain = jnp.where(vanished, 1 - keep, gain)

        def apply(matrix: jax.Array) -> jax.Array:
            change = matmul(self.vectors * gain[..., None, :], jnp.swapaxes(self.vectors, -2, -1))
            changed = matmul(matrix, change) if _is_tall(matrix) else matmul(change, matrix)
            return keep[..., None] * matrix + changed

        smallest = jnp.sqrt(jnp.maximum(self.smallest(padding), 0))
        is_outside = (smallest < lower) | (largest[..., 0] > upper)
        return lax.cond(jnp.any(is_outside), apply, lambda matrix: matrix, matrix)


def square(matrix: jax.Array) -> jax.Array:
    """Return the product of a matrix with itself over its long side."""
    transposed = jnp.swapaxes(matrix, -2, -1)
    return matmul(transposed, matrix) if _is_tall(matrix) else matmul(matrix, transposed)


def lower_square(matrix: jax.Array, zero: ArrayLike = 0) -> jax.Array:
    """Return what ``square`` returns in its lower triangle, and nothing right of its upper left block.

    LAPACK reads no more, and a quarter of the work is saved; other eigensolvers may read all of it.

    Args:
      matrix: a single one.
      zero: a 0; if it is one that has to be computed, the halves are not copied out before it is there.
    """
    if min(matrix.shape) < SMALLEST_TO_HALVE:
        return square(matrix)
    columns = matrix if _is_tall(matrix) else matrix.T
    half = columns.shape[1] // 2
    left = lax.dynamic_slice_in_dim(columns, zero, half, axis=1)
    right = lax.dynamic_slice_in_dim(columns, half + zero, columns.shape[1] - half, axis=1)
    top = jnp.pad(square(left), ((0, 0), (0, right.shape[1])))
    return jnp.concatenate([top, matmul(right.T, columns)])


def decompose(squared: jax.Array) -> Decomposition:
    """Return the eigendecomposition of a square, or of its lower triangle where LAPACK does it."""
    is_finite = jnp.all(jnp.isfinite(squared), axis=(-2, -1), keepdims=True)
    vectors, eigenvalues = lax.linalg.eigh(jnp.where(is_finite, squared, 0), symmetrize_input=False)
    return Decomposition(jnp.where(is_finite[..., 0], eigenvalues, jnp.nan), vectors)


class Route(NamedTuple):
    """How matrices are clipped.

    Attributes:
      clip: from matrices, their decomposition, the band's two ends and how many rows or columns of the short
        side are zeros that fill the matrix up, to the clipped matrices.
      is_by_square: whether it takes a decomposition at all.
    """

    clip: Callable[..., Clipped]
    is_by_square: bool

    def __call__(
        self, matrix: jax.Array, lower: ArrayLike, upper: ArrayLike, padding: ArrayLike = 0
    ) -> Clipped:
        """Return the clipped matrices, decomposed here."""
        decomposed = decompose(square(matrix)) if self.is_by_square else None
        return self.clip(matrix, decomposed, lower, upper, padding)


def read(
    values: jax.Array, lower: ArrayLike, upper: ArrayLike, padding: ArrayLike, *, is_exact: bool
) -> Reading:
    """Return a reading of each matrix from its singular values, rising, the first of them padding's."""
    is_outside = (values < lower) | (values > upper)
    clipped = jnp.sum(is_outside & (jnp.arange(values.shape[-1]) >= padding), axis=-1, dtype=jnp.int32)
    nothing = jnp.zeros_like(clipped)
    return Reading(
        lax.dynamic_index_in_dim(values, padding, axis=-1, keepdims=False).astype(jnp.float32),
        values[..., -1].astype(jnp.float32),
        clipped,
        nothing + (values.shape[-1] - padding),
        nothing + int(is_exact),
        nothing,
    )


def clip_by_products(matrix: jax.Array, lower: ArrayLike, upper: ArrayLike) -> Clipped:
    """Return matrices clipped by the route ``polar``, whose reading never knows their values."""
    clipped, num_clipped = clip_by_polar(matrix, jnp.asarray(lower), jnp.asarray(upper))
    unknown = jnp.full_like(num_clipped, jnp.nan, jnp.float32)
    reading = empty_reading(num_clipped)._replace(smallest=unknown, largest=unknown, clipped=num_clipped)
    return Clipped(clipped, reading._replace(values=jnp.full_like(num_clipped, min(matrix.shape[-2:]))))


def _by_svd(
    matrix: jax.Array, _: Decomposition | None, lower: jax.Array, upper: jax.Array, padding: ArrayLike
) -> Clipped:
    return lax.cond(
        jnp.all(jnp.isfinite(matrix)),
        lambda matrix: _clip_by_svd(matrix, lower, upper, padding),
        _leave,
        matrix,
    )


def _by_gram(
    matrix: jax.Array, gram: Decomposition, lower: jax.Array, upper: jax.Array, padding: ArrayLike
) -> Clipped:
    return lax.cond(
        jnp.all(jnp.isfinite(gram.eigenvalues)),
        lambda matrix: _clip_by_gram(matrix, gram, lower, upper, padding),
        _leave,
        matrix,
    )


def _by_auto(
    matrix: jax.Array, gram: Decomposition, lower: jax.Array, upper: jax.Array, padding: ArrayLike
) -> Clipped:
    return lax.cond(
        gram.is_conditioned(TWO_PASS_CONDITION, padding),
        lambda matrix: _clip_by_gram(matrix, gram, lower, upper, padding),
        lambda matrix: _by_svd(matrix, None, lower, upper, padding),
        matrix,
    )


ROUTES: dict[str, Route] = {
    "auto": Route(_by_auto, is_by_square=True),
    "svd": Route(_by_svd, is_by_square=False),
    "gram": Route(_by_gram, is_by_square=True),
}


def _leave(matrix: jax.Array) -> Clipped:
    nothing = empty_reading(matrix[..., 0, 0])
    return Clipped(matrix, nothing._replace(skipped=jnp.ones_like(nothing.skipped)))


def _clip_by_svd(matrix: jax.Array, lower: jax.Array, upper: jax.Array, padding: ArrayLike) -> Clipped:
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    u, vt = _orthonormal(u), jnp.swapaxes(_orthonormal(jnp.swapaxes(vt, -2, -1)), -2, -1)
    keep = _keep(s[..., :1], upper)
    change = matmul(u * (jnp.clip(s, lower, upper) - keep * s)[..., None, :], vt)
    reading = read(s[..., ::-1], lower, upper, padding, is_exact=True)
    return Clipped(keep[..., None] * matrix + change, reading)


def _orthonormal(columns: jax.Array) -> jax.Array:
    """Return nearly orthonormal columns after a Newton-Schulz step.

    The vectors of a float32 SVD are orthogonal to about 1e-6, which the band would show; this makes them so
    to rounding, for a fraction of the SVD's cost.
    """
    gram = matmul(jnp.swapaxes(columns, -2, -1), columns)
    return columns + matmul(columns, (jnp.eye(gram.shape[-1], dtype=gram.dtype) - gram) / 2)


def _clip_by_gram(
    matrix: jax.Array, gram: Decomposition, lower: jax.Array, upper: jax.Array, padding: ArrayLike
) -> Clipped:
    clipped = lax.cond(
        gram.is_conditioned(ONE_PASS_CONDITION, padding),
        lambda clipped: clipped,
        lambda clipped: decompose(square(clipped)).clip(clipped, lower, upper, padding),
        gram.clip(matrix, lower, upper, padding),
    )
    return Clipped(clipped, read(gram.values, lower, upper, padding, is_exact=False))


def _is_tall(matrix: jax.Array) -> bool:
    return matrix.shape[-2] >= matrix.shape[-1]


def _keep(largest: jax.Array, upper: jax.Array) -> jax.Array:
    """Return 1 where the result is best written as a change to the matrix, 0 where it is built anew.

    A change leaves values inside the band exactly as they were, but its rounding errors are those of the
    matrix, and may not be much larger than the band's own.
    """
    return (largest <= 1.25 * upper).astype(largest.dtype)
