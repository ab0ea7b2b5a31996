"""What a projection saw: the smallest and the largest singular value, and counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


class Reading(NamedTuple):
    """What was seen of some matrices, or of each in a batch.

    Two arrays and not six, because each is compiled by itself.

    Attributes:
      extremes: minus the smallest singular value, and the largest; a sum has the larger of each.
      counts: of singular values clipped, of all, of matrices that took the exact route, of those skipped.
    """

    extremes: jax.Array
    counts: jax.Array

    @property
    def smallest(self) -> jax.Array:
        """Return the smallest singular value."""
        return -self.extremes[..., 0]

    @property
    def largest(self) -> jax.Array:
        """Return the largest singular value."""
        return self.extremes[..., 1]

    @property
    def clipped(self) -> jax.Array:
        """Return how many singular values were outside their band."""
        return self.counts[..., 0]

    @property
    def values(self) -> jax.Array:
        """Return how many singular values there were."""
        return self.counts[..., 1]

    @property
    def exact(self) -> jax.Array:
        """Return how many matrices took the exact route."""
        return self.counts[..., 2]

    @property
    def skipped(self) -> jax.Array:
        """Return how many matrices were left alone, because not all of their entries are finite."""
        return self.counts[..., 3]


def empty_reading(like: jax.Array) -> Reading:
    """Return the reading of no matrix at all, for each entry of ``like``.

    Made like something, because shard_map tells values that differ from device to device from others.
    """
    counts = jnp.zeros_like(like, jnp.int32, shape=(*like.shape, 4))
    extremes = jnp.full_like(counts[..., :2], -jnp.inf, jnp.float32)
    return Reading(extremes, counts)


def skipped_reading(like: jax.Array) -> Reading:
    """Return the reading of a matrix that was skipped, for each entry of ``like``."""
    nothing = empty_reading(like)
    return nothing._replace(counts=nothing.counts.at[..., 3].set(1))


def read(
    values: jax.Array, lower: ArrayLike, upper: ArrayLike, padding: ArrayLike, is_exact: ArrayLike
) -> Reading:
    """Return a reading of each matrix.

    Args:
      values: singular values, rising along the last axis; NaN for a matrix that was skipped.
      lower: the band's lower end.
      upper: the band's upper end.
      padding: how many of the values, the first, are those of zeros around the matrix.
      is_exact: whether the matrices took the exact route.
    """
    smallest = lax.dynamic_slice_in_dim(values, padding, 1, axis=-1, allow_negative_indices=False)
    largest = values[..., -1:]
    is_known = ~jnp.isnan(largest)
    is_outside = ((values < lower) | (values > upper)) & (jnp.arange(values.shape[-1]) >= padding)
    counts = [
        jnp.sum(is_outside, axis=-1, keepdims=True),
        jnp.where(is_known, values.shape[-1] - padding, 0),
        is_known & is_exact,
        ~is_known,
    ]
    extremes = jnp.concatenate([-smallest, largest], axis=-1).astype(jnp.float32)
    return Reading(
        jnp.where(is_known, extremes, -jnp.inf),
        jnp.concatenate([count.astype(jnp.int32) for count in counts], axis=-1),
    )


def add_reading(reading: Reading, seen: Reading) -> Reading:
    """Return the sum of two readings."""
    return Reading(jnp.maximum(reading.extremes, seen.extremes), reading.counts + seen.counts)


def sum_readings(seen: Reading, is_counted: jax.Array) -> Reading:
    """Return the sum of those in a batch that count."""
    counted = is_counted[:, None]
    return Reading(
        jnp.max(jnp.where(counted, seen.extremes, -jnp.inf), axis=0),
        jnp.sum(jnp.where(counted, seen.counts, 0), axis=0),
    )
