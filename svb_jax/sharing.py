"""Sharing a projection over devices: each decomposes its part, and a sum hands the parts round."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from svb_jax import projection
from svb_jax.reading import Reading, empty_reading
from svb_jax.routes import Method
from svb_jax.stacks import Bands, Shape, Share, Stacks

AxisName = str | tuple[str, ...]


def clip_stacks(
    stacks: Sequence[Stacks],
    bands: Sequence[Bands],
    method: Method,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> tuple[list[Stacks], Reading]:
    """Clip every stack into its band, on this device or shared over those of an axis or a mesh.

    Args:
      stacks: rows of them; on every device the same.
      bands: lower and upper end for each stack of each row, or once for all of a row.
      method: the route.
      axis_name: the axis of the ``pmap`` or ``shard_map`` that this runs in.
      mesh: the mesh to share over, under a plain ``jit``.
    """
    if mesh is not None:
        # Spelt out as arguments: a shard_map takes no sharded array from its surroundings.
        def shared(stacks: list[Stacks], bands: list[Bands]) -> tuple[list[Stacks], Reading]:
            return _clip_shared(stacks, bands, method, tuple(mesh.axis_names))

        everywhere = PartitionSpec()
        spread = jax.shard_map(shared, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
        return spread(list(stacks), jax.tree.map(jnp.asarray, list(bands)))
    if axis_name is not None:
        return _clip_shared(stacks, bands, method, axis_name)
    # Of no entries, but in the stacks' type: in a shard_map they may differ from device to device.
    nothing = sum((jnp.sum(row.numbers[:0]) for row in stacks), jnp.zeros(()))
    return projection.clip_stacks(stacks, bands, method, empty_reading(nothing))


def balanced_counts(shapes: list[tuple[int, ...]], num_devices: int) -> np.ndarray:
    """Return how many matrices of each stack every device takes, ``(stacks, devices)``.

    The dearest matrix goes first, each to the device with the least to do so far; a decomposition costs
    about max(m, n) · min(m, n)².
    """
    costs = [max(m, n) * min(m, n) ** 2 for _, m, n in shapes]
    load = np.zeros(num_devices)
    counts = np.zeros((len(shapes), num_devices), np.int32)
    for stack in sorted(range(len(shapes)), key=lambda stack: -costs[stack]):
        for _ in range(shapes[stack][0]):
            device = int(np.argmin(load))
            counts[stack, device] += 1
            load[device] += costs[stack]
    return counts


def _clip_shared(
    stacks: Sequence[Stacks], bands: Sequence[Bands], method: Method, axis_name: AxisName
) -> tuple[list[Stacks], Reading]:
    device = lax.axis_index(axis_name)
    shares = _deal([row.shapes for row in stacks], device, lax.axis_size(axis_name))
    parts = []
    for row, of_row in zip(stacks, shares, strict=True):
        is_mine = [
            jnp.repeat(share.holds(count), m * n)
            for (count, m, n), share in zip(row.shapes, of_row, strict=True)
        ]
        parts.append(row.replace(jnp.where(jnp.concatenate(is_mine), row.numbers, 0)))
    clipped, reading = projection.clip_stacks(parts, bands, method, empty_reading(device), shares)
    return lax.psum(clipped, axis_name), _add_over(reading, axis_name)


def _deal(shapes: list[tuple[Shape, ...]], device: jax.Array, num_devices: int) -> list[list[Share]]:
    """Return the device's share in each stack of each row."""
    counts = balanced_counts([shape for of_row in shapes for shape in of_row], num_devices)
    starts = np.cumsum(counts, axis=1) - counts
    shares = iter(
        Share(jnp.asarray(start)[device], jnp.asarray(count)[device], int(count.max(initial=0)))
        for start, count in zip(starts, counts, strict=True)
    )
    return [[next(shares) for _ in of_row] for of_row in shapes]


def _add_over(reading: Reading, axis_name: AxisName) -> Reading:
    return Reading(lax.pmax(reading.extremes, axis_name), lax.psum(reading.counts, axis_name))
