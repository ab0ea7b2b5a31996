"""One exchange in, one out: whole matrices for their owners from every device's shards, and back.

All of this runs where the mesh's axes have names, inside ``shard_map`` or ``pmap``. An axis of the mesh may
split the matrices themselves (their shards must be brought together), split the batch (each device has whole
matrices of its own), or neither: then its devices hold copies, share the work, and hand the results round.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from svb_jax._src.clip import Method, clip_batches
from svb_jax._src.clip.assignment import Assignment, lay_out
from svb_jax._src.clip.batch import Batch
from svb_jax._src.stats import Clipped

Names = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How a matrix lies on the devices; matrices laid out alike travel together.

    Attributes:
      sizes: of the axes that make up a matrix, this device's part of each.
      names: of the mesh's axes that split each of them.
      num_rows: how many of them make up the rows.
      dtype: of the entries.
    """

    sizes: tuple[int, ...]
    names: tuple[Names, ...]
    num_rows: int
    dtype: Any

    @property
    def splitting(self) -> Names:
        """Return the mesh's axes that split a matrix, in an order that all layouts share."""
        return tuple(sorted(itertools.chain.from_iterable(self.names)))

    @property
    def shape(self) -> tuple[int, int]:
        """Return a whole matrix's shape."""
        whole = [
            size * math.prod(map(lax.axis_size, names))
            for size, names in zip(self.sizes, self.names, strict=True)
        ]
        return math.prod(whole[: self.num_rows]), math.prod(whole[self.num_rows :])

    def transposed(self) -> "Layout":
        """Return the layout of the transposed matrices."""
        rows, columns = slice(self.num_rows), slice(self.num_rows, None)
        sizes, names = self.sizes[columns] + self.sizes[rows], self.names[columns] + self.names[rows]
        return Layout(sizes, names, len(sizes) - self.num_rows, self.dtype)

    def unite(self, shards: jax.Array, count: int) -> jax.Array:
        """Return ``count`` whole matrices from all devices' shards of them, (devices, entries)."""
        apart = shards.reshape(*self._num_shards, count, *self.sizes)
        return apart.transpose(self._order).reshape(count, *self.shape)

    def divide(self, matrices: jax.Array) -> jax.Array:
        """Return the shards (devices, entries) of whole matrices."""
        apart = [
            [*map(lax.axis_size, names), size] for size, names in zip(self.sizes, self.names, strict=True)
        ]
        spread = matrices.reshape(len(matrices), *itertools.chain.from_iterable(apart))
        return spread.transpose(np.argsort(self._order)).reshape(math.prod(self._num_shards), -1)

    @property
    def _num_shards(self) -> list[int]:
        return [lax.axis_size(name) for name in self.splitting]

    @property
    def _order(self) -> list[int]:
        """Where the axes of (splitting axes, count, sizes) go in whole matrices."""
        first = len(self.splitting)
        places = [
            [*map(self.splitting.index, names), first + 1 + axis] for axis, names in enumerate(self.names)
        ]
        return [first, *itertools.chain.from_iterable(places)]


class Stack(NamedTuple):
    """The matrices of one leaf, as one device holds them, with their band.

    Attributes:
      shards: (b, ...), then the axes of ``layout``.
      layout: how each matrix lies.
      batch_names: the mesh's axes that split the batch.
      lower: the lower end of the band of all.
      upper: its upper end.
      is_active: whether to clip them.
    """

    shards: jax.Array
    layout: Layout
    batch_names: Names
    lower: jax.Array
    upper: jax.Array
    is_active: jax.Array


class Result(NamedTuple):
    """A stack's new shards, and what was seen of its matrices on all devices.

    Attributes:
      shards: as in the stack.
      seen: the figures of :class:`Clipped`, in no particular order of the matrices.
    """

    shards: jax.Array
    seen: list[jax.Array]


def clip_stacks(stacks: Sequence[Stack], axes: Names, method: Method) -> list[Result]:
    """Clip all matrices, each on one device of the axes, and return them as they lay.

    Args:
      stacks: every device's shards.
      axes: all axes of the mesh over which to share.
      method: the route.
    """
    results: dict[int, Result] = {}
    last: list[jax.Array] = []
    for members in _rounds(stacks, axes):
        chosen = [stacks[index] for index in members]
        # One round after another, so that no more than one is in flight and takes memory.
        shards, last = lax.optimization_barrier(([stack.shards for stack in chosen], last))
        chosen = [stack._replace(shards=each) for stack, each in zip(chosen, shards, strict=True)]
        clipped = _clip_round(chosen, axes, method)
        last = [result.shards for result in clipped]
        results |= zip(members, clipped, strict=True)
    return [results[index] for index in range(len(stacks))]


