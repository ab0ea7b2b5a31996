"""Taking pieces out of an array: equal ones all by one compiled kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def take(array: jax.Array, index: ArrayLike) -> jax.Array:
    """Return ``array[index]`` for an index that is never negative."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def computed_zero(count: jax.Array) -> jax.Array:
    """Return 0 for a count, which is never negative: but XLA does not know, and has to compute it."""
    return (count < 0).astype(jnp.int32)


def cut(array: jax.Array, start: int, stop: int, zero: ArrayLike) -> jax.Array:
    """Return ``array[start:stop]``.

    XLA compiles a kernel for every place at which it has to cut, because it puts constants into its kernels.
    A place that is looked up in a table, by an index that only the running program knows, stays outside.

    Args:
      array: what to cut along its first axis.
      start: where the piece begins.
      stop: where it ends.
      zero: a :func:`computed_zero`.
    """
    if stop - start == len(array):
        return array
    # Only the first entry is ever taken; XLA would see through a table of equal or evenly spaced numbers.
    table = jnp.array([start, -1, -1], jnp.int32)
    place = take(table, zero)
    return lax.dynamic_slice_in_dim(array, place, stop - start, allow_negative_indices=False)
