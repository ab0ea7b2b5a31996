"""What became of each trial of an attack, and a table of it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from subprocess import TimeoutExpired
from typing import Any

OUTCOMES = ("survived", "noticed", "wrong", "hung")
MEANINGS = {
    "survived": "it went on, and its end is that of a run left in peace, bit for bit",
    "noticed": "it stopped with a sentence and a failing exit code; mended, it ends as in peace",
    "wrong": "anything else: another end, a traceback, a lost checkpoint",
    "hung": "it had to be killed",
}


@dataclass
class Tally:
    """The outcomes of an attack's trials."""

    attack: str
    show: Callable[[str], None] = print
    """Told of each trial."""
    counts: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    """What happened in the trials that went wrong or hung."""

    def add(self, what: str, trial: Callable[..., str], *arguments: Any) -> None:
        """Run a trial, which returns its outcome, or fails."""
        try:
            outcome = trial(*arguments)
        except Exception as error:
            outcome = "hung" if isinstance(error, TimeoutExpired | TimeoutError) else "wrong"
            self.reports.append(f"{self.attack}, trial {self.tried + 1}, {what}: {error!r}")
        self.counts[outcome] += 1
        self.show(f"{self.attack}, trial {self.tried}, {what}: {outcome}")

    @property
    def tried(self) -> int:
        """How many trials there were."""
        return self.counts.total()

    def check(self) -> None:
        """Raise if a trial went wrong or hung."""
        if self.counts["wrong"] or self.counts["hung"]:
            raise AssertionError("\n".join([to_table([self]), *self.reports]))


def to_table(tallies: list[Tally]) -> str:
    """Return the outcomes in Markdown."""
    lines = [
        f"| attack | tried | {' | '.join(OUTCOMES)} |",
        "|---" + "|---:" * (len(OUTCOMES) + 1) + "|",
    ]
    for tally in tallies:
        counts = " | ".join(str(tally.counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {tally.attack} | {tally.tried} | {counts} |")
    return "\n".join(lines)
