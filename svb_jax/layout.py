"""How arrays lie over the devices, where their types say so (explicit sharding)."""

import jax
from jax.sharding import NamedSharding, PartitionSpec


def replicate(array: jax.Array) -> jax.Array:
    """Return an array whole on every device.

    Reading a kernel as a matrix merges axes, which the types of sharded arrays do not allow.
    """
    sharding = jax.typeof(array).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(array, whole) if any(sharding.spec) else array


def shard_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array laid out over the devices as ``like`` is."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(array, sharding) if any(sharding.spec) else array
