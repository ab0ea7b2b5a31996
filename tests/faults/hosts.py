"""Kill one of two hosts: the other must stop by itself, and both must be able to go on together.

python -m tests.faults.hosts
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from tests.faults.runs import assert_same_end, finish, free_port, start, wait_for_step


def start_two(run_dir: Path, **options: object) -> list[subprocess.Popen[str]]:
    """Start both processes of a run."""
    hosts = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    return [start(run_dir, **hosts, process_id=number, **options) for number in range(2)]


def survive_a_lost_host(folder: Path, victim: int, reference: Path | None = None) -> float:
    """Kill a host, see the other stop, restart both, and compare their end with that of a run in peace.

    Args:
      folder: For the runs.
      victim: 0 for the coordinator, 1 for the other.
      reference: A finished run left in peace; made here if not given.

    Returns:
      The seconds that the survivor went on.
    """
    if reference is None:
        reference = folder / "peace"
        for process in start_two(reference):
            finish(process)
    processes = start_two(folder / "lost")
    wait_for_step(processes[victim], folder / "lost", 2)
    processes[victim].kill()
    lost = time.monotonic()
    survivor = processes[1 - victim]
    output, _ = survivor.communicate(timeout=60)
    seconds = time.monotonic() - lost
    processes[victim].communicate()
    assert survivor.returncode != 0, f"The survivor did not notice:\n{output}"
    for process in start_two(folder / "lost"):
        finish(process)
    assert_same_end(folder / "lost", reference)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for chosen in (0, 1):
            waited = survive_a_lost_host(Path(place) / str(chosen), chosen)
            print(f"Host {chosen} killed: the other stopped after {waited:.0f} s, and both went on.")
