"""From the leaves of a tree to batches of matrices in their bands, and back."""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax._src.clip import Method, clip_batches
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.distribute import AxisName, Band, clip_over_devices
from svb_jax._src.clip.matrix_functions import replicate, shard_like
from svb_jax._src.dimension_numbers import (
    DimensionNumbers,
    MatrixAxes,
    by_name,
    check_input_channels,
    merged_size,
    positive_axes,
    read_axes,
)
from svb_jax._src.paths import NamedLeaf, is_hidden, named_leaves
from svb_jax._src.stats import Clipped, ProjectionStats

# The band's centre: a number, or a function of a matrix's (outputs, inputs).
Centre = float | Callable[[int, int], float]

Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclass(frozen=True)
class MatrixLeaf:
    """One leaf that holds matrices: where it stands in the flattened tree, and how it is read.

    Patterns are compared with its ``path``; its ``label``, no two of which are alike, is what is shown.
    """

    index: int
    path: str
    label: str
    shape: tuple[int, ...]
    dtype: Any
    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    groups: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return one matrix's (reduction, output) size."""
        return merged_size(self.shape, self.reduction), merged_size(self.shape, self.output) // self.groups

    @property
    def count(self) -> int:
        """Return how many matrices the leaf holds."""
        return merged_size(self.shape, self.batch) * self.groups

    def to_matrices(self, leaf: Array) -> Array:
        """Return the leaf, of JAX or of NumPy, as a batch (count, reduction, output)."""
        rows, columns = self.matrix_shape
        # In this order a Flax kernel without groups is only reshaped, never copied.
        merged = leaf.transpose(self.order).reshape(-1, rows, self.groups, columns)
        return merged.swapaxes(1, 2).reshape(self.count, rows, columns)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """Return the leaf that ``to_matrices`` would read as these."""
        rows, columns = self.matrix_shape
        merged = jnp.moveaxis(matrices.reshape(-1, self.groups, rows, columns), 1, 2)
        split = merged.reshape([self.shape[a] for a in self.order])
        return jnp.transpose(split, self.inverse_order)

    def to_batch(self, value: jax.Array, band: Band) -> Batch:
        """Return a leaf's matrices (b, reduction, output) with their band."""
        matrices = self.to_matrices(replicate(value))
        return Batch(matrices, *(jnp.broadcast_to(each, (self.count,)) for each in band))

    def from_batch(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """Return the leaf that has these matrices, laid out over the devices like another value of it."""
        return shard_like(self.from_matrices(matrices), like)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the leaf's axes as batch, reduction, output."""
        return self.batch + self.reduction + self.output

    @property
    def inverse_order(self) -> tuple[int, ...]:
        """Return what takes axes in :attr:`order` back to their places."""
        return tuple(np.argsort(self.order))


def matrix_leaves(params: Any, dimension_numbers: DimensionNumbers = None) -> list[MatrixLeaf]:
    """Return every leaf that holds matrices, or raise where there is none."""
    leaves = named_leaves(params)
    if dimension_numbers is None:
        check_input_channels(leaves)
    chosen = read_axes(params, by_name if dimension_numbers is None else dimension_numbers)
    found = [
        _read_leaf(index, leaf, axes)
        for index, leaf in enumerate(leaves)
        # Nothing can be out of bounds in a leaf without entries.
        if (axes := chosen.get(leaf.names)) is not None and 0 not in leaf.shape
    ]
    # optax.tree.map_params passes a placeholder, a node without leaves, to see a state's structure.
    is_placeholder = not isinstance(params, Collection | None) and not named_leaves(params, is_leaf=is_hidden)
    if not found and not is_placeholder:
        seen = ", ".join(f"{leaf.label} {leaf.shape}" for leaf in leaves) or "nothing"
        raise ValueError(
            "svb_jax found no weight matrix: it takes leaves called kernel, w or weight unless "
            f"dimension_numbers= says otherwise (svb_jax.every_matrix takes all), and it saw {seen}."
        )
    return found


def project_leaves(
    leaves: Sequence[MatrixLeaf],
    values: Sequence[jax.Array],
    epsilons: Sequence[ArrayLike],
    *,
    centre: Centre,
    method: Method,
    axis_name: AxisName | None,
    mesh: Mesh | None,
    shardings: Any = None,
) -> tuple[list[jax.Array], list[Clipped]]:
    """Return the leaves' values with every matrix in its band, and what was seen of each leaf.

    Args:
      leaves: How each is read as matrices.
      values: In float32 or better.
      epsilons: One a leaf; its band is ``centre * [1 / (1 + epsilon), 1 + epsilon]``.
      centre: Of all bands.
      method: The route.
      axis_name: Distribute the work over this axis.
      mesh: Distribute the work over this mesh.
      shardings: A tree of them like the parameters', if it is known how these lie on the mesh.
    """
    bands = [_band(*each, centre) for each in zip(leaves, values, epsilons, strict=True)]
    if not (axis_name is None and mesh is None and shardings is None):
        return clip_over_devices(leaves, values, bands, method, axis_name, mesh, shardings)
    batches = [leaf.to_batch(value, band) for leaf, value, band in zip(leaves, values, bands, strict=True)]
    clipped = clip_batches(batches, method)
    of_leaves = zip(leaves, clipped, values, strict=True)
    return [leaf.from_batch(each.matrices, value) for leaf, each, value in of_leaves], clipped


def _band(leaf: MatrixLeaf, value: jax.Array, epsilon: ArrayLike, centre: Centre) -> Band:
    inputs, outputs = leaf.matrix_shape
    middle = centre(outputs, inputs) if callable(centre) else centre
    if callable(centre) and not 0 < middle < math.inf:
        raise ValueError(f"svb_jax needs a positive, finite centre, got {middle} for {leaf.label!r}.")
    # A schedule may return anything: below zero counts as zero, and what is not finite is no band.
    epsilon = jnp.asarray(epsilon, value.dtype)
    is_band = jnp.isfinite(epsilon)
    factor = 1 + jnp.where(is_band, jnp.maximum(epsilon, 0), 0)
    lower, upper = (jnp.asarray(end, value.dtype) for end in (middle / factor, middle * factor))
    return Band(lower, upper, is_band)


def summarise(
    batches: Sequence[Clipped], matrix_shapes: Sequence[Sequence[int]] | None = None
) -> ProjectionStats:
    """Return what was seen of the matrices of one layer, or of all layers.

    Args:
      batches: What was seen of each layer.
      matrix_shapes: Of each layer's matrices, where ``batches`` do not hold them as (b, m, n).
    """
    shapes = [batch.matrices.shape[1:] for batch in batches] if matrix_shapes is None else matrix_shapes
    # In the order of the buckets, largest first: XLA then merges neighbouring slices of one array.
    order = sorted(range(len(shapes)), key=lambda index: -math.prod(shapes[index]))
    num_values = np.concatenate([np.full(len(batches[i].smallest), min(shapes[i])) for i in order])
    # A reduction of several arrays has no derivative, and statistics need none.
    smallest, largest, *others, is_skipped = (
        lax.stop_gradient(jnp.concatenate(figures))
        for figures in list(zip(*(batches[i] for i in order), strict=True))[1:]
    )
    # A finite stand-in for "nothing seen": an infinity would trip jax_debug_infs.
    nothing = jnp.finfo(jnp.float32).max, jnp.float32(0), *[jnp.int32(0)] * 5
    seen = [
        jnp.where(is_skipped, zero, jnp.asarray(each, zero.dtype))
        for each, zero in zip((smallest, largest, num_values, *others), nothing[:-1], strict=True)
    ]

    def join(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        extremes = jnp.minimum(one[0], other[0]), jnp.maximum(one[1], other[1])
        return *extremes, *map(operator.add, one[2:], other[2:])

    # All in one pass: each reduction would be kernels of its own to compile.
    stats = ProjectionStats(*lax.reduce((*seen, is_skipped.astype(jnp.int32)), nothing, join, (0,)))
    return stats._replace(sigma_min=jnp.where(stats.num_values > 0, stats.sigma_min, 0))


def _read_leaf(index: int, named: NamedLeaf, axes: MatrixAxes) -> MatrixLeaf:
    label, leaf, rank = named.label, named.value, named.rank
    reduction, output = (positive_axes(label, each, rank) for each in (axes.reduction, axes.output))
    if len({*reduction, *output}) != len(reduction) + len(output) or not reduction or not output:
        raise ValueError(
            f"{label!r} of shape {leaf.shape} cannot be read with {axes}: axes repeat or are missing."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
        raise ValueError(
            f"{label!r} must be real floating point, of 16 bits or more, to bound its singular values, "
            f"got {leaf.dtype}."
        )
    batch = tuple(a for a in range(rank) if a not in reduction + output)
    outputs = merged_size(leaf.shape, output)
    if axes.groups < 1 or outputs % axes.groups:
        raise ValueError(f"{label!r} has {outputs} outputs, which {axes.groups} groups do not divide.")
    return MatrixLeaf(index, named.path, label, leaf.shape, leaf.dtype, batch, reduction, output, axes.groups)
