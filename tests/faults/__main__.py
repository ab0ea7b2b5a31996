"""Attack runs from outside, and print a table of what became of them.

python -m tests.faults --kills 100 --flips 100 --disks 20 --deaths 20 --seed 0
"""

import argparse
import logging
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from svb_jax.training.run_folder import current_commit
from tests.faults.disk import survive_full_disks
from tests.faults.flips import survive_flips
from tests.faults.hosts import survive_deaths
from tests.faults.kill import OPTIONS, survive_kills
from tests.faults.tally import MEANINGS, Tally, to_table

ATTACKS = {
    "kills": (survive_kills, "runs killed by SIGKILL at random moments"),
    "flips": (survive_flips, "single bits flipped in any file of a run, its data and its compiled steps"),
    "disks": (survive_full_disks, "disks that run full; needs root"),
    "deaths": (
        lambda *arguments: survive_deaths(*arguments, **OPTIONS),
        "hosts of two that are killed or frozen",
    ),
}


def main() -> int:
    """Run the attacks that are asked for; the exit code is 1 if a trial went wrong or hung."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        epilog="; ".join(f"{outcome}: {meaning}" for outcome, meaning in MEANINGS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, (_, what) in ATTACKS.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="TRIALS", help=what)
    parser.add_argument("--seed", type=int, default=0, help="draws moments, files and bits")
    asked = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Of what is about to run, not of what the tree has become meanwhile.
    commit = current_commit()
    tallies: list[Tally] = []
    for name, (attack, _) in ATTACKS.items():
        if getattr(asked, name):
            with tempfile.TemporaryDirectory() as place:
                tallies.append(attack(Path(place), getattr(asked, name), asked.seed, _show))
    changes = ", with uncommitted changes" if commit is None or commit.endswith("-dirty") else ""
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, commit {commit}{changes}, seed {asked.seed}, {platform.machine()}"
    )
    print("\n".join([to_table(tallies), *(report for tally in tallies for report in tally.reports)]))
    return int(any(tally.counts["wrong"] or tally.counts["hung"] for tally in tallies))


def _show(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
