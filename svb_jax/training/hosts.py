"""Many hosts as one machine: how they find each other, and how they notice that one has died."""

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

HEARTBEAT_SECONDS = 10
"""A host that is silent for so long is dead, and the others stop: JAX ends their processes."""

FAREWELL_SECONDS = 3600
"""A host that is done waits so long for the first one, which may still be saving."""


class LostHost(ConnectionError):  # noqa: N818 - what happened, and not to this host
    """Another host of the run has stopped."""


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
                shutdown_timeout_seconds=FAREWELL_SECONDS,
            )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


@contextlib.contextmanager
def leaving_on_failure(*shared: type[BaseException]) -> Iterator[None]:
    """Let a host that fails end as soon as it has said why, so that the others notice and stop.

    Left to itself, JAX makes a process that ends wait minutes for all others to end, while they wait for
    its share of the next step.

    Args:
      *shared: Errors that all hosts raise together: these may wait for each other.

    Raises:
      LostHost: What failed was the exchange with another host.

    Examples:
      >>> with leaving_on_failure():
      ...     raise OSError("alone, there is nobody to wait for")
      Traceback (most recent call last):
      OSError: alone, there is nobody to wait for
    """
    try:
        with _explained():
            yield
    except shared:
        raise
    except BaseException as error:
        if jax.process_count() > 1:
            # Registered after JAX's own farewell, and so called before it.
            atexit.register(_leave, 2 if is_wrong_usage(error) else 1)
        raise


def is_wrong_usage(error: BaseException, package: Path = Path(__file__).parents[1]) -> bool:
    """Return whether an error is a package's own sentence about what it was asked for.

    A ValueError that was raised inside a library is a fault, and no wrong usage.

    Args:
      error: One that was raised.
      package: The folder of this package, or of another.
    """
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(package)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn a failed exchange into a sentence."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # All that JAX tells of the reason is this text, with the name of the library that exchanges.
        if not any(name in str(error) for name in ("Gloo", "NCCL")):
            raise
        raise LostHost(
            f"Another host has stopped ({str(error).strip().partition(chr(10))[0]}). Its own output says "
            "why. Start all hosts again: they continue from the newest checkpoint."
        ) from error


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
