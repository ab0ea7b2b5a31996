"""Kill a run at random moments, and compare its end with that of a run left in peace.

python -m tests.faults.kill --kills 10
"""

import argparse
import random
import subprocess
import tempfile
import time
from pathlib import Path

from svb_jax.training.checkpoint import saved_steps
from tests.faults.runs import assert_same_end, finish, start, wait_for_step


def survive_kills(folder: Path, kills: int, seed: int = 0) -> None:
    """Kill a run so many times, let it finish, and check that its end is that of a run left in peace.

    Args:
      folder: For the two runs; they share their compiled steps.
      kills: How many times, each followed by a restart.
      seed: Draws the moments.
    """
    options = {"epochs": 6 + 4 * kills}
    finish(start(folder / "peace", **options))
    draw = random.Random(seed)
    for number in range(kills):
        process = start(folder / "killed", **options)
        _wait_for_a_moment(process, folder / "killed", draw, any_time=number % 2 == 1)
        if process.poll() is not None:
            raise RuntimeError(f"The run ended before kill {number + 1}:\n{finish(process)}")
        process.kill()
        process.communicate()
        saved = saved_steps(folder / "killed" / "checkpoints")
        print(f"kill {number + 1}: steps {saved} are saved", flush=True)
    output = finish(start(folder / "killed", **options))
    assert "Continuing the run" in output
    assert_same_end(folder / "killed", folder / "peace")


def _wait_for_a_moment(
    process: subprocess.Popen[str], run_dir: Path, draw: random.Random, *, any_time: bool
) -> None:
    """Wait for some moment of start and restore, or for one between, or in the midst of, new checkpoints."""
    if any_time:
        time.sleep(draw.uniform(1, 6))
        return
    newest = max(saved_steps(run_dir / "checkpoints"), default=0)
    wait_for_step(process, run_dir, newest + draw.randint(1, 3))
    time.sleep(draw.uniform(0, 0.2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        survive_kills(Path(place), chosen.kills, chosen.seed)
    print(f"After {chosen.kills} kills every bit is that of the run left in peace.")
