"""Sharing a projection over devices: each decomposes its part, and a sum hands the parts round."""

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from svb_jax.projection import Method, Reading, clip_stack, empty_reading

Stacks = Mapping[Hashable, jax.Array]
Bands = Mapping[Hashable, tuple[ArrayLike, ArrayLike]]
AxisName = str | tuple[str, ...]


def clip_stacks(
    stacks: Stacks,
    bands: Bands,
    method: Method,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> tuple[dict[Hashable, jax.Array], Reading]:
    """Clip every stack into its band, on this device or shared over those of an axis or a mesh.

    Args:
      stacks: by shape, each ``(count, m, n)``; on every device the same.
      bands: lower and upper end for each stack.
      method: the route.
      axis_name: the axis of the ``pmap`` or ``shard_map`` that this runs in.
      mesh: the mesh to share over, under a plain ``jit``.
    """
    if mesh is not None:
        # Spelt out as arguments: a shard_map takes no sharded array from its surroundings.
        def shared(stacks: Stacks, bands: Bands) -> tuple[dict[Hashable, jax.Array], Reading]:
            return _clip_shared(stacks, bands, method, tuple(mesh.axis_names))

        everywhere = PartitionSpec()
        spread = jax.shard_map(shared, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
        return spread(dict(stacks), jax.tree.map(jnp.asarray, dict(bands)))
    if axis_name is not None:
        return _clip_shared(stacks, bands, method, axis_name)
    reading, clipped = empty_reading(), {}
    for key, stack in stacks.items():
        clipped[key], reading = clip_stack(stack, *bands[key], method, reading)
    return clipped, reading


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
    stacks: Stacks, bands: Bands, method: Method, axis_name: AxisName
) -> tuple[dict[Hashable, jax.Array], Reading]:
    counts = balanced_counts([stack.shape for stack in stacks.values()], lax.axis_size(axis_name))
    starts = np.cumsum(counts, axis=1) - counts
    device = lax.axis_index(axis_name)
    reading = jax.tree.map(lambda x: _varying(x, axis_name), empty_reading())
    parts = {}
    for row, (key, stack) in enumerate(stacks.items()):
        start, count = jnp.asarray(starts[row])[device], jnp.asarray(counts[row])[device]
        share = start, count, int(counts[row].max(initial=0))
        clipped, reading = clip_stack(_varying(stack, axis_name), *bands[key], method, reading, share)
        index = jnp.arange(stack.shape[0])
        is_mine = (index >= start) & (index < start + count)
        parts[key] = jnp.where(is_mine[:, None, None], clipped, 0)
    return lax.psum(parts, axis_name), _add_over(reading, axis_name)


def _add_over(reading: Reading, axis_name: AxisName) -> Reading:
    return Reading(
        lax.pmin(reading.smallest, axis_name),
        lax.pmax(reading.largest, axis_name),
        *lax.psum(reading[2:], axis_name),
    )


def _varying(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Tell shard_map's checker that devices go their own ways from here."""
    present = getattr(jax.typeof(x), "vma", frozenset())
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    missing = tuple(name for name in names if name not in present)
    return lax.pcast(x, missing, to="varying") if missing else x
