"""Clipping by the eigendecomposition of the Gram matrix, G = WᵀW of a tall W.

With G = Q Λ Qᵀ the singular values are √Λ and the nearest matrix in the band is W Q diag(clip(√λ)/√λ) Qᵀ.
Squaring loses eps · condition² of the smallest singular values: up to ONE_PASS_CONDITION that is no more than
a float32 SVD loses; beyond, a second pass restores the band, if not the nearest point in it. Directions that
vanished beside the largest stay as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.matrix_functions import eye_like, matmul, transpose
from svb_jax._src.clip.units import gram_matrix, orthonormalizer, power_of_two, times_unit
from svb_jax._src.stats import Clipped

ONE_PASS_CONDITION = 4.0


class GramSpectrum(NamedTuple):
    """The eigendecomposition of the Gram matrix of W / unit.

    Attributes:
      unit: (...), a power of two that keeps the Gram matrix in its type's range.
      eigenvalues: (..., k), rising.
      roots: (..., k), their square roots, 0 for those that rounding errors made negative.
      vectors: (..., k, k).
    """

    unit: jax.Array | np.ndarray
    eigenvalues: jax.Array
    roots: jax.Array
    vectors: jax.Array

    @property
    def values(self) -> jax.Array:
        """Return the singular values of W, rising."""
        return times_unit(self.roots, jnp.expand_dims(self.unit, -1))

    @property
    def is_vanished(self) -> jax.Array:
        """Return which directions are rounding errors of the largest: there is nothing to lift."""
        eps, num_values = jnp.finfo(self.eigenvalues.dtype).eps, self.eigenvalues.shape[-1]
        return self.eigenvalues <= eps * num_values * self.eigenvalues[..., -1:]

    def smallest(self, padding: ArrayLike = 0) -> jax.Array:
        """Return the smallest singular value but those of ``padding`` zero columns."""
        return lax.dynamic_index_in_dim(
            self.values, padding, axis=-1, keepdims=False, allow_negative_indices=False
        )

    def is_conditioned(self, limit: float, padding: ArrayLike = 0) -> jax.Array:
        """Return whether the condition number is at most ``limit``."""
        return self.smallest(padding) * limit >= self.values[..., -1]

    def is_inside(self, lower: jax.Array, upper: jax.Array, padding: ArrayLike = 0) -> jax.Array:
        """Return whether all singular values lie in the band."""
        return (self.smallest(padding) >= lower) & (self.values[..., -1] <= upper)

    def num_outside(self, lower: jax.Array, upper: jax.Array, padding: ArrayLike = 0) -> jax.Array:
        """Return how many singular values lie outside the band."""
        is_outside = (self.values < lower[..., None]) | (self.values > upper[..., None])
        is_own = lax.broadcasted_iota(jnp.int32, self.values.shape, self.values.ndim - 1) >= padding
        return jnp.sum(is_outside & is_own, axis=-1, dtype=jnp.int32)


def decompose(matrices: jax.Array) -> GramSpectrum:
    """Return the spectrum of finite, tall matrices (..., m, n)."""
    unit = power_of_two(matrices)
    return decompose_gram(gram_matrix(matrices / unit[..., None, None]), unit)


def decompose_gram(gram: jax.Array, unit: jax.Array | np.ndarray) -> GramSpectrum:
    """Return the spectrum of matrices whose Gram matrix, divided by unit², is known."""
    vectors, eigenvalues = lax.linalg.eigh(gram, symmetrize_input=False)
    return GramSpectrum(unit, eigenvalues, jnp.sqrt(jnp.maximum(eigenvalues, 0)), vectors)


def clip_once(matrices: jax.Array, spectrum: GramSpectrum, lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Return the matrices with the singular values that ``spectrum`` shows clipped."""
    # Expanded here, inside any conditional: a unit that is the constant 1 is then folded away.
    values, unit = spectrum.values, jnp.expand_dims(spectrum.unit, -1)
    lower, upper = lower[..., None], upper[..., None]
    is_vanished = spectrum.is_vanished
    roots = jnp.where(is_vanished, 1, spectrum.roots)
    factor = jnp.where(is_vanished, unit, jnp.clip(values, lower, upper) / roots)
    # In additive form values inside the band stay exactly as they were, but rounding errors are those of W:
    # only where W is not much larger than the band.
    is_change = values[..., -1:] <= 1.25 * upper
    additive = jnp.where(is_change, unit, 0)
    # The eigenvectors of a float32 Gram matrix are orthogonal to about 1e-6, which the band would show.
    vectors = matmul(spectrum.vectors, orthonormalizer(spectrum.vectors))
    correction = matmul(vectors * (factor - additive)[..., None, :], transpose(vectors))
    # Added to the small matrix, not to the product: one pass less over the whole of W.
    correction += additive[..., None] * eye_like(correction)
    return matmul(matrices / unit[..., None], correction)


def clip_by_gram(matrices: jax.Array, lower: jax.Array, upper: jax.Array) -> Clipped:
    """Clip the singular values of finite, tall matrices (b, m, n); the band's ends are (b,)."""
    spectrum = decompose(matrices)
    clipped = clip_once(matrices, spectrum, lower, upper)

    def clip_again(clipped: jax.Array) -> jax.Array:
        again = clip_once(clipped, decompose(clipped), lower, upper)
        return jnp.where(is_one_pass[:, None, None], clipped, again)

    is_inside = spectrum.is_inside(lower, upper)
    is_one_pass = is_inside | spectrum.is_conditioned(ONE_PASS_CONDITION)
    clipped = lax.cond(jnp.all(is_one_pass), lambda clipped: clipped, clip_again, clipped)
    no = jnp.zeros_like(spectrum.eigenvalues[:, 0], bool)
    return Clipped(
        matrices=jnp.where(is_inside[:, None, None], matrices, clipped),
        smallest=spectrum.values[:, 0],
        largest=spectrum.values[:, -1],
        num_clipped=spectrum.num_outside(lower, upper),
        is_exact=no,
        is_missed=spectrum.is_vanished[:, 0] & (lower > 0),
        is_skipped=no,
    )
