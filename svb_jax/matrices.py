"""From a parameter tree to stacks of equal matrices, and back."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from svb_jax import axes as axes_lib
from svb_jax.axes import MatrixAxes, path_string
from svb_jax.packing import join, split
from svb_jax.stacks import Stacks

DimensionNumbers = Any | Callable[[Any], Any] | None


@dataclass(frozen=True)
class MatrixLeaf:
    """One leaf that holds matrices: where it stands in the flattened tree, and how it is read."""

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    groups: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return one matrix's (reduction, output) size."""
        return self._size(self.reduction), self._size(self.output) // self.groups

    @property
    def count(self) -> int:
        """Return how many matrices the leaf holds."""
        return self._size(self.batch) * self.groups

    @property
    def compute_dtype(self) -> DTypeLike:
        """Return the type to decompose in: half types go through float32."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def is_in_order(self) -> bool:
        """Return whether its numbers, as they lie in memory, are those of its matrices one after another."""
        return self.groups == 1 and self._order == tuple(range(len(self.shape)))

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """Return the leaf as a stack (count, reduction, output)."""
        rows, columns = self.matrix_shape
        # In this order a Flax kernel without groups is only reshaped, never copied.
        merged = jnp.transpose(leaf, self._order).reshape(-1, rows, self.groups, columns)
        return jnp.moveaxis(merged, 2, 1).reshape(self.count, rows, columns)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """Return the leaf that ``to_matrices`` would read as these."""
        rows, columns = self.matrix_shape
        merged = jnp.moveaxis(matrices.reshape(-1, self.groups, rows, columns), 1, 2)
        split = merged.reshape([self.shape[a] for a in self._order])
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return jnp.transpose(split, inverse)

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.reduction + self.output

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[a] for a in axes)


def matrix_leaves(params: Any, dimension_numbers: DimensionNumbers = None) -> list[MatrixLeaf]:
    """Return every leaf that holds matrices, or raise where there is none."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    chosen = _axes_by_path(params, dimension_numbers)
    found = [
        _read_leaf(index, path_string(path), leaf, axes)
        for index, (path, leaf) in enumerate(leaves)
        if (axes := chosen.get(path_string(path))) is not None
    ]
    if not found:
        seen = (
            ", ".join(f"{path_string(path)} {getattr(leaf, 'shape', ())}" for path, leaf in leaves)
            or "nothing"
        )
        raise ValueError(
            "svb_jax found no weight matrix: it takes leaves called kernel, w or weight unless "
            f"dimension_numbers= says otherwise (svb_jax.every_matrix takes all), and it saw {seen}."
        )
    return found


def to_stacks(leaves: Sequence[MatrixLeaf], row: jax.Array) -> Stacks:
    """Return a row of leaves, or a single one, as stacks of their matrices: side by side, if equal."""
    shapes = tuple(
        (sum(leaf.count for leaf in equal), *shape)
        for shape, equal in itertools.groupby(leaves, lambda leaf: leaf.matrix_shape)
    )
    if not all(leaf.is_in_order for leaf in leaves):
        values = split(row, [leaf.shape for leaf in leaves])
        row = join([leaf.to_matrices(value) for leaf, value in zip(leaves, values, strict=True)])
    return Stacks(row.reshape(-1), shapes)


def from_stacks(leaves: Sequence[MatrixLeaf], stacks: Stacks) -> jax.Array:
    """Return the row that ``to_stacks`` would read so."""
    row = stacks.numbers
    if not all(leaf.is_in_order for leaf in leaves):
        matrices = split(row, [(leaf.count, *leaf.matrix_shape) for leaf in leaves])
        row = join([leaf.from_matrices(each) for leaf, each in zip(leaves, matrices, strict=True)])
    return row.reshape(leaves[0].shape) if len(leaves) == 1 else row


def matrices_by_path(params: Any, dimension_numbers: DimensionNumbers = None) -> dict[str, jax.Array]:
    """Return every leaf's matrices as a stack (count, reduction, output), by path."""
    values = jax.tree.leaves(params)
    return {
        leaf.path: leaf.to_matrices(jnp.asarray(values[leaf.index], leaf.compute_dtype))
        for leaf in matrix_leaves(params, dimension_numbers)
    }


def _axes_by_path(params: Any, dimension_numbers: DimensionNumbers) -> dict[str, Any]:
    if dimension_numbers is None:
        dimension_numbers = axes_lib.by_name
    # A tree may be callable too: an Equinox module with axes for leaves.
    is_function = callable(dimension_numbers) and jax.tree_util.all_leaves([dimension_numbers])
    tree = dimension_numbers(params) if is_function else dimension_numbers
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_axes)[0]
    return {path_string(path): axes for path, axes in flat}


def _is_axes(node: Any) -> bool:
    # By its fields, so that optax.contrib.MuonDimensionNumbers is taken too.
    return node is None or isinstance(node, MatrixAxes) or hasattr(node, "reduction_axis")


def _read_leaf(index: int, path: str, leaf: jax.Array, axes: Any) -> MatrixLeaf:
    if hasattr(axes, "reduction_axis"):
        axes = MatrixAxes(axes.reduction_axis, axes.output_axis)
    if not isinstance(axes, MatrixAxes):
        raise TypeError(f"dimension_numbers for {path!r} must be a svb_jax.MatrixAxes or None, got {axes!r}.")
    reduction, output = _as_axes(path, axes.reduction, leaf.ndim), _as_axes(path, axes.output, leaf.ndim)
    if len({*reduction, *output}) != len(reduction) + len(output) or not reduction or not output:
        raise ValueError(
            f"{path!r} of shape {leaf.shape} cannot be read with {axes}: axes repeat or are missing."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{path!r} must be real floating point to bound its singular values, got {leaf.dtype}."
        )
    batch = tuple(a for a in range(leaf.ndim) if a not in reduction + output)
    outputs = math.prod(leaf.shape[a] for a in output)
    if axes.groups < 1 or outputs % axes.groups:
        raise ValueError(f"{path!r} has {outputs} outputs, which {axes.groups} groups do not divide.")
    return MatrixLeaf(index, path, leaf.shape, leaf.dtype, batch, reduction, output, axes.groups)


def _as_axes(path: str, axes: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -rank <= a < rank for a in listed):
        raise ValueError(f"svb_jax got axes {listed} for {path!r}, which has rank {rank}.")
    return tuple(a % rank for a in listed)