def _rounds(stacks: Sequence[Stack], axes: Names) -> list[list[int]]:
    """Return which stacks are exchanged together.

    Equal matrices that all devices can share evenly go alone; all others go together, since matrices of
    several shapes are more evenly dealt out than those of each.
    """
    alike: dict[Any, dict[Any, list[int]]] = {}
    for index, stack in enumerate(stacks):
        layout = stack.layout
        group = layout.splitting, stack.batch_names, str(layout.dtype)
        alike.setdefault(group, {}).setdefault(tuple(sorted(layout.shape)), []).append(index)
    rounds = []
    for (_, batch_names, _), groups in alike.items():
        num_owners = math.prod(lax.axis_size(name) for name in axes if name not in batch_names)
        rest = []
        for members in groups.values():
            is_even = sum(len(stacks[index].shards) for index in members) % num_owners == 0
            (rounds.append if is_even else rest.extend)(members)
        rounds += [rest] if rest else []
    return rounds


def _clip_round(stacks: Sequence[Stack], axes: Names, method: Method) -> list[Result]:
    """Clip stacks that lie on the same axes of the mesh."""
    turned = [_standing(stack) for stack in stacks]
    kinds = _group(stack.layout for stack in turned)
    layouts = [turned[members[0]].layout for members in kinds]
    joined = [jnp.concatenate([_flat(turned[index]) for index in members]) for members in kinds]
    splitting, batch_names = layouts[0].splitting, stacks[0].batch_names
    copying = tuple(name for name in axes if name not in splitting + batch_names)
    shapes = [(len(flat), *layout.shape) for flat, layout in zip(joined, layouts, strict=True)]
    num_owners = math.prod(map(lax.axis_size, copying + splitting))
    plan = lay_out(shapes, [flat.shape[1] for flat in joined], num_owners)
    owner = lax.axis_index(copying + splitting) if copying + splitting else 0

    # Slices are as long as their kind's longest run, and may reach beyond the end of a chunk.
    runs = plan.counts.max(axis=1) * [flat.shape[1] for flat in joined]
    beyond = int((plan.offsets + runs[:, None]).max()) - plan.chunk
    received = _to_owners(_pack(joined, plan), copying, splitting)
    received = jnp.pad(received, [(0, 0), (0, beyond)])
    own = [
        _own_batch(received, layout, plan, kind, owner, [turned[index] for index in kinds[kind]])
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
        pieces = _unpack(returned, plan, kind, joined[kind].shape[1])
        ends = list(itertools.accumulate(len(turned[index].shards) for index in members))
        for index, start, end in zip(members, [0, *ends], ends, strict=False):
            shards = _as_before(pieces[start:end], stacks[index], turned[index])
            results[index] = Result(shards, [each[:, start:end].ravel() for each in seen[kind]])
    return [results[index] for index in range(len(stacks))]


def _standing(stack: Stack) -> Stack:
    """Return a stack of tall matrices, with the split axis of square ones first, so that more are alike."""
    layout = stack.layout
    rows, columns = layout.shape
    is_split_last = any(layout.names[layout.num_rows :]) and not any(layout.names[: layout.num_rows])
    if rows > columns or (rows == columns and not is_split_last):
        return stack
    order = [0, *range(1 + layout.num_rows, stack.shards.ndim), *range(1, 1 + layout.num_rows)]
    return stack._replace(shards=stack.shards.transpose(order), layout=layout.transposed())


def _as_before(pieces: jax.Array, stack: Stack, turned: Stack) -> jax.Array:
    """Return flat shards in the shape and order of a stack's."""
    shards = pieces.reshape(turned.shards.shape)
    if turned.layout == stack.layout:
        return shards
    num_columns = shards.ndim - 1 - stack.layout.num_rows
    order = [0, *range(1 + num_columns, shards.ndim), *range(1, 1 + num_columns)]
    return shards.transpose(order)


def _flat(stack: Stack) -> jax.Array:
    return stack.shards.reshape(len(stack.shards), -1)


def _group(keys: Iterable[Layout]) -> list[list[int]]:
    groups: dict[Layout, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _pack(joined: Sequence[jax.Array], plan: Assignment) -> jax.Array:
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


def _unpack(chunks: jax.Array, plan: Assignment, kind: int, size: int) -> jax.Array:
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
    received: jax.Array, layout: Layout, plan: Assignment, kind: int, owner: Any, stacks: Sequence[Stack]
) -> Batch:
    """Return this device's matrices of a kind, as many as any has; those beyond its own are not active."""
    most = int(plan.counts[kind].max())
    length = most * math.prod(layout.sizes)
    shards = lax.dynamic_slice_in_dim(received, _at(plan.offsets[kind], owner), length, 1)
    start = _at(plan.starts[kind], owner)
    ends = [
        jnp.concatenate([jnp.full(len(stack.shards), getattr(stack, end)) for stack in stacks])
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
