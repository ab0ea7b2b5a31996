"""One matrix after another, those of a bucket by one program."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import nothing_seen
from svb_jax._src.clip.cpu.blas import limit_threads
from svb_jax._src.clip.cpu.buckets import Bucket, make_buckets
from svb_jax._src.clip.cpu.routes import ROUTES, RouteOfOne
from svb_jax._src.clip.cpu.slices import opaque_zero, slice_at
from svb_jax._src.stats import Clipped


def clip_sequentially(batches: Sequence[Batch], method: str) -> list[Clipped]:
    """Clip every matrix of every batch, one at a time."""
    limit_threads()
    results: dict[int, Clipped] = {}
    token = jnp.float32(0)
    for bucket in make_buckets([batch.matrices for batch in batches]):
        members = [batches[member] for member in bucket.members]
        clipped = _clip_bucket(bucket, members, ROUTES[method], token)
        token = clipped.largest[-1].astype(token.dtype)
        sizes = [len(batch.lower) for batch in members]
        starts = itertools.accumulate(sizes, initial=0)
        zero = opaque_zero(token)
        for member, start, size in zip(bucket.members, starts, sizes, strict=False):
            padded = slice_at(clipped.matrices, start, size, zero)
            own = Clipped(
                padded, *(lax.slice_in_dim(figures, start, start + size) for figures in clipped[1:])
            )
            results[member] = own._replace(matrices=bucket.unpad(padded, batches[member].matrices.shape))
    return [results[index] for index in range(len(batches))]


def _clip_bucket(bucket: Bucket, members: list[Batch], route: RouteOfOne, token: jax.Array) -> Clipped:
    padded = [batch._replace(matrices=bucket.pad(batch.matrices)) for batch in members]
    batch = Batch(*map(_concatenate, zip(*padded, strict=True)))
    padding = _concatenate(
        [jnp.full(len(m.lower), bucket.shape[1] - min(m.matrices.shape[1:])) for m in members]
    )
    is_active = wait_for(token, batch.is_active)

    def clip_next(index: ArrayLike, clipped: Clipped) -> Clipped:
        figures = (_index(each, index) for each in (batch.lower, batch.upper, is_active, padding))
        one = route(_index(clipped.matrices, index), *figures)
        return jax.tree.map(lambda all_of, new: _update(all_of, new, index), clipped, one)

    return _for_each(len(padding), clip_next, nothing_seen(batch.matrices))


def wait_for(token: jax.Array, flags: jax.Array) -> jax.Array:
    """Return the flags, but not before the token is known.

    No singular value is negative, which XLA cannot know: a true data dependency keeps two decompositions from
    being in flight at once.
    """
    return flags & ~(token < 0)


def _for_each(length: int, body: Callable[[ArrayLike, Clipped], Clipped], carry: Clipped) -> Clipped:
    # Without a loop for a single matrix, which it would copy: large ones come alone.
    return body(0, carry) if length == 1 else lax.fori_loop(0, length, body, carry)


def _concatenate(arrays: Sequence[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _index(array: jax.Array, index: ArrayLike) -> jax.Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def _update(array: jax.Array, new: jax.Array, index: ArrayLike) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, new, index, 0, allow_negative_indices=False)
