"""Many hosts as one machine: how they find each other, and how they notice that one has died."""

from dataclasses import dataclass

import jax

HEARTBEAT_SECONDS = 10
"""A host that is silent for so long is dead, and the others stop: JAX ends their processes."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run. With none of these given, this host trains alone.

    Examples:
      >>> Hosts(coordinator="10.0.0.1:1234")
      Traceback (most recent call last):
      ValueError: Hosts needs coordinator, num_processes and process_id together, got coordinator alone...
    """

    coordinator: str | None = None
    """Address and port of the first host, such as 10.0.0.1:1234; the same on every host."""
    num_processes: int | None = None
    """How many processes train together."""
    process_id: int | None = None
    """Which of them this one is, from 0."""
    cluster: bool = False
    """Read all three from the cluster's environment (Slurm, Open MPI, Kubernetes, Cloud TPU)."""

    def __post_init__(self) -> None:
        given = [name for name in ("coordinator", "num_processes", "process_id") if self._has(name)]
        if 0 < len(given) < 3:
            raise ValueError(
                "Hosts needs coordinator, num_processes and process_id together, "
                f"got {' and '.join(given)} alone."
            )
        if given and self.cluster:
            raise ValueError("Hosts needs the cluster's environment or its own addresses, got both.")

    def connect(self) -> None:
        """Join the other hosts; must come before anything else that uses JAX's devices."""
        if self.cluster or self.coordinator is not None:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None
