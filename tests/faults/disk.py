"""Let the disk run full under a run, and compare its end, once there is room, with that of a run in peace."""

import contextlib
import math
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from svb_jax.training.checkpoint import load_checkpoint, saved_steps
from tests.faults.kill import OPTIONS
from tests.faults.processes import Forked, Spawned
from tests.faults.runs import assert_same_end, wait_for_step
from tests.faults.tally import Tally

MOST_SECONDS = 60
"""From the full disk to the end of the process, also on a busy machine."""


def survive_full_disks(
    folder: Path, trials: int, seed: int = 0, show: Callable[[str], None] = print
) -> Tally:
    """Run on file systems that are too small by a random amount, and go on when they have grown.

    Args:
      folder: An empty one to work in; file systems are mounted below it, which needs root.
      trials: How many.
      seed: Draws the sizes.
      show: Told of each trial.

    Returns:
      What became of them.
    """
    draw, tally = random.Random(seed), Tally("a full disk", show)
    peace = folder / "peace" / "run"
    Forked(peace, **OPTIONS).finish()
    most = _kilobytes(peace) - 4
    for number in range(trials):
        kilobytes = draw.randint(40, most)
        with _file_system(folder / f"small {number}", kilobytes) as small:
            tally.add(f"{kilobytes} kB", _fill, small, peace)
    return tally


def _kilobytes(folder: Path) -> int:
    """Return what a folder's files take in pages of 4 kB, as in a tmpfs; a smaller one cannot hold them."""
    return sum(4 * math.ceil(path.stat().st_size / 4096) for path in folder.rglob("*") if path.is_file())


def _fill(small: Path, peace: Path) -> str:
    run_dir = small / "run"
    code, output = _logged(run_dir).end()
    assert code == 1, f"It ended with {code}:\n{output}"
    assert "Traceback" not in output, output
    assert "No space left on device" in output.splitlines()[-1], output
    for step in saved_steps(run_dir / "checkpoints"):
        load_checkpoint(run_dir / "checkpoints" / str(step))
    _resize(small, 64_000)
    _logged(run_dir).finish()
    assert_same_end(run_dir, peace)
    return "noticed"


def _logged(run_dir: Path) -> Forked:
    # The log must not be on the disk that is full.
    return Forked(run_dir, log=run_dir.parents[1] / f"{run_dir.parent.name}.log", **OPTIONS)


@contextlib.contextmanager
def _file_system(place: Path, kilobytes: int) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def _resize(place: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", place], check=True)


def survive_a_full_disk(folder: Path) -> None:
    """Forbid a run to write, check what it says and keeps, then let it go on.

    Args:
      folder: An empty one to work in.
    """
    peace, full = folder / "peace", folder / "full"
    Spawned(peace).finish()
    process = Spawned(full)
    wait_for_step(process, full, 3)
    forbid_long_files(process)
    begin = time.monotonic()
    code, output = process.end()
    assert time.monotonic() - begin < MOST_SECONDS, output
    assert code == 1, output
    assert "could not be saved" in output.splitlines()[-1], output
    assert "Traceback" not in output, output
    saved = saved_steps(full / "checkpoints")
    assert f"The newest whole one is of step {saved[-1]}" in output, output
    for step in saved:
        load_checkpoint(full / "checkpoints" / str(step))
    assert f"from step {saved[-1]}" in Spawned(full).finish()
    assert_same_end(full, peace)


def forbid_long_files(process: Spawned) -> None:
    """Let every file of a run fail half-way, as on a full disk; a small file system would need root."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, hard))


def can_mount() -> bool:
    """Return whether this process may mount file systems."""
    return os.geteuid() == 0
