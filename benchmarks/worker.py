"""The process in which rows run: requests come in as lines of JSON, answers go out the same way.

A process of its own lets a row use another interpreter, be stopped when it takes too long, and have its
memory seen apart from that of the others.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import load_kernels
from benchmarks.workload import Task, Workload


class Worker:
    """The rows of one process."""

    def __init__(self):
        self._workloads: dict[str, Workload] = {}

    def prepare(self, row: str, factory: str, task: Task) -> dict[str, Any]:
        """Make a row ready by ``factory``, written ``module:function``."""
        self._workloads.pop(row, None)
        module, function = factory.split(":")
        workload = getattr(importlib.import_module(module), function)(task)
        self._workloads[row] = workload
        return {"facts": workload.facts}

    def warm_up(self, row: str) -> dict[str, Any]:
        """Call a row for the first time, and see how much memory it takes beside what is there before."""
        workload = self._workloads[row]
        if workload.is_warm:
            return {"resident_bytes": None}
        argument = workload.fresh()
        with ResidentPeak() as peak:
            workload.run(argument)
        return {"resident_bytes": peak.extra}

    def time(self, row: str, seconds: float) -> dict[str, Any]:
        """Call a row for at least so many seconds, and at least once; the answer is each call's time."""
        workload, times, spent = self._workloads[row], [], 0.0
        while not times or spent < seconds:
            argument = workload.fresh()
            begin = time.perf_counter()
            result = workload.run(argument)
            whole = time.perf_counter() - begin
            times.append(whole if workload.seconds is None else workload.seconds(result))
            # Of a call that counts in part only, many would have to be made to fill the time.
            spent += whole
        return {"seconds": times}

    def error(self, row: str, exact: str) -> dict[str, Any]:
        """Return how far a row's worst kernel is from the exact one, relative to its Frobenius norm."""
        workload = self._workloads[row]
        if workload.kernels is None:
            return {"error": None}
        kernels, expected = workload.kernels(workload.run(workload.fresh())), load_kernels(Path(exact))
        errors = [
            np.linalg.norm(kernels[name] - kernel) / np.linalg.norm(kernel)
            for name, kernel in expected.items()
        ]
        return {"error": float(max(errors))}

    def versions(self, packages: list[str]) -> dict[str, Any]:
        """Return the versions of those packages that are installed."""
        installed = {found.name for found in importlib.metadata.distributions()}
        return {name: importlib.metadata.version(name) for name in packages if name in installed}


class ResidentPeak:
    """The most memory that the process held while inside, above that at the beginning; None off Linux."""

    extra: int | None = None
    _status, _clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __enter__(self) -> "ResidentPeak":
        with contextlib.suppress(OSError):
            # Sets the mark back to what is held now.
            self._clear.write_text("5")
            self._before = self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.extra = self._mark() - self._before

    def _mark(self) -> int:
        lines = dict(line.split(":") for line in self._status.read_text().splitlines())
        return 1024 * int(lines["VmHWM"].split()[0])


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one request; ``dropped`` says why there is none."""
    method: Callable[..., dict[str, Any]] = getattr(worker, request.pop("do"))
    try:
        return method(**request)
    except ImportError as error:
        return {"dropped": ["not installed", error.name or str(error)]}
    except Exception as error:
        # Whatever goes wrong inside a peer is that row's result, not the end of the measurement.
        traceback.print_exc()
        return {"dropped": ["failed", f"{type(error).__name__}: {error}".splitlines()[0]]}


def serve() -> None:
    """Answer requests until there are no more."""
    # Libraries print to standard output; the answers keep the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
