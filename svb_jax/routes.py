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

Method = Literal["auto", "svd", "gram", "polar"]

# Squaring a matrix loses eps * condition² of its smallest singular values. Up to the first limit that is no
# more than a float32 SVD loses; up to the second, clipping what came out once more makes the band good again.
ONE_PASS_CONDITION = 4.0
TWO_PASS_CONDITION = 16.0

# Below this width a part of a product takes as long as the whole.
SMALLEST_TO_PART = 256
# Of m values, k outside can be clipped by their own vectors, for 2k/m of the product with all. Training
# leaves a few percent outside of a wide band and a quarter outside of a narrow one. The fewest come last.
FEW_IN_EIGHTHS = (3, 1)

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Clipped(NamedTuple):
    """A matrix, or a batch, after a route took it.

    Attributes:
      matrix: with its singular values in the band.
      values: the singular values before, rising; NaN if the matrix was skipped.
      is_exact: whether the exact route was taken.
      is_done: False if several matrices in one were left as they are, because not all are good for it.
    """

    matrix: jax.Array
    values: jax.Array
    is_exact: jax.Array
    is_done: jax.Array


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
        return lax.dynamic_index_in_dim(
            self.eigenvalues, padding, axis=-1, keepdims=False, allow_negative_indices=False
        )

    def is_conditioned(self, limit: float, padding: ArrayLike) -> jax.Array:
        """Return whether the condition number is below ``limit`` and the square kept its digits."""
        limits = jnp.finfo(self.eigenvalues.dtype)
        smallest, largest = self.smallest(padding), self.eigenvalues[..., -1]
        is_scaled_well = (largest > limits.tiny / limits.eps**2) & (largest < limits.max * limits.eps)
        return jnp.all(is_scaled_well & (smallest * limit**2 >= largest))

    def is_inside(self, lower: jax.Array, upper: jax.Array, padding: ArrayLike) -> jax.Array:
        """Return whether all singular values lie in the band."""
        smallest = jnp.sqrt(jnp.maximum(self.smallest(padding), 0))
        return jnp.all((smallest >= lower) & (jnp.sqrt(self.eigenvalues[..., -1]) <= upper))

    def count_outside(self, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return how many singular values lie outside the band."""
        return jnp.sum((self.values < lower) | (self.values > upper), axis=-1)

    def gain(self, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return by what the clipped singular values differ from those kept, in parts of the latter.

        Vanished directions stay as they are.
        """
        eps, values = jnp.finfo(self.eigenvalues.dtype).eps, self.values
        # Below this a direction is rounding error: there is nothing to lift.
        is_vanished = self.eigenvalues <= eps * values.shape[-1] * self.eigenvalues[..., -1:]
        gain = jnp.clip(values, lower, upper) / jnp.where(is_vanished, 1, values)
        return jnp.where(is_vanished, 1, gain) - _is_kept(values[..., -1:], upper)

    # With a jit of its own it is traced once for all passes.
    @jax.jit
    def clip(self, matrix: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return the matrix with its singular values in the band."""
        gain = self.gain(lower, upper)
        change = matmul(self.vectors * gain[..., None, :], jnp.swapaxes(self.vectors, -2, -1))
        # Kept here and not added to the product, which would be one more pass over the whole matrix.
        is_kept = _is_kept(self.values[..., -1:, None], upper)
        change = jnp.where(jnp.eye(gain.shape[-1], dtype=bool), change + is_kept, change)
        return matmul(matrix, change) if _is_tall(matrix) else matmul(change, matrix)

    def clip_few(self, most: int, matrix: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Return what ``clip`` does for one matrix that is kept, if at most so many values are outside."""
        # The largest of them, and after these the smallest.
        outside = (jnp.arange(most) - jnp.sum(self.values > upper)) % self.values.size
        vectors, gain = self.vectors[:, outside], self.gain(lower, upper)[outside]
        if _is_tall(matrix):
            return matrix + matmul(matmul(matrix, vectors) * gain, vectors.T)
        return matrix + matmul(vectors * gain, matmul(vectors.T, matrix))


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
    if min(matrix.shape) < SMALLEST_TO_PART:
        return square(matrix)
    columns = matrix if _is_tall(matrix) else matrix.T
    half = columns.shape[1] // 2
    left = lax.dynamic_slice_in_dim(columns, zero, half, axis=1)
    right = lax.dynamic_slice_in_dim(columns, half + zero, columns.shape[1] - half, axis=1)
    top = jnp.pad(square(left), ((0, 0), (0, right.shape[1])))
    return jnp.concatenate([top, matmul(right.T, columns)])


@jax.jit
def decompose(squared: jax.Array) -> Decomposition:
    """Return the eigendecomposition of a square, or of its lower triangle where LAPACK does it."""
    # A sum that overflows only sends a matrix, huge as it is, on the exact route.
    is_finite = jnp.isfinite(jnp.sum(squared, axis=(-2, -1)))[..., None]
    vectors, eigenvalues = lax.linalg.eigh(
        jnp.where(is_finite[..., None], squared, 0), symmetrize_input=False
    )
    return Decomposition(jnp.where(is_finite, eigenvalues, jnp.nan), vectors)


class Route(NamedTuple):
    """How matrices are clipped.

    Attributes:
      clip: from matrices, their decomposition, the band's two ends, how many rows or columns of the short
        side are zeros that fill the matrix up, and whether it is one matrix or several in one, each with
        rows and columns of its own, to the clipped matrices.
      is_by_square: whether it takes a decomposition at all, as several in one must.
    """

    clip: Callable[..., Clipped]
    is_by_square: bool

    def __call__(
        self,
        matrix: jax.Array,
        lower: ArrayLike,
        upper: ArrayLike,
        padding: ArrayLike = 0,
        is_one: ArrayLike = True,
    ) -> Clipped:
        """Return the clipped matrices, decomposed here."""
        decomposed = decompose(square(matrix)) if self.is_by_square else None
        return self.clip(matrix, decomposed, lower, upper, padding, is_one)


def _by_svd(
    matrix: jax.Array,
    gram: Decomposition | None,
    lower: jax.Array,
    upper: jax.Array,
    padding: ArrayLike = 0,
    is_one: ArrayLike = True,
) -> Clipped:
    del gram, padding, is_one
    return lax.cond(_is_finite(matrix), lambda matrix: _clip_by_svd(matrix, lower, upper), _skip, matrix)


def _by_square(
    is_exact: bool,
    matrix: jax.Array,
    gram: Decomposition,
    lower: jax.Array,
    upper: jax.Array,
    padding: ArrayLike = 0,
    is_one: ArrayLike = True,
) -> Clipped:
    """Clip by a decomposition, as its eigenvalues say; if they are good for it.

    If not, a matrix takes the exact route, or is left alone if there is none.
    """

    def once(matrix: jax.Array) -> jax.Array:
        return gram.clip(matrix, lower, upper)

    def twice(matrix: jax.Array) -> jax.Array:
        clipped = once(matrix)
        again = decompose(square(clipped))
        # What is inside now is left as it is; and the first pass' kernels are compiled for this one too.
        return lax.cond(
            again.is_inside(lower, upper, padding),
            lambda clipped: clipped,
            lambda clipped: again.clip(clipped, lower, upper),
            clipped,
        )

    def by(clip: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Clipped]:
        return lambda matrix: Clipped(clip(matrix), gram.values, jnp.array(False), jnp.array(True))

    is_good = gram.is_conditioned(TWO_PASS_CONDITION, padding)
    if not is_exact:
        is_good |= jnp.all(jnp.isfinite(gram.eigenvalues)) & is_one
    is_clipped = is_good & ~gram.is_inside(lower, upper, padding)
    is_near = is_clipped & gram.is_conditioned(ONE_PASS_CONDITION, padding)
    # Of those that hold, the last is taken.
    ways = [(True, by(lambda matrix: matrix)), (is_clipped, by(twice)), (is_near, by(once))]
    if matrix.ndim == 2 and (width := min(matrix.shape)) >= SMALLEST_TO_PART:
        is_change, outside = is_near & _is_kept(gram.values[-1], upper), gram.count_outside(lower, upper)
        for most in (width * eighths // 8 for eighths in FEW_IN_EIGHTHS):
            clip_few = functools.partial(gram.clip_few, most, lower=lower, upper=upper)
            ways.append((is_change & (outside <= most), by(clip_few)))
    if is_exact:
        # Known before the switch, because what a conditional inside of it returned would be copied.
        is_bad = ~is_good & is_one
        is_far = lax.cond(is_bad, _is_finite, lambda _: jnp.zeros_like(is_bad), matrix)
        ways.append((is_far, lambda matrix: _clip_by_svd(matrix, lower, upper)))
    conditions, branches = zip(*ways, strict=True)
    branch = functools.reduce(
        lambda last, way: jnp.where(conditions[way], way, last), range(len(ways)), jnp.int32(0)
    )
    return lax.switch(branch, branches, matrix)._replace(is_done=is_good | is_one)


ROUTES: dict[str, Route] = {
    "auto": Route(functools.partial(_by_square, True), is_by_square=True),
    "svd": Route(_by_svd, is_by_square=False),
    "gram": Route(functools.partial(_by_square, False), is_by_square=True),
}


def _skip(matrix: jax.Array) -> Clipped:
    side = matrix[..., 0, :] if _is_tall(matrix) else matrix[..., 0]
    return Clipped(matrix, jnp.full_like(side, jnp.nan), jnp.array(False), jnp.array(True))


def _clip_by_svd(matrix: jax.Array, lower: jax.Array, upper: jax.Array) -> Clipped:
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    is_kept = _is_kept(s[..., :1], upper)
    gain = jnp.clip(s, lower, upper) - is_kept * s
    # The vectors of a float32 SVD are orthogonal to about 1e-6, which the band would show.
    inner = matmul(_to_orthonormal(u) * gain[..., None, :], _to_orthonormal(jnp.swapaxes(vt, -2, -1)))
    change = matmul(u, matmul(inner, vt)) if _is_tall(matrix) else matmul(matmul(u, inner), vt)
    return Clipped(is_kept[..., None] * matrix + change, s[..., ::-1], jnp.array(True), jnp.array(True))


def _to_orthonormal(columns: jax.Array) -> jax.Array:
    """Return by what to multiply nearly orthonormal columns to make them so to rounding (Newton-Schulz)."""
    gram = matmul(jnp.swapaxes(columns, -2, -1), columns)
    return 1.5 * jnp.eye(gram.shape[-1], dtype=gram.dtype) - 0.5 * gram


def _is_finite(matrix: jax.Array) -> jax.Array:
    """Return whether all entries are finite.

    By a sum, which XLA hands to a library on CPU; whether all of many truths hold it would compile.
    """
    return jnp.sum(0 * matrix) == 0


def _is_tall(matrix: jax.Array) -> bool:
    return matrix.shape[-2] >= matrix.shape[-1]


def _is_kept(largest: jax.Array, upper: jax.Array) -> jax.Array:
    """Return whether the result is best written as a change to the matrix, instead of built anew.

    A change leaves values inside the band as they were, but its rounding errors are those of the matrix,
    and may not be much larger than the band's own.
    """
    return largest <= 1.25 * upper
