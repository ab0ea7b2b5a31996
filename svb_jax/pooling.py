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
      rows: how many it has.
      columns: how many it has, that is how far one of its rows lies behind the other.
      is_wide: 1 if it has more columns than rows, and is turned over in a window.
      fits: how many of its stack, from it on, fit into a window, each with rows and columns of its own.
      member: the stack it is from.
      position: its place in that stack.
      inverse_rows: 1 / rows; to multiply by it is faster than to divide, and compiled faster.
      inverse_columns: 1 / columns.
    """

    start: jax.Array
    rows: jax.Array
    columns: jax.Array
    is_wide: jax.Array
    fits: jax.Array
    member: jax.Array
    position: jax.Array
    inverse_rows: jax.Array
    inverse_columns: jax.Array

    @property
    def short(self) -> jax.Array:
        """Return its shorter side."""
        return jnp.where(self.is_wide > 0, self.rows, self.columns)


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
        whole, inverse = (jnp.unstack(take(jnp.asarray(table), index)) for table in self._places)
        return Place(*whole, *inverse)

    def take(self, numbers: jax.Array, place: Place, num: ArrayLike) -> jax.Array:
        """Return a matrix and those behind it, ``num`` in all, in a window filled up with zeros.

        Each has its long side first, and rows and columns of its own: none is longer or wider for it.
        """
        long, short = (lax.broadcasted_iota(jnp.int32, self.window, axis) for axis in (0, 1))
        is_wide = place.is_wide > 0
        row, column = jnp.where(is_wide, short, long), jnp.where(is_wide, long, short)
        order = _quotient(row, place.inverse_rows)
        is_inside = (order == _quotient(column, place.inverse_columns)) & (order < num)
        inner = (row - order) * place.columns + column
        numbers = numbers.at[place.start + jnp.where(is_inside, inner, 0)].get(mode="promise_in_bounds")
        return jnp.where(is_inside, numbers, 0)

    def put(self, numbers: jax.Array, window: jax.Array, place: Place, num: ArrayLike) -> jax.Array:
        """Return the numbers with ``num`` matrices replaced by the parts of a window that are their own.

        As many numbers are put back as a window holds. Behind the last matrices there are none, but before:
        either one stack has the window's own shape, or MOST_FILLING bounds at least two windows by them.
        """
        first = jnp.minimum(place.start, numbers.size - self.window_size)
        inner = jnp.arange(self.window_size, dtype=jnp.int32) - (place.start - first)
        row = _quotient(inner, place.inverse_columns)
        order = _quotient(row, place.inverse_rows)
        column = inner - (row - order) * place.columns
        is_wide = place.is_wide > 0
        long, short = jnp.where(is_wide, column, row), jnp.where(is_wide, row, column)
        own = window.at[long, short].get(mode="clip")
        others = lax.dynamic_slice_in_dim(numbers, first, self.window_size, allow_negative_indices=False)
        replaced = jnp.where((inner >= 0) & (order < num), own, others)
        return lax.dynamic_update_slice_in_dim(numbers, replaced, first, 0, allow_negative_indices=False)

    @property
    def num_windows(self) -> int:
        """Return how many windows hold all matrices."""
        return sum(-(-self.shapes[member][0] // self._fits(member)) for member in self.members)

    def _fits(self, member: int) -> int:
        sides = self.shapes[member][1:]
        return min(self.window[0] // max(sides), self.window[1] // min(sides))

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum(sizes) - sizes
        places = np.asarray(
            [
                (
                    starts[member] + position * m * n,
                    *(m, n, m < n),
                    min(self._fits(member), count - position),
                    *(member, position),
                )
                for member in self.members
                for count, m, n in [self.shapes[member]]
                for position in range(count)
            ],
            np.int32,
        )
        return places, (1 / places[:, 1:3]).astype(np.float32)


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


def _quotient(place: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return a place in a window divided by what ``inverse`` is one part of, without what remains.

    Exact, since there are far fewer places than a float32 has digits.
    """
    return (place * inverse + 0.5 * inverse).astype(jnp.int32)
