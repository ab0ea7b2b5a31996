"""Matrices too large for one device: clipped where they lie, by products whose rows all devices share.

An owner would need room for about six matrices. Here every device keeps its rows of each; sums over the rows,
such as Gram matrices, are the only things exchanged.
"""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from svb_jax._src.clip import Method, with_sound_band
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.matrix_functions import is_tall, transpose
from svb_jax._src.clip.products import clip_by_products
from svb_jax._src.clip.shard_layout import Names, on_explicit_axes

# Leaves are read as matrices one level above.
if TYPE_CHECKING:
    from svb_jax._src.clip.distribute import Band
    from svb_jax._src.leaves import MatrixLeaf

# In entries: of float32, a gigabyte.
LARGEST_TO_MOVE = 2**28


def is_too_large(leaf: "MatrixLeaf", names: tuple[Names, ...], method: Method) -> bool:
    """Return whether a leaf's matrices, which these axes of the mesh split, stay where they are."""
    is_split = any(names[axis] for axis in leaf.reduction + leaf.output)
    return is_split and method in ("auto", "products") and math.prod(leaf.matrix_shape) > LARGEST_TO_MOVE


def clip_in_place(
    leaf: "MatrixLeaf", value: jax.Array, band: "Band", names: tuple[Names, ...], mesh: Mesh
) -> tuple[jax.Array, list[jax.Array]]:
    """Clip a leaf's matrices and return them, and what was seen of each.

    Args:
      leaf: How it is read as matrices.
      value: The leaf, under ``jit``.
      band: Of all its matrices.
      names: For each of the leaf's axes, those of the mesh that split it.
      mesh: The devices.
    """
    splitting = tuple(name for axis in leaf.reduction + leaf.output for name in names[axis])
    holding = tuple(name for axis in leaf.batch for name in names[axis])
    by_matrix, by_row = PartitionSpec(holding or None), PartitionSpec(holding or None, splitting)
    num_parts = math.prod(mesh.shape[name] for name in splitting)

    def clip_rows(matrices: jax.Array, bands: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        clipped = clip_by_products(Batch(matrices, *bands), max(leaf.matrix_shape), splitting)
        return clipped.matrices, list(clipped[1:])

    def clip(value: jax.Array, band: "Band") -> tuple[jax.Array, list[jax.Array]]:
        batch = with_sound_band(leaf.to_batch(value, band))
        tall = batch.matrices if is_tall(batch.matrices) else transpose(batch.matrices)
        padded = jnp.pad(tall, [(0, 0), (0, -tall.shape[1] % num_parts), (0, 0)])
        context = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            clip_rows,
            mesh=mesh if context.empty else context,
            in_specs=(by_row, [by_matrix] * 3),
            out_specs=(by_row, [by_matrix] * 6),
            check_vma=False,
        )
        clipped, seen = mapped(padded, list(batch[1:]))
        own = clipped[:, : tall.shape[1]]
        return leaf.from_matrices(own if is_tall(batch.matrices) else transpose(own)), seen

    if AxisType.Explicit in mesh.axis_types:
        # Reading a kernel as a matrix merges axes, which the types of sharded arrays do not allow.
        as_it_lay = on_explicit_axes(NamedSharding(mesh, PartitionSpec(*names)))
        everywhere = NamedSharding(mesh, PartitionSpec())
        traced: Any = jax.sharding.auto_axes(clip, out_sharding=(as_it_lay, [everywhere] * 6))
        return traced(value, band)
    return jax.jit(clip)(value, band)
