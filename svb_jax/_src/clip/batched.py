"""Equal matrices as one batch, the way of accelerators: one program a shape, however many matrices it has.

Matrices that are equal but for their long side are made so by rows of zeros, which change no singular value:
compilers spend most of their time on the products of the short side, once for each program. :class:`Rows`
tells a route which rows are a matrix's own.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.matrix_functions import eye_like, is_tall, transpose
from svb_jax._src.stats import Clipped

# From a batch of tall matrices to the clipped ones, with what is inactive or not finite left alone. A route
# that takes padding is told, by the name num_rows, how many rows of each matrix are its own (b,).
Route = Callable[..., Clipped]

# How many times their own entries padded matrices may have, and up to how many entries it does not matter.
LARGEST_PADDING_RATIO = 1.25
SMALL_BATCH = 2**18


def clip_batched(batches: Sequence[Batch], route: Route, *, can_pad: bool, is_partial: bool) -> list[Clipped]:
    """Clip every matrix of every batch, those that are alike together.

    Args:
      batches: The matrices.
      route: How they are clipped.
      can_pad: Whether the route takes padding: one that completes vanished directions must know of it.
      is_partial: Whether there may be batches without any active matrix, which then cost nothing.
    """
    clipped: dict[int, Clipped] = {}
    for members in group_alike([batch.matrices for batch in batches], can_pad):
        chosen = [batches[index] for index in members]
        lengths = [max(each.matrices.shape[1:]) for each in chosen]
        num_rows = np.repeat(np.asarray(lengths, np.int32), [len(each.lower) for each in chosen])
        clip = functools.partial(route, num_rows=num_rows) if len(set(lengths)) > 1 else route
        clip = functools.partial(clip_if_any, route=clip) if is_partial else clip
        clipped |= zip(members, split(clip(join(chosen)), chosen), strict=True)
    return [clipped[index] for index in range(len(batches))]


def group_alike(batches: Sequence[jax.Array], can_pad: bool) -> list[list[int]]:
    """Return the positions of batches (b, m, n) that are clipped as one, the longest first in each group.

    Their matrices have one type and one short side, and long sides that are equal or, if they can be padded,
    not too different.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(batches)), key=lambda index: -max(batches[index].shape[1:])):
        for group in groups:
            if _is_alike([batches[each] for each in (*group, index)], can_pad):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _is_alike(batches: Sequence[jax.Array], can_pad: bool) -> bool:
    if len({(min(batch.shape[1:]), batch.dtype) for batch in batches}) > 1:
        return False
    if not can_pad:
        return len({max(batch.shape[1:]) for batch in batches}) == 1
    padded = sum(map(len, batches)) * max(math.prod(batch.shape[1:]) for batch in batches)
    return padded <= max(SMALL_BATCH, LARGEST_PADDING_RATIO * sum(batch.size for batch in batches))


def join(batches: Sequence[Batch]) -> Batch:
    """Return batches as one of tall matrices, with rows of zeros below those that are shorter."""
    longest = max(max(batch.matrices.shape[1:]) for batch in batches)
    tall = [batch._replace(matrices=_to_tall(batch.matrices, longest)) for batch in batches]
    return Batch(*map(jnp.concatenate, zip(*tall, strict=True))) if len(tall) > 1 else tall[0]


def split(clipped: Clipped, batches: Sequence[Batch]) -> Iterator[Clipped]:
    """Return the parts of what was joined, in the shapes of the batches."""
    start = 0
    for batch in batches:
        end = start + len(batch.lower)
        own = Clipped(*(lax.slice_in_dim(each, start, end) for each in clipped))
        yield own._replace(matrices=_from_tall(own.matrices, batch.matrices.shape))
        start = end


def _to_tall(matrices: jax.Array, num_rows: int) -> jax.Array:
    tall = matrices if is_tall(matrices) else transpose(matrices)
    missing = num_rows - tall.shape[1]
    return jnp.pad(tall, [(0, 0), (0, missing), (0, 0)]) if missing else tall


def _from_tall(tall: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    own = tall[:, : max(shape[1:])]
    return own if shape[1] >= shape[2] else transpose(own)


def clip_if_any(batch: Batch, route: Route) -> Clipped:
    """Clip the active matrices of a batch if it has any."""
    return lax.cond(jnp.any(batch.is_active), route, untouched, batch)


def untouched(batch: Batch) -> Clipped:
    """Return a batch as it is, all of it skipped."""
    clipped = nothing_seen(batch.matrices)
    return clipped._replace(is_skipped=~clipped.is_skipped)


def nothing_seen(matrices: jax.Array) -> Clipped:
    """Return matrices (..., m, n) as they are, with statistics of zeros."""
    # Zeros with the inputs' varying-axes type, as shard_map requires.
    zeros = jnp.zeros(matrices.shape[:-2], matrices.dtype) + jnp.sum(matrices[:0])
    no = jnp.zeros_like(zeros, bool)
    return Clipped(matrices, zeros, zeros, zeros.astype(jnp.int32), no, no, no)


def clip_active(batch: Batch, clip: Callable[..., Clipped]) -> Clipped:
    """Clip the active, finite matrices of a batch by ``clip``, which takes no others.

    Args:
      batch: The matrices.
      clip: From finite matrices and the ends of their bands to the clipped matrices.
    """
    matrices, lower, upper, is_active = batch
    is_active &= jnp.all(jnp.isfinite(matrices), axis=(1, 2))
    chosen = is_active[:, None, None]
    # A stand-in that is never difficult: one bad matrix must not send its whole batch on a slow path.
    clipped = clip(
        jnp.where(chosen, matrices, eye_like(matrices)),
        jnp.where(is_active, lower, 1),
        jnp.where(is_active, upper, 1),
    )
    return clipped._replace(matrices=jnp.where(chosen, clipped.matrices, matrices), is_skipped=~is_active)


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
