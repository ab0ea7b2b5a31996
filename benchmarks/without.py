"""Our projection without one of the measures that only CPUs need, to see what each is worth.

A row has a process of its own, so what is replaced here is replaced for this row alone.
"""

from collections.abc import Callable, Mapping

import jax

from benchmarks import jax_rows
from benchmarks.workload import Task, Workload
from svb_jax._src.clip.cpu import buckets, sequential


def project(task: Task) -> Workload:
    """Our projection by ``auto``, without the measure ``task["without"]``."""
    MEASURES[task["without"]]()
    return jax_rows.project({**task, "method": "auto"})


def _no_buckets() -> None:
    buckets.LARGEST_TO_PAD = buckets.LARGEST_TO_JOIN = 0


def _own_slices() -> None:
    def slice_at(array: jax.Array, start: int, size: int, zero: jax.Array) -> jax.Array:
        del zero
        return array[start : start + size]

    sequential.slice_at = slice_at


def _no_waiting() -> None:
    sequential.wait_for = lambda token, flags: flags


def _all_threads() -> None:
    sequential.limit_threads = lambda: False


MEASURES: Mapping[str, Callable[[], None]] = {
    "buckets": _no_buckets,
    "shared slices": _own_slices,
    "one after another": _no_waiting,
    "one BLAS thread": _all_threads,
}
