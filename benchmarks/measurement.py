"""Rows measured side by side: prepared one by one, then called in turn, round after round."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.processes import Pool, RowError
from benchmarks.workload import Task

PREPARING_LIMIT = 1200.0
"""Seconds that a row may take to import, compile and try out its settings."""

SETTLING = 0.3
"""Seconds between two rows: threads of OpenMP spin for 0.2 s after a call, and would disturb the next."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      label: What it is called there.
      factory: The function that makes its workload, as ``module:function``.
      task: What that function is given.
      python: The interpreter it runs in; one of PyTorch's runs in that which has PyTorch.
      group: Rows of a group share a process; a row without one has its own.
    """

    label: str
    factory: str
    task: Task = field(default_factory=dict)
    python: str = sys.executable
    group: str | None = None

    def given(self, **task: Any) -> "Row":
        """Return the row with more in its task."""
        return replace(self, task=self.task | task)

    def run_by(self, torch_python: str) -> "Row":
        """Return the row in this interpreter if it is one of PyTorch's, else as it is."""
        is_torch = self.factory.startswith("benchmarks.torch_")
        return replace(self, python=torch_python) if is_torch else self


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
      rounds: How often all rows are called in turn.
      seconds: How long a row is called in each round, and at least once.
      limit: Seconds after which a call is stopped, and its row given up.
    """

    rounds: int
    seconds: float
    limit: float


def measure(pool: Pool, rows: Mapping[str, Row], plan: Plan, exact: Path | None = None) -> dict[str, Any]:
    """Measure rows, and return for each its status, times, memory and error.

    Args:
      pool: Where their processes are.
      rows: By name.
      plan: How much to measure.
      exact: The file of exact kernels to compare projections with, if there is one.
    """
    table = _Table(pool, rows)
    for name, row in rows.items():
        say(f"prepare {row.label}")
        table.prepare(name)
        if name in table.measured:
            table.results[name] |= table.ask(name, plan.limit, do="warm_up")
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(plan.rounds):
        for name in in_turn(table.measured, number):
            time.sleep(SETTLING)
            reply = table.ask(name, plan.limit + plan.seconds, do="time", seconds=plan.seconds)
            times[name] += [statistics.median(reply["seconds"])] if reply else []
        say(f"round {number + 1} of {plan.rounds}")
    for name in table.measured:
        table.results[name] |= summed_up(times[name])
        if exact is not None:
            table.results[name] |= table.ask(name, PREPARING_LIMIT, do="error", exact=str(exact))
    return table.results


class _Table:
    """The rows with what is known of each; one that cannot be measured keeps the reason."""

    def __init__(self, pool: Pool, rows: Mapping[str, Row]):
        self._pool = pool
        self._rows = rows
        self.results: dict[str, dict[str, Any]] = {
            name: {"label": row.label, "status": "measured"} for name, row in rows.items()
        }

    @property
    def measured(self) -> list[str]:
        return [name for name, result in self.results.items() if result["status"] == "measured"]

    def prepare(self, name: str) -> None:
        row = self._rows[name]
        self._pool.start(self._group(name), row.python)
        self.results[name] |= self.ask(
            name, PREPARING_LIMIT, do="prepare", factory=row.factory, task=row.task
        )

    def ask(self, name: str, limit: float, **request: Any) -> dict[str, Any]:
        """Return the answer of a row's process, empty if the row is lost by it."""
        try:
            return self._pool.ask(self._group(name), limit, row=name, **request)
        except RowError as reason:
            self.results[name] |= {"status": reason.status, "detail": reason.detail}
            say(f"{self._rows[name].label}: {reason}")
            return {}

    def _group(self, name: str) -> tuple[str, str]:
        return self._rows[name].python, self._rows[name].group or name


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round: each round begins with another one.

    Example:
      >>> in_turn(["a", "b", "c"], 4)
      ['b', 'c', 'a']
    """
    first = number % len(names) if names else 0
    return [*names[first:], *names[:first]]


def summed_up(times: Sequence[float]) -> dict[str, Any]:
    """Return the median and the range of a row's rounds, beside the rounds themselves.

    Example:
      >>> summed_up([0.3, 0.1, 0.2])
      {'seconds': [0.3, 0.1, 0.2], 'median': 0.2, 'least': 0.1, 'most': 0.3}
    """
    median = statistics.median(times)
    return {"seconds": list(times), "median": median, "least": min(times), "most": max(times)}


def say(line: str) -> None:
    """Tell whoever waits how far it is."""
    print(line, file=sys.stderr, flush=True)
