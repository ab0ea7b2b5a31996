"""Gram matrices in their type's range: matrices in units of a power of two, which rounds nothing."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from svb_jax._src.clip.matrix_functions import is_tall, matmul, transpose


def gram_matrix(matrices: jax.Array) -> jax.Array:
    """Return the product of each matrix with itself over its long side."""
    transposed = transpose(matrices)
    return matmul(transposed, matrices) if is_tall(matrices) else matmul(matrices, transposed)


def power_of_two(matrices: jax.Array) -> jax.Array:
    """Return for each matrix the power of two just below its largest entry, or 1 for a zero matrix.

    Divided by it, exactly, even matrices at the ends of their type's range have a finite Gram matrix.
    """
    largest = jnp.max(jnp.abs(matrices), axis=(-2, -1), initial=0)
    _, exponent = jnp.frexp(jnp.where(largest > 0, largest, 1))
    # Its reciprocal must be a normal number too: XLA multiplies by it instead of dividing.
    limit = -jnp.finfo(matrices.dtype).minexp
    return jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent - 1, -limit, limit))


def times_unit(values: jax.Array, unit: ArrayLike) -> jax.Array:
    """Return ``values * unit``, or the type's largest number where that is out of its range."""
    limit = jnp.finfo(values.dtype).max / 2
    return jnp.minimum(values, limit / jnp.maximum(unit, 1)) * unit
