"""Small matrices of unequal shapes in one array of numbers, each read as a window of one common shape.

A program is compiled anew for every shape in it, and for small matrices that takes far longer than to clip
them. So those of a pool go through one program: zeros fill each up to the pool's window. LAPACK leaves such
rows and columns alone, also where it completes the vectors of a matrix without full rank.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from svb_jax.cutting import take

# In numbers: larger matrices are worth a program for each of their shapes.
LARGEST_TO_POOL = 2**16

# How many times their own numbers the windows of a pool may hold.
MOST_FILLING = 2


@dataclass(frozen=True)
class Pool:
    """Matrices that share a window.

    Attributes:
      members: which of the stacks they were.
      shapes: those stacks' shapes.
    """

    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def window(self) -> tuple[int, int]:
        """Return the longest long and the longest short side."""
        return max(max(shape[1:]) for shape in self.shapes), max(min(shape[1:]) for shape in self.shapes)

    @property
    def count(self) -> int:
        """Return how many matrices there are."""
        return sum(count for count, _, _ in self.shapes)

    def gather(self, stacks: Sequence[jax.Array]) -> jax.Array:
        """Return the numbers of its stacks, and room for a window that begins at the last."""
        parts = [stack.reshape(-1) for stack in stacks]
        return jnp.concatenate([*parts, jnp.zeros_like(parts[0], shape=self._window_size)])

    def scatter(self, numbers: jax.Array) -> list[jax.Array]:
        """Return the stacks that ``gather`` would read as these numbers."""
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])
        return [
            numbers[end - np.prod(shape) : end].reshape(shape)
            for end, shape in zip(ends, self.shapes, strict=True)
        ]

    def short_side(self, index: ArrayLike) -> jax.Array:
        """Return the short side of a matrix."""
        return self._place(index)[2]

    def take(self, numbers: jax.Array, index: ArrayLike) -> jax.Array:
        """Return a matrix, its long side first, in a window filled up with zeros."""
        start, long, short, is_wide = self._place(index)
        row, column = (lax.broadcasted_iota(jnp.int32, self.window, axis) for axis in (0, 1))
        inner = jnp.where(is_wide, column * long + row, row * short + column)
        is_inside = (row < long) & (column < short)
        place = start + jnp.where(is_inside, inner, 0)
        return jnp.where(is_inside, numbers.at[place].get(mode="promise_in_bounds"), 0)

    def put(self, numbers: jax.Array, window: jax.Array, index: ArrayLike) -> jax.Array:
        """Return the numbers with a matrix replaced by the part of a window that is its own."""
        start, long, short, is_wide = self._place(index)
        place = jnp.arange(self._window_size, dtype=jnp.int32)
        width = jnp.where(is_wide, long, short)
        # Exact, since there are far fewer places than a float32 has digits; and faster than whole numbers.
        outer = ((place + 0.5) / width).astype(jnp.int32)
        inner = place - outer * width
        row, column = jnp.where(is_wide, inner, outer), jnp.where(is_wide, outer, inner)
        is_inside = place < long * short
        own = window.at[jnp.where(is_inside, row, 0), jnp.where(is_inside, column, 0)]
        behind = lax.dynamic_slice_in_dim(numbers, start, self._window_size, allow_negative_indices=False)
        replaced = jnp.where(is_inside, own.get(mode="promise_in_bounds"), behind)
        return lax.dynamic_update_slice_in_dim(numbers, replaced, start, 0, allow_negative_indices=False)

    @property
    def _window_size(self) -> int:
        return self.window[0] * self.window[1]

    def _place(self, index: ArrayLike) -> tuple[jax.Array, ...]:
        """Return where a matrix begins, its long and short side, and whether its rows are the longer."""
        start, long, short, is_wide = jnp.unstack(take(jnp.asarray(self._places), index))
        return start, long, short, is_wide > 0

    @functools.cached_property
    def _places(self) -> np.ndarray:
        rows = [
            (rows * columns, max(rows, columns), min(rows, columns), rows < columns)
            for count, rows, columns in self.shapes
            for _ in range(count)
        ]
        places = np.asarray(rows, np.int32)
        places[:, 0] = np.cumsum(places[:, 0]) - places[:, 0]
        return places


def make_pools(stacks: Sequence[jax.Array]) -> list[Pool]:
    """Return pools of all stacks whose matrices are small, each with as many as its filling allows."""
    waiting = [
        index for index, stack in enumerate(stacks) if stack.shape[1] * stack.shape[2] <= LARGEST_TO_POOL
    ]
    waiting.sort(key=lambda index: -stacks[index].shape[1] * stacks[index].shape[2])
    pools = []
    while waiting:
        members: list[int] = []
        for index in waiting:
            if _is_filled_well([stacks[member] for member in (*members, index)]):
                members.append(index)
        pools.append(Pool(tuple(members), tuple(stacks[member].shape for member in members)))
        waiting = [index for index in waiting if index not in members]
    return pools


def _is_filled_well(stacks: list[jax.Array]) -> bool:
    pool = Pool(tuple(range(len(stacks))), tuple(stack.shape for stack in stacks))
    long, short = pool.window
    is_alike = len({stack.dtype for stack in stacks}) == 1
    return is_alike and pool.count * long * short <= MOST_FILLING * sum(stack.size for stack in stacks)
