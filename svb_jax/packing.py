"""Many small arrays as one row of numbers.

XLA compiles a kernel for every operation on every shape, while a network has dozens of small parameters in
shapes of their own. What is done to all of them alike is done to the row they make up.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from svb_jax.cutting import cut
from svb_jax.layout import replicate, shard_like

# In numbers: arrays up to the first size share a row, those up to the second with others of their shape only.
# Larger ones are not worth their copies.
LARGEST_TO_MIX = 2**16
LARGEST_TO_PACK = 2**19


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

    def blank(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return rows of zeros, and what is alone as it is."""
        packed = zip(self.rows, self.pack(arrays), strict=True)
        return [array if len(row) == 1 else jnp.zeros_like(array) for row, array in packed]

    def unpack_if(
        self, is_packed: jax.Array, rows: Sequence[jax.Array], arrays: Sequence[jax.Array], zero: jax.Array
    ) -> list[jax.Array]:
        """Return what was packed into ``rows``, or the arrays if these are ``blank``.

        XLA makes the choice part of whatever uses the arrays. A conditional that returned all of them would
        need a kernel for each shape.

        Args:
          is_packed: whether the rows are not blank.
          rows: what ``pack`` returns for new arrays, or what ``blank`` returns.
          arrays: the old ones.
          zero: for :func:`cut`.
        """
        new = self.unpack(rows, arrays, zero)
        for row in self.rows:
            if len(row) > 1:
                for position in row:
                    new[position] = jnp.where(is_packed, new[position], arrays[position])
        return new


def make_packing(*lists: Sequence[jax.Array]) -> Packing:
    """Return the packing of lists of arrays, alike in their shapes; a row's arrays have one type in each."""
    shapes = tuple(array.shape for array in lists[0])
    groups: dict[tuple[object, ...], list[int]] = {}
    for position, arrays in enumerate(zip(*lists, strict=True)):
        size = math.prod(shapes[position])
        own = shapes[position] if size > LARGEST_TO_MIX else None
        alone = position if size > LARGEST_TO_PACK else None
        groups.setdefault((own, alone, *(array.dtype for array in arrays)), []).append(position)
    return Packing(tuple(_equal_ones_together(group, shapes) for group in groups.values()), shapes)


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


def _equal_ones_together(positions: list[int], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first = {shape: order for order, shape in reversed([*enumerate(shapes[p] for p in positions)])}
    return tuple(sorted(positions, key=lambda position: first[shapes[position]]))
