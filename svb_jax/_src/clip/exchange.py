"""One exchange in, one out: whole matrices for their owners from every device's shards, and back.

All of this runs where the mesh's axes have names, inside ``shard_map`` or ``pmap``. An axis of the mesh may
split the matrices themselves (their shards must be gathered), split the batch (each device has whole
matrices of its own), or neither: then its devices hold copies, divide the work, and exchange the results.

Matrices of one layout are a *kind*. Each owner has a *run* of every kind, consecutive matrices of it; its
runs, flattened one after another, are its *chunk* of the buffer that is exchanged.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from svb_jax._src.clip import Method, clip_batches
from svb_jax._src.clip.assignment import Assignment, lay_out
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.shard_layout import Layout, Names
from svb_jax._src.stats import Clipped


class ShardedBatch(NamedTuple):
    """The matrices of one leaf, as one device holds them, with their band.

    Attributes:
      shards: (b, ...), then the axes of ``layout``.
      layout: How each matrix lies.
      batch_names: The mesh's axes that split the batch.
      lower: The lower end of the band of all.
      upper: Its upper end.
      is_active: Whether to clip them.
    """

    shards: jax.Array
    layout: Layout
    batch_names: Names
    lower: jax.Array
    upper: jax.Array
    is_active: jax.Array


class Result(NamedTuple):
    """A batch's new shards, and what was seen of its matrices on all devices.

    Attributes:
      shards: As in the batch.
      seen: The figures of :class:`Clipped`, in no particular order of the matrices.
    """

    shards: jax.Array
    seen: list[jax.Array]


def clip_sharded(batches: Sequence[ShardedBatch], axes: Names, method: Method) -> list[Result]:
    """Clip all matrices, each on one device of the axes, and return them as they lay.

    Args:
      batches: Every device's shards.
      axes: All axes of the mesh to distribute over.
      method: The route.
    """
    results: dict[int, Result] = {}
    last: list[jax.Array] = []
    for members in _rounds(batches, axes):
        chosen = [batches[index] for index in members]
        # One round after another, so that no more than one is in flight and takes memory.
        shards, last = lax.optimization_barrier(([batch.shards for batch in chosen], last))
        chosen = [batch._replace(shards=each) for batch, each in zip(chosen, shards, strict=True)]
        clipped = _clip_round(chosen, axes, method)
        last = [result.shards for result in clipped]
        results |= zip(members, clipped, strict=True)
    return [results[index] for index in range(len(batches))]


def _rounds(batches: Sequence[ShardedBatch], axes: Names) -> list[list[int]]:
    """Return which batches are exchanged together.

    Equal matrices whose number all devices divide go alone; all others go together, since matrices of
    several shapes are more evenly dealt out than those of each.
    """
    alike: dict[Any, dict[Any, list[int]]] = {}
    for index, batch in enumerate(batches):
        layout = batch.layout
        group = layout.splitting, batch.batch_names, str(layout.dtype)
        alike.setdefault(group, {}).setdefault(tuple(sorted(layout.shape)), []).append(index)
    rounds = []
    for (_, batch_names, _), groups in alike.items():
        num_owners = math.prod(lax.axis_size(name) for name in axes if name not in batch_names)
        rest = []
        for members in groups.values():
            is_even = sum(len(batches[index].shards) for index in members) % num_owners == 0
            (rounds.append if is_even else rest.extend)(members)
        rounds += [rest] if rest else []
    return rounds


def _clip_round(batches: Sequence[ShardedBatch], axes: Names, method: Method) -> list[Result]:
    """Clip batches that lie on the same axes of the mesh."""
    tall = [_to_tall(batch) for batch in batches]
    kinds = _group(batch.layout for batch in tall)
    layouts = [tall[members[0]].layout for members in kinds]
    joined = [jnp.concatenate([_flat(tall[index]) for index in members]) for members in kinds]
    splitting, batch_names = layouts[0].splitting, batches[0].batch_names
    copying = tuple(name for name in axes if name not in splitting + batch_names)
    shapes = [(len(flat), *layout.shape) for flat, layout in zip(joined, layouts, strict=True)]
    num_owners = math.prod(map(lax.axis_size, copying + splitting))
    plan = lay_out(shapes, [flat.shape[1] for flat in joined], num_owners)
    owner = lax.axis_index(copying + splitting) if copying + splitting else 0

    # Slices are as long as their kind's longest run, and may reach beyond the end of a chunk.
    runs = plan.counts.max(axis=1) * [flat.shape[1] for flat in joined]
    beyond = int((plan.offsets + runs[:, None]).max()) - plan.chunk
    received = _to_owners(_flatten(joined, plan), copying, splitting)
    received = jnp.pad(received, [(0, 0), (0, beyond)])
    own = [
        _own_batch(received, layout, plan, kind, owner, [tall[index] for index in kinds[kind]])
        for kind, layout in enumerate(layouts)
    ]
    clipped = clip_batches(own, method, True)
    sent = jnp.zeros_like(received)
    for kind, layout in enumerate(layouts):
        # In this order each run overwrites what an earlier, shorter one left behind its end.
        shards = layout.divide(clipped[kind].matrices)
        sent = lax.dynamic_update_slice_in_dim(sent, shards, _at(plan.offsets[kind], owner), 1)
    returned = _to_holders(sent[:, : plan.chunk], copying, splitting)
    seen = _gather_seen(clipped, plan, batch_names, copying + splitting)
    results: dict[int, Result] = {}
    for kind, members in enumerate(kinds):
        pieces = _unflatten(returned, plan, kind, joined[kind].shape[1])
        ends = list(itertools.accumulate(len(tall[index].shards) for index in members))
        for index, start, end in zip(members, [0, *ends], ends, strict=False):
            shards = _from_tall(pieces[start:end], batches[index], tall[index])
            results[index] = Result(shards, [each[:, start:end].ravel() for each in seen[kind]])
    return [results[index] for index in range(len(batches))]


def _to_tall(batch: ShardedBatch) -> ShardedBatch:
    """Return a batch of tall matrices, with the split axis of square ones first, so that more are alike."""
    layout = batch.layout
    rows, columns = layout.shape
    is_split_last = any(layout.names[layout.num_rows :]) and not any(layout.names[: layout.num_rows])
    if rows > columns or (rows == columns and not is_split_last):
        return batch
    order = [0, *range(1 + layout.num_rows, batch.shards.ndim), *range(1, 1 + layout.num_rows)]
    return batch._replace(shards=batch.shards.transpose(order), layout=layout.transposed())


def _from_tall(pieces: jax.Array, batch: ShardedBatch, tall: ShardedBatch) -> jax.Array:
    """Return flat shards in the shape and order of a batch's."""
    shards = pieces.reshape(tall.shards.shape)
    if tall.layout == batch.layout:
        return shards
    num_columns = shards.ndim - 1 - batch.layout.num_rows
    order = [0, *range(1 + num_columns, shards.ndim), *range(1, 1 + num_columns)]
    return shards.transpose(order)


