"""Slices that share a kernel.

XLA compiles a slice's constant start into its kernel, and so compiles one kernel for every start. A start
that is looked up at run time stays outside: slices of one shape then share a kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax


def opaque_zero(token: jax.Array) -> jax.Array:
    """Return 0 for a number that is never negative, which XLA does not know."""
    return (token < 0).astype(jnp.int32)


def slice_at(array: jax.Array, start: int, size: int, zero: jax.Array) -> jax.Array:
    """Return ``array[start : start + size]``.

    Args:
      array: What to slice along its first axis.
      start: Where the slice begins.
      size: How long it is.
      zero: An :func:`opaque_zero`.
    """
    if size == len(array):
        return array
    # Only the first entry is ever read. XLA would fold a table of equal or evenly spaced numbers.
    table = jnp.array([start, -1, -1], jnp.int32)
    first = lax.dynamic_index_in_dim(table, zero, keepdims=False, allow_negative_indices=False)
    return lax.dynamic_slice_in_dim(array, first, size, allow_negative_indices=False)
