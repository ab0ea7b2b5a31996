"""Equal matrices as one batch, the way of accelerators: one program a shape, however many matrices it has."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.matrix_functions import eye_like
from svb_jax._src.stats import Clipped

# From finite matrices (b, m, n) and the ends of their bands (b,) to the clipped matrices.
Route = Callable[[jax.Array, jax.Array, jax.Array], Clipped]


def clip_batched(batches: Sequence[Batch], route: Route, *, is_partial: bool) -> list[Clipped]:
    """Clip every matrix of every batch, those of one shape and type together.

    Args:
      batches: the matrices.
      route: how they are clipped.
      is_partial: whether there may be batches without any active matrix, which then cost nothing.
    """
    clip = clip_if_any if is_partial else clip_active
    clipped: dict[int, Clipped] = {}
    for equal in group_equal(batches):
        joined = join([batches[index] for index in equal])
        sizes = [len(batches[index].lower) for index in equal]
        clipped |= zip(equal, split(clip(joined, route), sizes), strict=True)
    return [clipped[index] for index in range(len(batches))]


def join(batches: Sequence[Batch]) -> Batch:
    """Return batches of equal matrices as one."""
    return Batch(*map(jnp.concatenate, zip(*batches, strict=True))) if len(batches) > 1 else batches[0]


def group_equal(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the positions of batches whose matrices have one shape and type, group by group."""
    groups: dict[object, list[int]] = {}
    for index, batch in enumerate(batches):
        groups.setdefault((batch.matrices.shape[1:], batch.matrices.dtype), []).append(index)
    return list(groups.values())


def split(clipped: Clipped, sizes: Sequence[int]) -> Iterator[Clipped]:
    """Return consecutive parts of a batch."""
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        yield Clipped(*(each[start : start + size] for each in clipped))


def clip_if_any(batch: Batch, route: Route) -> Clipped:
    """Clip the active matrices of a batch if it has any."""
    return lax.cond(jnp.any(batch.is_active), lambda batch: clip_active(batch, route), untouched, batch)


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


def clip_active(batch: Batch, route: Route) -> Clipped:
    """Clip the active, finite matrices of a batch; the others come back as they are."""
    matrices, lower, upper, is_active = batch
    is_active &= jnp.all(jnp.isfinite(matrices), axis=(1, 2))
    chosen = is_active[:, None, None]
    # A stand-in that no route finds difficult: one bad matrix must not send its whole batch on a slow path.
    clipped = route(
        jnp.where(chosen, matrices, eye_like(matrices)),
        jnp.where(is_active, lower, 1),
        jnp.where(is_active, upper, 1),
    )
    return clipped._replace(matrices=jnp.where(chosen, clipped.matrices, matrices), is_skipped=~is_active)