def _flat(batch: ShardedBatch) -> jax.Array:
    return batch.shards.reshape(len(batch.shards), -1)


def _group(keys: Iterable[Layout]) -> list[list[int]]:
    groups: dict[Layout, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _flatten(joined: Sequence[jax.Array], plan: Assignment) -> jax.Array:
    """Return every owner's chunk: its runs of all kinds, one after another, (owners, chunk)."""
    if plan.is_even:
        return joined[0].reshape(-1, plan.chunk)
    chunks = []
    for owner in range(plan.counts.shape[1]):
        runs = [
            flat[start : start + count].ravel()
            for flat, start, count in zip(joined, plan.starts[:, owner], plan.counts[:, owner], strict=True)
        ]
        chunk = jnp.concatenate(runs)
        chunks.append(jnp.pad(chunk, (0, plan.chunk - chunk.size)))
    return jnp.stack(chunks)


def _unflatten(chunks: jax.Array, plan: Assignment, kind: int, size: int) -> jax.Array:
    """Return all matrices' shards of one kind, (matrices, entries), from every owner's chunk."""
    if plan.is_even:
        return chunks.reshape(-1, size)
    runs = [
        chunks[owner, offset : offset + count * size].reshape(count, size)
        for owner, (offset, count) in enumerate(zip(plan.offsets[kind], plan.counts[kind], strict=True))
        if count
    ]
    return jnp.concatenate(runs)


def _to_owners(chunks: jax.Array, copying: Names, splitting: Names) -> jax.Array:
    """Return the shards of this device's own matrices, (devices, chunk)."""
    by_copy = chunks.reshape(math.prod(map(lax.axis_size, copying)), -1, chunks.shape[1])
    own = lax.dynamic_index_in_dim(by_copy, lax.axis_index(copying) if copying else 0, keepdims=False)
    return lax.all_to_all(own, splitting, 0, 0, tiled=True) if splitting else own


def _to_holders(shards: jax.Array, copying: Names, splitting: Names) -> jax.Array:
    """Return this device's shards of all matrices, (owners, chunk)."""
    own = lax.all_to_all(shards, splitting, 0, 0, tiled=True) if splitting else shards
    return lax.all_gather(own, copying, tiled=True, to="invarying") if copying else own


def _own_batch(
    received: jax.Array,
    layout: Layout,
    plan: Assignment,
    kind: int,
    owner: Any,
    batches: Sequence[ShardedBatch],
) -> Batch:
    """Return this device's matrices of a kind, as many as any has; those beyond its own are not active."""
    most = int(plan.counts[kind].max())
    length = most * math.prod(layout.sizes)
    shards = lax.dynamic_slice_in_dim(received, _at(plan.offsets[kind], owner), length, 1)
    start = _at(plan.starts[kind], owner)
    ends = [
        jnp.concatenate([jnp.full(len(batch.shards), getattr(batch, end)) for batch in batches])
        for end in ("lower", "upper", "is_active")
    ]
    lower, upper, is_active = (
        lax.dynamic_slice_in_dim(jnp.pad(each, (0, most)), start, most) for each in ends
    )
    is_own = jnp.arange(most) < _at(plan.counts[kind], owner)
    return Batch(layout.unite(shards, most), lower, upper, is_active & is_own)


def _at(numbers: np.ndarray, owner: Any) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)[owner]


def _gather_seen(
    clipped: Sequence[Clipped], plan: Assignment, batch_names: Names, owners: Names
) -> list[list[jax.Array]]:
    """Return what was seen of each kind's matrices on all devices, (parts of the batch, matrices) each."""
    dtype = clipped[0].matrices.dtype
    # All figures in one buffer, flags and counts too: they are small enough to be exact.
    figures = jnp.concatenate(
        [jnp.stack([each.astype(dtype) for each in one[1:]]) for one in clipped], axis=1
    )
    names = batch_names + owners
    everywhere = lax.all_gather(figures, names, to="invarying") if names else figures
    everywhere = everywhere.reshape(-1, plan.counts.shape[1], *figures.shape)
    most = plan.counts.max(axis=1)
    firsts = np.cumsum(most) - most
    seen = []
    for first, counts, one in zip(firsts, plan.counts, clipped, strict=True):
        runs = [everywhere[:, owner, :, first : first + count] for owner, count in enumerate(counts) if count]
        together = jnp.moveaxis(jnp.concatenate(runs, axis=2), 1, 0)
        seen.append([each.astype(like.dtype) for each, like in zip(together, one[1:], strict=True)])
    return seen
