"""The projection with busy processes beside it, as a data loader's are."""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import jax

from benchmarks import jax_rows
from benchmarks.workload import Task, Workload

# It ends with its parent, however that ends.
SPIN = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    sum(range(100_000))
"""


def project(task: Task) -> Workload:
    """Our projection by ``auto`` while ``task["processes"]`` other processes compute."""
    alone = jax_rows.project(task | {"method": "auto"})

    def run(beside: contextlib.ExitStack) -> jax.Array:
        with beside:
            return alone.run(None)

    def fresh() -> contextlib.ExitStack:
        beside = contextlib.ExitStack()
        for _ in range(task["processes"]):
            beside.enter_context(busy_process())
        return beside

    return dataclasses.replace(alone, run=run, fresh=fresh)


@contextlib.contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep a core busy meanwhile, and return the process that does."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        if process.stdout is not None:
            process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
