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
from tests.faults.runs import assert_same_end, finish, finish_in_peace, start, wait_for_step

MARGIN = 8
"""Steps that a run may take before a kill that was due reaches it."""


def survive_kills(peace: Path, kills: int, seed: int = 0, **options: object) -> None:
    """Kill a run so many times, let it finish, and check that its end is that of a run left in peace.

    Args:
      peace: The run left in peace; the other one is made beside it, and finds its steps compiled.
      kills: How many times, each followed by a restart.
      seed: Draws the moments.
      **options: Of the run left in peace.
    """
    killed = peace.parent / "killed"
    draw = random.Random(seed)
    last = max(saved_steps(peace / "checkpoints"))
    for number in range(kills):
        process = start(killed, **options)
        # Its own part of the run for each kill, so that they reach from the beginning to the end.
        _wait_for_a_moment(process, killed, draw, last * number // kills, last * (number + 1) // kills)
        if process.poll() is not None:
            raise RuntimeError(f"The run ended before kill {number + 1}:\n{finish(process)}")
        process.kill()
        process.communicate()
        newest = max(saved_steps(killed / "checkpoints"), default=None)
        print(f"kill {number + 1}: the newest checkpoint is of step {newest} of {last}", flush=True)
    output = finish(start(killed, **options))
    assert "Continuing the run" in output
    assert_same_end(killed, peace)


def _wait_for_a_moment(
    process: subprocess.Popen[str], run_dir: Path, draw: random.Random, first: int, last: int
) -> None:
    """Wait for a moment between two steps of the run, or now and then for one of start and restore."""
    if first > 0 and draw.random() < 0.25:
        time.sleep(draw.uniform(1, 6))
        return
    wait_for_step(process, run_dir, draw.randint(first + 1, max(first + 1, last - MARGIN)))
    time.sleep(draw.uniform(0, 0.2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        length = {"epochs": 6 + 4 * chosen.kills}
        survive_kills(finish_in_peace(Path(place), **length), chosen.kills, chosen.seed, **length)
    print(f"After {chosen.kills} kills every bit is that of the run left in peace.")
