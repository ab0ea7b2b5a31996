"""Many hosts as one machine: how they find each other, and how they notice that one has died."""

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from svb_jax._src.wrong_usage import is_wrong_usage
from svb_jax.training.aborts import explaining_aborts
from svb_jax.training.stopping import stoppable

HEARTBEAT_SECONDS = 10
"""A host that is silent for so long is dead, and the others stop."""

FAREWELL_SECONDS = 3600
"""A host that is done waits so long for the first one, which may still be saving."""


MOST_PROCESSES = 1_000_000
MOST_SECONDS = 10_000_000
"""A hundred days. JAX takes both as 32 bits."""


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
    """Address and port of the first host, such as 10.0.0.1:1234; the same on every host. The first host
    listens there, and trusts whoever reaches it: keep the port behind a firewall."""
    num_processes: int | None = None
    """How many processes train together."""
    process_id: int | None = None
    """Which of them this one is, from 0."""
    cluster: bool = False
    """Read all three from the cluster's environment (Slurm, Open MPI, Kubernetes, Cloud TPU)."""
    coordinator_bind: str | None = None
    """Where the first host listens, if not at the coordinator's own address: 0.0.0.0:1234 behind a NAT."""
    wait_seconds: int = 300
    """How long to wait for the other hosts to start."""

    def __post_init__(self) -> None:
        given = [name for name in ("coordinator", "num_processes", "process_id") if self._has(name)]
        if 0 < len(given) < 3:
            raise ValueError(
                "Hosts needs coordinator, num_processes and process_id together, "
                f"got {' and '.join(given)} alone."
            )
        if given and self.cluster:
            raise ValueError("Hosts needs the cluster's environment or its own addresses, got both.")
        for name in ("coordinator", "coordinator_bind"):
            _check_address(name, getattr(self, name))
        count, own = self.num_processes, self.process_id
        if count is not None and own is not None and not 0 <= own < count:
            raise ValueError(f"Hosts needs a process_id from 0 to num_processes - 1, got {own} of {count}.")
        if count is not None and count > MOST_PROCESSES:
            raise ValueError(f"Hosts needs num_processes of at most {MOST_PROCESSES}, got {count}.")
        if not 1 <= self.wait_seconds <= MOST_SECONDS:
            raise ValueError(
                f"Hosts needs wait_seconds of at least 1 and at most {MOST_SECONDS}, got {self.wait_seconds}."
            )

    def connect(self) -> None:
        """Join the other hosts; must come before anything else that uses JAX's devices.

        If they do not come, or one is lost later, this process ends with a sentence and exit code 1.

        Raises:
          ConnectionError: This host is the first, and cannot listen where it should.
        """
        if not self.cluster and self.coordinator is None:
            return
        listens_at = self.coordinator_bind or self.coordinator
        if self.process_id == 0 and listens_at is not None:
            _check_free(listens_at)
        reason = self._missing()
        explained = contextlib.ExitStack()
        explained.enter_context(explaining_aborts(lambda: reason))
        # Before JAX's own farewell is registered, and so after it.
        atexit.register(explained.close)
        with stoppable():
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                initialization_timeout=self.wait_seconds,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=FAREWELL_SECONDS,
                # JAX by itself listens on every interface.
                coordinator_bind_address=listens_at,
            )
        # Exactly what the command line prints of a LostHost: a reader need not know which way it was noticed.
        reason = _lost("it is silent, or its connection broke")

    def _missing(self) -> str:
        where = "the cluster's hosts" if self.cluster else f"{self.num_processes} hosts at {self.coordinator}"
        return (
            f"Waited {self.wait_seconds} s for {where} in vain. Start all of them, with the same "
            "coordinator; --wait-seconds waits longer."
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


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn a failed exchange into a sentence."""
    try:
        yield
    # Where the first call of a program fails, JAX raises a ValueError.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # All that JAX tells of the reason is this text, with the name of the library that exchanges.
        if not any(name in str(error) for name in ("Gloo", "NCCL")):
            raise
        # Each step that was under way says this once more.
        text = str(error).replace("Error dispatching computation: ", "")
        raise LostHost(_lost(text.strip().partition("\n")[0])) from error


def _lost(reason: str) -> str:
    return (
        f"Another host has stopped ({reason}). Its own output says why. Start all hosts again: they continue "
        "from the newest checkpoint."
    )


def _check_address(name: str, address: str | None) -> None:
    if address is None:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"Hosts needs a {name} of the form HOST:PORT, got {address!r}.")


def _check_free(address: str) -> None:
    """Raise if nobody can listen at an address: JAX would end in an error of its own, or crash."""
    host, _, port = address.rpartition(":")
    reason = None
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as listener:
                # As JAX does: a connection that has just ended is no obstacle.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind(where)
                    return
                except OSError as error:
                    reason = error
    except OSError as error:
        reason = error
    raise ConnectionError(
        f"The first host cannot listen at {address} ({reason and reason.strerror}). Give all hosts another "
        "coordinator, or this one an address of its own by --coordinator-bind."
    ) from reason


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
