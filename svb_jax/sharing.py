"""Sharing a projection over devices: each decomposes its part, and a sum hands the parts round."""

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from svb_jax import projection
from svb_jax.projection import Share
from svb_jax.routes import Method, Reading, empty_reading

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
    # Of no entries, but in the stacks' type: in a shard_map they may differ from device to device.
    nothing = sum((jnp.sum(stack[:0]) for stack in stacks.values()), jnp.zeros(()))
    return _clip_by_key(stacks, bands, method, empty_reading(nothing))


def replicate(array: jax.Array) -> jax.Array:
    """Return an array whole on every device, where its type says that it is not (explicit sharding).

    Reading a kernel as a matrix merges axes, which the types of sharded arrays do not allow.
    """
    sharding = jax.typeof(array).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(array, whole) if any(sharding.spec) else array


def shard_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array laid out over the devices as the type of ``like`` says."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(array, sharding) if any(sharding.spec) else array


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
    parts, shares = {}, []
    for row, (key, stack) in enumerate(stacks.items()):
        start, count = jnp.asarray(starts[row])[device], jnp.asarray(counts[row])[device]
        index = jnp.arange(stack.shape[0])
        is_mine = (index >= start) & (index < start + count)
        parts[key] = jnp.where(is_mine[:, None, None], stack, 0)
        shares.append(Share(start, count, int(counts[row].max(initial=0))))
    clipped, reading = _clip_by_key(parts, bands, method, empty_reading(device), shares)
    return lax.psum(clipped, axis_name), _add_over(reading, axis_name)


def _clip_by_key(
    stacks: Stacks, bands: Bands, method: Method, reading: Reading, shares: list[Share] | None = None
) -> tuple[dict[Hashable, jax.Array], Reading]:
    clipped, reading = projection.clip_stacks(
        list(stacks.values()), [bands[key] for key in stacks], method, reading, shares
    )
    return dict(zip(stacks, clipped, strict=True)), reading


def _add_over(reading: Reading, axis_name: AxisName) -> Reading:
    return Reading(
        lax.pmin(reading.smallest, axis_name),
        lax.pmax(reading.largest, axis_name),
        *lax.psum(reading[2:], axis_name),
    )
