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
MOST_FILLING = 2


class Place(NamedTuple):
    """Where a matrix stands among the numbers of its pool.

    Attributes:
      start: its first number.
      long: the length of its long side, the window's rows.
      short: the length of its short side, the window's columns.
      row_stride: how far its number lies from the one in the window's next row.
      column_stride: how far from the one in the next column.
      fits: how many such matrices fit into a window, each with rows and columns of its own.
      member: the stack it is from.
      position: its place in that stack.
    """

    start: jax.Array
    long: jax.Array
    short: jax.Array
    row_stride: jax.Array
    column_stride: jax.Array
    fits: jax.Array
    member: jax.Array
    position: jax.Array


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

    def take(self, numbers: jax.Array, place: Place, num: ArrayLike) -> jax.Array:
        """Return a matrix and those behind it, ``num`` in all, in a window filled up with zeros.

        Each has its long side first, and rows and columns of its own: none is longer or wider for it.
        """
        row, column = (lax.broadcasted_iota(jnp.int32, self.window, axis) for axis in (0, 1))
        order = _divide(row, place.long)
        is_inside = (order == _divide(column, place.short)) & (order < num)
        row, column = row - order * place.long, column - order * place.short
        inner = order * place.long * place.short + row * place.row_stride + column * place.column_stride
        numbers = numbers.at[place.start + jnp.where(is_inside, inner, 0)].get(mode="promise_in_bounds")
        return jnp.where(is_inside, numbers, 0)

    def put(self, numbers: jax.Array, window: jax.Array, place: Place, num: ArrayLike) -> jax.Array:
        """Return the numbers with ``num`` matrices replaced by the parts of a window that are their own."""
        inner = jnp.arange(self.window_size, dtype=jnp.int32)
        size = place.long * place.short
        order = _divide(inner, size)
        is_inside = order < num
        inner = inner - order * size
        is_wide = place.column_stride > 1
        width = jnp.maximum(place.row_stride, place.column_stride)
        high = _divide(inner, width)
        low = inner - high * width
        row = order * place.long + jnp.where(is_wide, low, high)
        column = order * place.short + jnp.where(is_wide, high, low)
        own = window.at[row, column].get(mode="clip")
        behind = lax.dynamic_slice_in_dim(
            numbers, place.start, self.window_size, allow_negative_indices=False
        )
        replaced = jnp.where(is_inside, own, behind)
        return lax.dynamic_update_slice_in_dim(
            numbers, replaced, place.start, 0, allow_negative_indices=False
        )

    @property
    def num_windows(self) -> int:
        """Return how many windows hold all matrices."""
        return sum(-(-self.shapes[member][0] // self._fits(member)) for member in self.members)

    def _fits(self, member: int) -> int:
        sides = self.shapes[member][1:]
        return min(self.window[0] // max(sides), self.window[1] // min(sides))

    @functools.cached_property
    def _places(self) -> np.ndarray:
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum(sizes) - sizes
        places = []
        for member in self.members:
            count, m, n = self.shapes[member]
            strides = (n, 1) if m >= n else (1, n)
            for position in range(count):
                start = starts[member] + position * m * n
                places.append((start, max(m, n), min(m, n), *strides, self._fits(member), member, position))
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
    return pool.num_windows * pool.window_size <= MOST_FILLING * numbers


def _divide(place: jax.Array, length: jax.Array) -> jax.Array:
    """Return the quotient of a place in a window and a length, without what remains.

    Exact, since there are far fewer places than a float32 has digits; and faster than with whole numbers.
    """
    return ((place + 0.5) / length).astype(jnp.int32)
