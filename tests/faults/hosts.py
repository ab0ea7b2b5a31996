"""Lose one of two hosts: the other must stop by itself, and both must be able to go on together.

python -m tests.faults.hosts
"""

import argparse
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from tests.faults.runs import assert_same_end, finish, free_port, start, wait_for_step

MOST_SECONDS = 30
"""A host without the other must have stopped by then."""


def start_two(run_dir: Path, **options: object) -> list[subprocess.Popen[str]]:
    """Start both processes of a run."""
    hosts = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    return [start(run_dir, **{**options, **hosts}, process_id=number) for number in range(2)]


def finish_two_in_peace(folder: Path, **options: object) -> Path:
    """Run to the end two processes that nothing happens to, and return their folder."""
    for process in start_two(folder / "peace", **options):
        finish(process)
    return folder / "peace"


def survive_a_killed_host(peace: Path, victim: int, **options: object) -> float:
    """Kill a host, see the other stop, restart both, and compare their end with that of a run in peace.

    Args:
      peace: A run of two processes left in peace; the other one is made beside it.
      victim: 0 for the coordinator, 1 for the other.
      **options: Of the run left in peace.

    Returns:
      The seconds that the survivor went on.
    """
    lost = peace.parent / f"killed {victim}"
    processes = start_two(lost, **options)
    wait_for_step(processes[victim], lost, 2)
    processes[victim].kill()
    seconds = _wait_for_the_other(processes, victim)
    for process in start_two(lost, **options):
        finish(process)
    assert_same_end(lost, peace)
    return seconds


def survive_a_full_disk(peace: Path, **options: object) -> float:
    """Do the same with a first host that can no longer save, and says so."""
    lost = peace.parent / "full"
    processes = start_two(lost, **options)
    wait_for_step(processes[0], lost, 2)
    _, hard = resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, (1000, hard))
    output, _ = processes[0].communicate(timeout=MOST_SECONDS)
    assert processes[0].returncode == 1, output
    assert "could not be saved" in output, output
    seconds = _wait_for_the_other(processes, victim=0)
    for process in start_two(lost, **options):
        finish(process)
    assert_same_end(lost, peace)
    return seconds


def stop_with_a_host_that_cannot_start(folder: Path) -> float:
    """Ask the second host for a batch that two devices cannot share, and see the first one stop too."""
    hosts = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    processes = [
        start(folder / "wrong", **hosts, process_id=number, batch_size=size)
        for number, size in enumerate((16, 15))
    ]
    output, _ = processes[1].communicate(timeout=300)
    assert processes[1].returncode == 2, output
    assert "got 15" in output, output
    return _wait_for_the_other(processes, victim=1)


def _wait_for_the_other(processes: list[subprocess.Popen[str]], victim: int) -> float:
    """Return how long a survivor went on after its peer was gone, which must be short."""
    gone = time.monotonic()
    processes[victim].communicate()
    survivor = processes[1 - victim]
    try:
        output, _ = survivor.communicate(timeout=MOST_SECONDS)
    finally:
        survivor.kill()
    assert survivor.returncode not in (0, 2), f"The survivor did not notice:\n{output}"
    return time.monotonic() - gone


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        calm = finish_two_in_peace(Path(place))
        for chosen in (0, 1):
            waited = survive_a_killed_host(calm, chosen)
            print(f"Host {chosen} killed: the other stopped after {waited:.1f} s, and both went on.")
        waited = survive_a_full_disk(calm)
        print(f"Host 0 without room: the other stopped after {waited:.1f} s, and both went on.")
        waited = stop_with_a_host_that_cannot_start(Path(place))
        print(f"Host 1 could not start: the other stopped after {waited:.1f} s.")
