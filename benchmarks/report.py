"""The measurements on disk as one page of Markdown.

python -m benchmarks report > page.md
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import results, tables
from benchmarks.options import RESULTS


@dataclass(frozen=True, kw_only=True)
class Report:
    """Print the tables of everything that has been measured."""

    results: Path = RESULTS
    """The folder with the JSON."""

    def run(self) -> None:
        """Print the tables."""
        found = results.load(self.results)
        if not found:
            raise ValueError(f"benchmarks report needs measurements in {self.results}; it found none.")
        print("\n\n".join(map(tables.render, found)))
