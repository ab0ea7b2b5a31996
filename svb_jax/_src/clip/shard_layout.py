"""How a matrix lies on the devices of a mesh, and how its shards make it up."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Names = tuple[str, ...]


def on_explicit_axes(sharding: NamedSharding) -> NamedSharding:
    """Return a sharding without the mesh's automatic axes, which the types of arrays cannot name."""
    mesh = sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    chosen = [name for name, kind in kinds if kind == AxisType.Explicit]
    entries = [(each,) if isinstance(each, str) else each or () for each in sharding.spec]
    named = [tuple(name for name in each if name in chosen) or None for each in entries]
    return sharding.update(spec=PartitionSpec(*named))


@dataclass(frozen=True)
class Layout:
    """How a matrix lies on the devices; matrices laid out alike travel together.

    Attributes:
      sizes: Of the axes that make up a matrix, this device's part of each.
      names: Of the mesh's axes that split each of them.
      num_rows: How many of them make up the rows.
      dtype: Of the entries.
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
