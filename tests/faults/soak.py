"""Long runs and many runs in one process: memory, threads, open files and maps must stay flat.

python -m tests.faults.soak --epochs 2000 --runs 200
"""

import argparse
import contextlib
import dataclasses
import io
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from svb_jax.experiments.runner import MOST_MAPPED, release_programs
from svb_jax.training import train
from svb_jax.training.loop import Display
from tests.faults.runs import QUICK

# One step an epoch.
SHORT = dataclasses.replace(QUICK, first=QUICK.batch_size)


class Usage(NamedTuple):
    """What this process holds."""

    megabytes: float
    threads: int
    files: int
    maps: int


def usage() -> Usage:
    """Return what this process holds now, as Linux tells it."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    files, maps = Path("/proc/self/fd"), Path("/proc/self/maps")
    return Usage(
        resident, threading.active_count(), len(list(files.iterdir())), len(maps.read_text().splitlines())
    )


def soak(folder: Path, epochs: int) -> list[Usage]:
    """Train so many epochs with a checkpoint after each, and return the usage after every tenth of them."""
    seen: list[Usage] = []
    show = Display.epoch

    def watch(display: Display, line: dict[str, float]) -> None:
        if line["epoch"] % max(1, epochs // 10) == 0:
            seen.append(usage())
        show(display, line)

    Display.epoch = watch
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            train(dataclasses.replace(SHORT, run_dir=folder / "soak", epochs=epochs))
    finally:
        Display.epoch = show
    return seen


def many_runs(folder: Path, runs: int) -> list[Usage]:
    """Train so many runs one after another, as ``svb run`` does, and return the usage after every tenth."""
    seen = []
    for number in range(1, runs + 1):
        config = dataclasses.replace(SHORT, run_dir=folder / f"run {number}", epochs=2, seed=number)
        with contextlib.redirect_stderr(io.StringIO()):
            train(config)
        release_programs()
        if number % max(1, runs // 10) == 0:
            seen.append(usage())
    return seen


def check_flat(seen: list[Usage]) -> None:
    """Check that the second half of a series has grown over the first by no more than noise."""
    early, late = seen[len(seen) // 2], seen[-1]
    assert late.megabytes < early.megabytes * 1.1 + 30, seen
    # A save under way has a few threads and files of its own.
    assert late.threads <= early.threads + 10, seen
    assert late.files <= early.files + 10, seen
    # Compiled programs hold maps until they are released together.
    assert late.maps < max(early.maps * 1.1 + 50, MOST_MAPPED * 1.1), seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=200)
    asked = parser.parse_args()
    for attack, count in ((soak, asked.epochs), (many_runs, asked.runs)):
        with tempfile.TemporaryDirectory() as place:
            series = attack(Path(place), count)
        print(f"{attack.__name__} of {count}", *series, sep="\n", flush=True)
        check_flat(series)
