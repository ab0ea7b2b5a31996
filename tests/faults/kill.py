"""Kill a run at random moments, and compare its end with that of a run left in peace."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from svb_jax.training.checkpoint import load_checkpoint, saved_steps
from tests.faults.processes import Forked
from tests.faults.runs import QUICK_OPTIONS, assert_same_end, wait_until
from tests.faults.tally import Tally

OPTIONS = {**QUICK_OPTIONS, "svb_epsilon": 0.5, "epochs": 10, "checkpoint_every_epochs": 0.5}


def survive_kills(folder: Path, kills: int, seed: int = 0, show: Callable[[str], None] = print) -> Tally:
    """Kill runs so many times, at random moments, and restart them.

    Args:
      folder: An empty one to work in.
      kills: How many in all; a run that comes near its end is finished and compared, and the next begun.
      seed: Draws the moments.
      show: Told of each kill.

    Returns:
      What became of them; a run that ends otherwise than in peace counts for its last kill.
    """
    draw, tally = random.Random(seed), Tally("kill -9", show)
    Forked(folder / "peace", **OPTIONS).finish()
    last, run = max(saved_steps(folder / "peace" / "checkpoints")), folder / "killed 0"
    for number in range(kills):
        step = max(saved_steps(run / "checkpoints"), default=0)
        # Now and then while it starts or restores; mostly some steps later, in or between two saves.
        later = min(step + draw.randint(0, 8), last - 4) if draw.random() < 0.8 else 0
        is_last = step >= last - 4 or number == kills - 1
        seconds = draw.uniform(0, 1.5 if later == 0 else 0.2)
        what = f"{seconds:.2f} s after {f'step {later}' if later else 'its start'} of {last}"
        tally.add(what, _kill, run, later, seconds, is_last)
        run = folder / f"killed {number + 1}" if is_last else run
    return tally


def _kill(run_dir: Path, step: int, seconds: float, is_last: bool) -> str:
    """Kill a run a while after a step, and let it come to its end after its last kill."""
    process = Forked(run_dir, **OPTIONS)
    wait_until(lambda: max(saved_steps(run_dir / "checkpoints"), default=0) >= step, timeout=300)
    time.sleep(seconds)
    process.kill()
    # Whatever the moment was, every checkpoint is whole.
    for saved in saved_steps(run_dir / "checkpoints"):
        load_checkpoint(run_dir / "checkpoints" / str(saved))
    if is_last:
        Forked(run_dir, **OPTIONS).finish()
        assert_same_end(run_dir, run_dir.parent / "peace")
    return "survived"
