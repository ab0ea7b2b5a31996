"""What the routes that decompose share: Gram matrices in their type's range, and orthonormal vectors.

Matrices are taken in units of a power of two, which rounds nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.matrix_functions import eye_like, matmul, transpose


def gram_matrix(matrices: jax.Array) -> jax.Array:
    """Return WᵀW for each matrix W."""
    return matmul(transpose(matrices), matrices)


def power_of_two(matrices: jax.Array) -> jax.Array:
    """Return for each matrix the power of two just below its largest entry, or 1 for a zero matrix.

    Divided by it, exactly, even matrices at the ends of their type's range have a finite Gram matrix.
    """
    info = jnp.finfo(matrices.dtype)
    # Its reciprocal must be a normal number too: XLA multiplies by it instead of dividing.
    limit = 2.0**-info.minexp
    largest = jnp.max(jnp.abs(matrices), axis=(-2, -1), initial=0)
    largest = jnp.clip(jnp.where(largest > 0, largest, 1), 1 / limit, limit)
    # A power of two is a float without its mantissa's bits. Less to compile than frexp and ldexp.
    bits = lax.bitcast_convert_type(largest, jnp.dtype(f"int{info.bits}"))
    return lax.bitcast_convert_type(bits & -(1 << info.nmant), matrices.dtype)


def times_unit(values: jax.Array, unit: ArrayLike) -> jax.Array:
    """Return ``values * unit``, or the type's largest number where that is out of its range."""
    limit = jnp.finfo(values.dtype).max / 2
    return jnp.minimum(values, limit / jnp.maximum(unit, 1)) * unit


def orthonormalizer(columns: jax.Array) -> jax.Array:
    """Return by what to multiply nearly orthonormal columns to make them so to rounding (Newton-Schulz)."""
    gram = gram_matrix(columns)
    return 1.5 * eye_like(gram) - 0.5 * gram
