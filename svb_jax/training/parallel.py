"""One function a device, run on all of them by pmap or by jit of shard_map; or jit of sharded arrays."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "devices"
# Below this many entries an array costs more to gather than to keep.
SMALLEST_TO_SHARD = 2**10


class Engine:
    """Runs per-device functions on the first devices of every host.

    All kinds take and return the same arrays: replicated ones without a leading axis, and batches with
    one row a device of this host. With ``fsdp`` the large arrays of a state are sharded instead.

    Examples:
      >>> engine = Engine("pmap", num_local=2)
      >>> total = engine.compile(lambda offset, row: offset + jax.lax.psum(row, AXIS), num_replicated=1)
      >>> float(total(engine.replicate(np.float32(1)), engine.shard(np.float32([10, 20]))))
      31.0
    """

    def __init__(
        self, kind: Literal["pmap", "shard_map", "jit"], num_local: int | None = None, *, fsdp: bool = False
    ):
        self.kind, self._fsdp = kind, fsdp
        self.num_local = len(jax.local_devices()) if num_local is None else num_local
        if not 1 <= self.num_local <= len(jax.local_devices()):
            raise ValueError(
                f"Engine needs between 1 and this host's {len(jax.local_devices())} devices, got {num_local}."
            )
        by_host = [jax.local_devices(process_index=host) for host in range(jax.process_count())]
        self.devices = [device for local in by_host for device in local[: self.num_local]]
        # pmap speaks of this host's devices alone, the others of everyone's.
        own = jax.local_devices()[: self.num_local]
        self.mesh = Mesh(np.array(own if kind == "pmap" else self.devices), (AXIS,))

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

        return jax.jit(self._map(function, num_replicated), donate_argnums=(0,))

    def compile_halves(
        self, measure: Callable[..., Any], advance: Callable[..., Any], shardings: Any
    ) -> Callable[..., Any]:
        """Return a step of two halves under ``jit``; its first argument's memory is reused.

        Args:
          measure: A function of a state, other replicated arguments and a device's batch, which returns
            what is equal on all devices.
          advance: A function of the same state and arguments, and of what was measured, which returns a new
            state and a report; its arrays lie as ``shardings`` say, and the compiler does the rest.
          shardings: Of the state.

        Returns:
          A function of a state, one other argument and a batch with one row a device.
        """
        mapped = self._map(measure, num_replicated=2)

        def step(state: Any, other: Any, batch: Any) -> Any:
            return advance(state, other, mapped(state, other, batch))

        return jax.jit(step, donate_argnums=(0,), out_shardings=(shardings, NamedSharding(self.mesh, P())))

    def _map(self, function: Callable[..., Any], num_replicated: int) -> Callable[..., Any]:
        def on_own_row(*arguments: Any) -> Any:
            *replicated, batch = arguments
            return function(*replicated, jax.tree.map(lambda row: row[0], batch))

        specs = (P(),) * num_replicated + (P(AXIS),)
        # Gathered results are equal on all devices, which the static check cannot see.
        return jax.shard_map(on_own_row, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def shardings(self, state: Any) -> Any:
        """Return how the arrays of a state lie: whole, or with ``fsdp`` along the longest axis that fits."""
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, self._spec(leaf.shape)), state)

    def _spec(self, shape: tuple[int, ...]) -> P:
        axes = [axis for axis, size in enumerate(shape) if size % self.mesh.size == 0]
        if not self._fsdp or not axes or math.prod(shape) < SMALLEST_TO_SHARD:
            return P()
        longest = max(axes, key=lambda axis: shape[axis])
        return P(*(AXIS if axis == longest else None for axis in range(longest + 1)))

    def place(self, state: Any) -> Any:
        """Put a state on the devices, each leaf in memory of its own, which may be given away."""
        return jax.device_put(fetch(state), self.shardings(state))

    def replicate(self, tree: Any) -> Any:
        """Put a tree of arrays on every device, each leaf in memory of its own, which may be given away."""
        return jax.device_put(fetch(tree), NamedSharding(self.mesh, P()))

    def shard(self, batch: Any) -> Any:
        """Give each device of this host its row of a batch."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def fetch(tree: Any) -> Any:
    """Bring a tree to the host, whole, as NumPy arrays that no device memory backs."""

    def fetch_leaf(leaf: Any) -> np.ndarray:
        is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
        return np.array(leaf if is_here else multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(fetch_leaf, tree)


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
