"""What every measurement lets its user choose."""

import abc
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.environment import describe
from benchmarks.measurement import Plan, Row, say
from benchmarks.processes import Pool

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Options(abc.ABC):
    """Options of every measurement."""

    rounds: int = 5
    """How often all rows are called in turn."""
    seconds: float = 0.3
    """How long a row is called in each round; at least once in any case."""
    limit: float = 60.0
    """Seconds after which a call is stopped and its row given up."""
    torch_python: str | None = None
    """An interpreter that has PyTorch (and geotorch); this one if not given."""
    results: Path = RESULTS
    """The folder for the JSON and the plots."""

    def __post_init__(self):
        for name in ("rounds", "seconds", "limit"):
            if getattr(self, name) <= 0:
                raise ValueError(f"benchmarks needs a positive --{name}; got {getattr(self, name)}.")
        if shutil.which(self.torch) is None:
            raise ValueError(f"benchmarks needs an interpreter as --torch-python; got {self.torch_python}.")

    def run(self) -> None:
        """Measure, print and save."""
        with Pool() as pool:
            environment = self.surroundings(pool)
            sections = list(self.measure(pool))
        command = type(self).__name__.lower()
        result = results.make_result(command, environment, self.settings, sections)
        path = results.save(self.results, result)
        print(tables.render(result))
        print(f"\nWritten to {path} and beside it.")

    @abc.abstractmethod
    def measure(self, pool: Pool) -> Iterator[dict[str, Any]]:
        """Yield the sections of the result."""

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for, as far as the tables do not say it."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | float | str)}
        return {name: value for name, value in plain.items() if name != "torch_python"}

    @property
    def torch(self) -> str:
        """The interpreter for PyTorch's rows."""
        return self.torch_python or sys.executable

    @property
    def plan(self) -> Plan:
        """How much to measure."""
        return Plan(self.rounds, self.seconds, self.limit)

    def surroundings(self, pool: Pool) -> dict[str, Any]:
        """Describe the machine and what is installed, and warn if others are using it."""
        found = describe(pool, [self.torch])
        if found["load_average"] > 0.25 * found["cores"]:
            load = f"load {found['load_average']:.1f} on {found['cores']} cores"
            say(f"The machine is busy ({load}): its times are not to be trusted.")
        return found


def choose(command: str, asked: Sequence[str], rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return those rows that were asked for, in the table's order, or raise where one is unknown."""
    unknown = [name for name in asked if name not in rows]
    if unknown:
        known = ", ".join(rows)
        raise ValueError(f"benchmarks {command} needs rows out of {known}; got {', '.join(unknown)}.")
    return {name: row for name, row in rows.items() if name in asked}
