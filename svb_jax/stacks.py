"""Stacks of equal matrices, one after another in a row of numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from svb_jax.packing import join, split

Shape = tuple[int, int, int]
Band = tuple[ArrayLike, ArrayLike]
# Lower and upper end, for each stack of a row, or once for all.
Bands = Sequence[Band]


def band_of(bands: Bands, position: int) -> Band:
    """Return the band of a stack of a row."""
    return bands[0] if len(bands) == 1 else bands[position]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacks:
    """Stacks of matrices.

    Attributes:
      numbers: all of them, in one row.
      shapes: (count, m, n) of each stack.
    """

    numbers: jax.Array
    shapes: tuple[Shape, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, stacks: Sequence[jax.Array]) -> "Stacks":
        """Return stacks (count, m, n) in one row."""
        shapes = tuple((count, m, n) for count, m, n in (stack.shape for stack in stacks))
        return cls(join(stacks).reshape(-1), shapes)

    def split(self) -> list[jax.Array]:
        """Return the stacks (count, m, n)."""
        return split(self.numbers, self.shapes)

    def replace(self, numbers: jax.Array) -> "Stacks":
        """Return stacks of the same shapes with other numbers."""
        return replace(self, numbers=numbers)

    @property
    def largest(self) -> int:
        """Return how many numbers the largest matrix has."""
        return max(math.prod(shape[1:]) for shape in self.shapes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Share:
    """The part of a stack that is clipped; the rest comes back as it is.

    Attributes:
      start: the first matrix.
      count: how many.
      most: the most that any caller will ask for.
    """

    start: ArrayLike
    count: ArrayLike
    most: int = field(metadata={"static": True})

    def holds(self, length: int) -> jax.Array:
        """Return which of a stack's ``length`` matrices it holds."""
        index = jnp.arange(length)
        return (index >= self.start) & (index < self.start + self.count)


# Of each stack of a row, if not all is clipped.
Shares = Sequence[Share | None]
