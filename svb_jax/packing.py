"""Many small arrays as one row of numbers.

XLA compiles a kernel for every operation on every shape, while a network has dozens of small parameters in
shapes of their own. What is done to all of them alike is done to the row they make up.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from svb_jax.cutting import cut
from svb_jax.layout import replicate, shard_like

# In numbers: arrays up to the first size share a row whatever their shapes, those up to the second with their
# equals, where that is asked for. Larger ones are not worth their copies.
LARGEST_TO_MIX = 2**16
LARGEST_TO_STACK = 2**19


@dataclass(frozen=True)
class Packing:
    """Which arrays of a list make up a row; one that is alone stays in its shape.

    Attributes:
      rows: the positions in the list of what each row holds, in order.
      shapes: of all arrays of the list.
    """

    rows: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    def pack(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the rows."""
        return [join([arrays[position] for position in row]) for row in self.rows]

    def unpack(
        self, rows: Sequence[jax.Array], like: Sequence[jax.Array], zero: jax.Array
    ) -> list[jax.Array]:
        """Return the arrays, laid out over the devices as ``like`` are.

        Args:
          rows: what ``pack`` returns.
          like: arrays of the same shapes.
          zero: for :func:`cut`, so that one kernel cuts out all arrays of a shape.
        """
        arrays = {}
        for positions, row in zip(self.rows, rows, strict=True):
            pieces = split(
                row,
                [self.shapes[position] for position in positions],
                lambda row, start, stop: cut(row, start, stop, zero),
            )
            arrays |= dict(zip(positions, pieces, strict=True))
        return [shard_like(arrays[position], other) for position, other in enumerate(like)]


def pack_small(*lists: Sequence[jax.Array]) -> Packing:
    """Return the packing of small arrays of any shapes, the others alone.

    Args:
      *lists: of arrays, alike in their shapes; those in a row have one type in each list.
    """
    shapes = [array.shape for array in lists[0]]
    types = [tuple(array.dtype for array in arrays) for arrays in zip(*lists, strict=True)]
    return _pack(shapes, types, [math.prod(shape) <= LARGEST_TO_MIX for shape in shapes])


def pack_equal(arrays: Sequence[jax.Array]) -> Packing:
    """Return the packing of arrays of equal shapes and types, up to a size, the others alone."""
    shapes = [array.shape for array in arrays]
    kinds = [(array.shape, array.dtype) for array in arrays]
    return _pack(shapes, kinds, [math.prod(shape) <= LARGEST_TO_STACK for shape in shapes])


def _pack(shapes: list[tuple[int, ...]], kinds: list[Any], is_packed: list[bool]) -> Packing:
    """Return the packing of arrays of a kind, equal ones side by side in the order of their first."""
    groups: dict[Any, dict[tuple[int, ...], list[int]]] = {}
    for position, shape in enumerate(shapes):
        group = kinds[position] if is_packed[position] else position
        groups.setdefault(group, {}).setdefault(shape, []).append(position)
    rows = [tuple(itertools.chain(*by_shape.values())) for by_shape in groups.values()]
    return Packing(tuple(rows), tuple(shapes))


def join(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return arrays one after another as a row of numbers, or a single one as it is."""
    if len(arrays) == 1:
        return arrays[0]
    row = jnp.concatenate([replicate(jnp.asarray(array)).reshape(-1) for array in arrays])
    return _whole(row) if jax.device_count() > 1 else row


def _whole(row: jax.Array) -> jax.Array:
    """Return a row that every device holds, where XLA decides on the layout (automatic sharding).

    It would spread the row over the devices as one of its parts is, and hand it round again for every part
    that is cut out. It does not look through an update of a longer row.
    """
    longer = jnp.zeros_like(jnp.concatenate([row, row[:1]]))
    return lax.dynamic_update_slice(longer, row, (0,))[:-1]


def split(
    row: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    take: Callable[[jax.Array, int, int], jax.Array] = lambda row, start, stop: row[start:stop],
) -> list[jax.Array]:
    """Return the arrays that ``join`` would join so; ``take`` gets a part of a row."""
    if len(shapes) == 1:
        return [row.reshape(shapes[0])]
    stops = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [
        take(row, start, stop).reshape(shape)
        for start, stop, shape in zip([0, *stops], stops, shapes, strict=False)
    ]
