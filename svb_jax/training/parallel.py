"""One function a device, run on all of them by pmap or by jit of shard_map."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "devices"


class Engine:
    """Runs per-device functions on the first devices of every host.

    Both kinds take and return the same arrays: replicated ones without a leading axis, and batches with
    one row a device of this host.

    Examples:
      >>> engine = Engine("pmap", num_local=2)
      >>> total = engine.compile(lambda offset, row: offset + jax.lax.psum(row, AXIS), num_replicated=1)
      >>> float(total(engine.replicate(np.float32(1)), engine.shard(np.float32([10, 20]))))
      31.0
    """

    def __init__(self, kind: Literal["pmap", "shard_map"], num_local: int | None = None):
        self.kind = kind
        self.num_local = len(jax.local_devices()) if num_local is None else num_local
        if not 1 <= self.num_local <= len(jax.local_devices()):
            raise ValueError(
                f"Engine needs between 1 and this host's {len(jax.local_devices())} devices, got {num_local}."
            )
        by_host = [jax.local_devices(process_index=host) for host in range(jax.process_count())]
        self.devices = [device for local in by_host for device in local[: self.num_local]]
        # pmap speaks of this host's devices alone, shard_map of everyone's.
        own = jax.local_devices()[: self.num_local]
        self._mesh = Mesh(np.array(own if kind == "pmap" else self.devices), (AXIS,))

    def compile(self, function: Callable[..., Any], *, num_replicated: int) -> Callable[..., Any]:
        """Return the function for all devices at once; its first argument's memory is reused.

        Args:
          function: Takes ``num_replicated`` replicated arguments and a device's batch, and returns what
            is equal on all devices.
          num_replicated: How many of the arguments are replicated.

        Returns:
          A function of replicated arguments and a batch with one row a device.
        """
        if self.kind == "pmap":
            return jax.pmap(
                function,
                axis_name=AXIS,
                in_axes=(None,) * num_replicated + (0,),
                out_axes=None,
                devices=self.devices,
                donate_argnums=(0,),
            )

        def on_own_row(*arguments: Any) -> Any:
            *replicated, batch = arguments
            return function(*replicated, jax.tree.map(lambda row: row[0], batch))

        specs = (P(),) * num_replicated + (P(AXIS),)
        # Gathered results are equal on all devices, which the static check cannot see.
        mapped = jax.shard_map(on_own_row, mesh=self._mesh, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(mapped, donate_argnums=(0,))

    def replicate(self, tree: Any) -> Any:
        """Put a tree of arrays on every device, each leaf in memory of its own, which may be given away."""
        return jax.device_put(fetch(tree), NamedSharding(self._mesh, P()))

    def shard(self, batch: Any) -> Any:
        """Give each device of this host its row of a batch."""
        sharding = NamedSharding(self._mesh, P(AXIS))
        return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def fetch(tree: Any) -> Any:
    """Bring a replicated tree to the host, as NumPy arrays that no device memory backs."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def split_rows(indices: np.ndarray, accumulate: int, engine: Engine) -> np.ndarray:
    """Lay out a global batch as (this host's devices, micro-batches, examples).

    A micro-batch holds the same examples on any number of devices.

    Examples:
      >>> split_rows(np.arange(8), 2, Engine("pmap", 2)).tolist()
      [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    num_rows = len(engine.devices)
    if len(indices) % (accumulate * num_rows):
        raise ValueError(
            f"train needs a batch_size that {num_rows} devices x {accumulate} micro-batches divide, "
            f"got {len(indices)}."
        )
    rows = indices.reshape(accumulate, num_rows, -1).swapaxes(0, 1)
    start = jax.process_index() * engine.num_local
    return rows[start : start + engine.num_local]
