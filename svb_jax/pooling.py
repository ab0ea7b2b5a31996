"""Small matrices of unequal shapes in one array of numbers, each read as a window of one common shape.

A program is compiled anew for every shape in it, and for small matrices that takes far longer than to clip
them. So those of a pool go through one program: zeros fill each up to the pool's window. LAPACK leaves such
rows and columns alone, also where it completes the vectors of a matrix without full rank.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from svb_jax.cutting import take
from svb_jax.stacks import Shape

# How many times their own numbers the windows of a pool may hold.
MOST_FILLING = 4


class Place(NamedTuple):
    """Where a matrix stands among the numbers of its pool.

    Attributes:
      start: its first number.
      long: the length of its long side, the window's rows.
      short: the length of its short side, the window's columns.
      row_stride: how far its number lies from the one in the window's next row.
      column_stride: how far from the one in the next column.
      member: the stack it is from, as the pool counts them.
    """

    start: jax.Array
    long: jax.Array
    short: jax.Array
    row_stride: jax.Array
    column_stride: jax.Array
    member: jax.Array


@dataclass(frozen=True)
class Pool:
    """Matrices that share a window.

    Attributes:
      members: which stacks of a row they are.
      shapes: (count, m, n) of all stacks of the row.
    """

    members: tuple[int, ...]
    shapes: tuple[Shape, ...]

    @property
    def window(self) -> tuple[int, int]:
        """Return the longest long and the longest short side."""
        sides = [self.shapes[member][1:] for member in self.members]
        return max(map(max, sides)), max(map(min, sides))

    @property
    def window_size(self) -> int:
        """Return how many numbers a window holds."""
        return self.window[0] * self.window[1]

    @property
    def count(self) -> int:
        """Return how many matrices there are."""
        return sum(self.shapes[member][0] for member in self.members)

    def place(self, index: ArrayLike) -> Place:
        """Return where a matrix stands."""
        return Place(*jnp.unstack(take(jnp.asarray(self._places), index)))

    def take(self, numbers: jax.Array, place: Place) -> jax.Array:
        """Return a matrix, its long side first, in a window filled up with zeros."""
        row, column = (lax.broadcasted_iota(jnp.int32, self.window, axis) for axis in (0, 1))
        is_inside = (row < place.long) & (column < place.short)
        inner = jnp.where(is_inside, row * place.row_stride + column * place.column_stride, 0)
        return jnp.where(is_inside, numbers.at[place.start + inner].get(mode="promise_in_bounds"), 0)

    def put(self, numbers: jax.Array, window: jax.Array, place: Place) -> jax.Array:
        """Return the numbers with a matrix replaced by the part of a window that is its own."""
        inner = jnp.arange(self.window_size, dtype=jnp.int32)
        is_wide = place.column_stride > 1
        width = jnp.maximum(place.row_stride, place.column_stride)
        # Exact, since there are far fewer places than a float32 has digits; and faster than whole numbers.
        high = ((inner + 0.5) / width).astype(jnp.int32)
        low = inner - high * width
        is_inside = inner < place.long * place.short
        own = window.at[jnp.where(is_wide, low, high), jnp.where(is_wide, high, low)].get(mode="clip")
        behind = lax.dynamic_slice_in_dim(
            numbers, place.start, self.window_size, allow_negative_indices=False
        )
        replaced = jnp.where(is_inside, own, behind)
        return lax.dynamic_update_slice_in_dim(
            numbers, replaced, place.start, 0, allow_negative_indices=False
        )

    @functools.cached_property
    def _places(self) -> np.ndarray:
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum(sizes) - sizes
        places = [
            (starts[member] + index * m * n, max(m, n), min(m, n), *((n, 1) if m >= n else (1, n)), member)
            for member in self.members
            for count, m, n in [self.shapes[member]]
            for index in range(count)
        ]
        return np.asarray(places, np.int32)


def make_pools(shapes: tuple[Shape, ...]) -> list[Pool]:
    """Return pools of all matrices in a row of stacks, each with as many as its filling allows."""
    waiting = [member for member, shape in enumerate(shapes) if math.prod(shape)]
    waiting.sort(key=lambda member: -math.prod(shapes[member][1:]))
    pools = []
    while waiting:
        pool = Pool((), shapes)
        for member in waiting:
            larger = Pool((*pool.members, member), shapes)
            if _is_filled_well(larger):
                pool = larger
        pools.append(pool)
        waiting = [member for member in waiting if member not in pool.members]
    return pools


def _is_filled_well(pool: Pool) -> bool:
    numbers = sum(math.prod(pool.shapes[member]) for member in pool.members)
    return pool.count * pool.window_size <= MOST_FILLING * numbers
