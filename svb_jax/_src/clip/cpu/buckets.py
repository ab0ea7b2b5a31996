"""Small matrices of many shapes, zero-padded to a few: every shape less is a program less to compile.

LAPACK leaves zero rows and columns alone, also where it completes the vectors of a matrix without full rank,
so that what a matrix gets does not depend on its padding. Eigensolvers of accelerators promise no such thing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# In entries: up to the first size a bucket holds matrices of different shapes, up to the second equal ones.
# Larger matrices stay alone: copying them costs more than it saves.
LARGEST_TO_PAD = 2**16
LARGEST_TO_JOIN = 2**19
# How many times its own entries a padded matrix may have. A limit for each matrix, not for a bucket's mean:
# buckets then do not depend on how many matrices this device owns, and results not on the number of devices.
LARGEST_PADDING_RATIO = 8


@dataclass(frozen=True)
class Bucket:
    """Batches that run through one program.

    Attributes:
      members: Their positions.
      shape: (long, short), what each of their matrices is padded to, its long side first.
    """

    members: tuple[int, ...]
    shape: tuple[int, int]

    def pad(self, matrices: jax.Array) -> jax.Array:
        """Return a batch (b, m, n) in the bucket's shape."""
        tall = matrices if matrices.shape[1] >= matrices.shape[2] else jnp.swapaxes(matrices, 1, 2)
        long, short = self.shape
        return jnp.pad(tall, ((0, 0), (0, long - tall.shape[1]), (0, short - tall.shape[2])))

    def unpad(self, padded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return what :func:`pad` padded from ``shape``."""
        own = padded[:, : max(shape[1:]), : min(shape[1:])]
        return own if shape[1] >= shape[2] else jnp.swapaxes(own, 1, 2)


def make_buckets(batches: Sequence[jax.Array]) -> list[Bucket]:
    """Return buckets of all batches (b, m, n), as few as sizes, types and the padding ratio allow."""
    waiting = sorted(range(len(batches)), key=lambda member: -_entries(batches[member]))
    buckets = []
    while waiting:
        bucket = _bucket(waiting[:1], batches)
        for member in waiting[1:]:
            larger = _bucket([*bucket.members, member], batches)
            if _is_sensible(larger, batches):
                bucket = larger
        buckets.append(bucket)
        waiting = [member for member in waiting if member not in bucket.members]
    return buckets


def _bucket(members: Sequence[int], batches: Sequence[jax.Array]) -> Bucket:
    sides = [batches[member].shape[1:] for member in members]
    return Bucket(tuple(members), (max(map(max, sides)), max(map(min, sides))))


def _is_sensible(bucket: Bucket, batches: Sequence[jax.Array]) -> bool:
    members = [batches[member] for member in bucket.members]
    if len({batch.dtype for batch in members}) > 1:
        return False
    entries, least = math.prod(bucket.shape), min(map(_entries, members))
    if entries > LARGEST_TO_PAD:
        return entries <= LARGEST_TO_JOIN and entries == least
    return entries <= LARGEST_PADDING_RATIO * least


def _entries(batch: jax.Array) -> int:
    return math.prod(batch.shape[1:])
