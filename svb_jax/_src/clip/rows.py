"""The rows of tall matrices, which several devices may share, and which zeros may follow."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


@dataclass(frozen=True)
class Rows:
    """Which rows of each matrix are at hand: all its own, or those of one device of a mesh.

    Attributes:
      num_own: (b,) or for all, how many rows a matrix has in all, above rows of zeros.
      axis_names: The mesh's axes that split the rows.
    """

    num_own: ArrayLike
    axis_names: tuple[str, ...]

    def sum(self, of_rows: jax.Array) -> jax.Array:
        """Return the sum over all rows from that over the rows at hand."""
        return lax.psum(of_rows, self.axis_names) if self.axis_names else of_rows

    def max(self, of_rows: jax.Array) -> jax.Array:
        """Return the maximum over all rows from that over the rows at hand; of NaN, infinity."""
        # Devices do not agree on the larger of a number and NaN.
        of_rows = jnp.where(jnp.isnan(of_rows), jnp.inf, of_rows)
        return lax.pmax(of_rows, self.axis_names) if self.axis_names else of_rows

    def noise(self, like: jax.Array) -> jax.Array:
        """Return a matrix of noise for each of these, of norm about 1, with none in rows of zeros."""
        shape, num_parts = like.shape[1:], math.prod(map(lax.axis_size, self.axis_names))
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        row += lax.axis_index(self.axis_names) * shape[0] if self.axis_names else 0
        hashed = jnp.sin(12.9898 * row.astype(like.dtype) + 78.233 * column.astype(like.dtype)) * 43758.5453
        size = 3 / ((num_parts * shape[0]) ** 0.5 + shape[1] ** 0.5)
        noise = (hashed - jnp.floor(hashed) - 0.5)[None] * size
        # Vanished directions would end there.
        return jnp.where(row[None] < jnp.reshape(self.num_own, (-1, 1, 1)), noise, 0)
