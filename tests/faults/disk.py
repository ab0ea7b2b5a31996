"""Let the disk run full under a run, and compare its end, once there is room, with that of a run in peace.

python -m tests.faults.disk
"""

import resource
import tempfile
from pathlib import Path

from svb_jax.training.checkpoint import load_checkpoint, saved_steps
from tests.faults.runs import assert_same_end, finish, finish_in_peace, start, wait_for_step


def survive_a_full_disk(peace: Path) -> None:
    """Forbid a run to write, check what it says and keeps, then let it go on.

    Args:
      peace: A run left in peace; the other one is made beside it, and finds its steps compiled.
    """
    full = peace.parent / "full"
    process = start(full)
    wait_for_step(process, full, 3)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    # Any longer file now fails half-way, as on a full disk. (A small file system would need a mount.)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, hard))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "could not be saved" in output, output
    assert "Traceback" not in output, output
    saved = saved_steps(full / "checkpoints")
    assert f"The newest whole one is of step {saved[-1]}" in output, output
    for step in saved:
        load_checkpoint(full / "checkpoints" / str(step))
    assert f"from step {saved[-1]}" in finish(start(full))
    assert_same_end(full, peace)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        survive_a_full_disk(finish_in_peace(Path(place)))
    print("The run said so, kept its checkpoints, and went on when there was room.")
