"""The asking side of the workers: start them, wait for an answer within a limit, stop them."""

import json
import select
import subprocess
from collections.abc import Hashable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class RowError(Exception):
    """A row that cannot be measured.

    Attributes:
      status: ``not installed``, ``too slow`` or ``failed``.
      detail: Which package, which limit, which error.
    """

    def __init__(self, status: str, detail: str):
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class Process:
    """One worker, in one interpreter."""

    def __init__(self, python: str):
        command = [python, "-m", "benchmarks.worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0
        )

    def ask(self, limit: float, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, or stop the worker and raise ``RowError`` after so many seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or self._process.poll() is not None:
            raise RowError("failed", "its process has ended")
        stdin.write(json.dumps(request).encode() + b"\n")
        if not select.select([stdout], [], [], limit)[0]:
            self.stop()
            raise RowError("too slow", f"over {limit:g} s")
        line = stdout.readline()
        if not line:
            raise RowError("failed", f"its process ended with code {self._process.wait()}")
        reply = json.loads(line)
        if "dropped" in reply:
            raise RowError(*reply["dropped"])
        return reply

    @property
    def is_running(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """Workers by name, started when they are first asked; all are stopped at the end of the ``with``."""

    def __init__(self):
        self._processes: dict[Hashable, Process] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.stop()

    def start(self, group: Hashable, python: str) -> None:
        """Make sure that the group's worker runs."""
        if group not in self._processes or not self._processes[group].is_running:
            self._processes[group] = Process(python)

    def ask(self, group: Hashable, limit: float, **request: Any) -> dict[str, Any]:
        """Return the answer of a group's worker to a request."""
        return self._processes[group].ask(limit, request)
