"""Lose one of two hosts: the other must stop by itself, and both must be able to go on together."""

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.disk import forbid_long_files
from tests.faults.processes import Forked, Spawned
from tests.faults.runs import assert_same_end, free_port, wait_for_step
from tests.faults.tally import Tally

MOST_SECONDS = 60
"""A host without the other must have stopped by then: ten seconds of silence, and room for a busy machine."""
WAIT_SECONDS = 15
"""How long a host of a trial waits for one that was killed before they met."""
LAST_LINE = re.compile(
    rf"Waited {WAIT_SECONDS} s for 2 hosts at \S+ in vain\. Start all of them, .*|"
    r"Another host has stopped \(.+\)\. Its own output says why\. "
    r"Start all hosts again: they continue from the newest checkpoint\."
)
"""What a host that lost the other says last, whichever part of it noticed."""


def start_two(run_dir: Path, **options: object) -> list[Forked]:
    """Start both processes of a run."""
    return [
        Forked(run_dir, log=run_dir.with_name(f"{run_dir.name} {number}.log"), **options, **host)
        for number, host in enumerate(two_hosts())
    ]


def two_hosts() -> list[dict[str, Any]]:
    """Return the options by which two processes on this machine meet."""
    together = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    return [{**together, "process_id": number} for number in range(2)]


def finish_two_in_peace(folder: Path, **options: object) -> Path:
    """Run to the end two processes that nothing happens to, and return their folder."""
    for process in start_two(folder / "peace", **options):
        process.finish()
    return folder / "peace"


def survive_a_killed_host(peace: Path, victim: int, **options: object) -> None:
    """Kill a host, see the other stop, restart both, and compare their end with that of a run in peace.

    Args:
      peace: A run of two processes left in peace; the other one is made beside it.
      victim: 0 for the coordinator, 1 for the other.
      **options: Of the run left in peace.
    """
    lost = peace.parent / f"killed {victim}"
    processes = start_two(lost, **options)
    wait_for_step(processes[victim], lost, 2)
    processes[victim].kill()
    assert _end_of_the_other(processes[1 - victim]) == "noticed"
    _go_on(lost, peace, **options)


def survive_a_full_disk(peace: Path, **options: object) -> None:
    """Do the same with a first host that can no longer save, and says so."""
    lost = peace.parent / "full"
    processes = [Spawned(lost, **options, **host) for host in two_hosts()]
    wait_for_step(processes[0], lost, 2)
    forbid_long_files(processes[0])
    code, output = processes[0].end(MOST_SECONDS)
    assert code == 1, output
    assert "could not be saved" in output, output
    assert _end_of_the_other(processes[1]) == "noticed"
    _go_on(lost, peace, **options)


def stop_with_a_host_that_cannot_start(folder: Path) -> None:
    """Ask the second host for a batch that two devices cannot share, and see the first one stop too."""
    processes = [
        Spawned(folder / "wrong", **host, batch_size=size)
        for host, size in zip(two_hosts(), (16, 15), strict=True)
    ]
    code, output = processes[1].end()
    assert code == 2, output
    assert "got 15" in output, output
    assert _end_of_the_other(processes[0]) == "noticed"


def stop_with_a_frozen_host(folder: Path, frozen: int, **options: object) -> float:
    """Freeze a host, and see the other one stop with a sentence; return how long it went on."""
    run_dir = folder / f"frozen {frozen}"
    processes = start_two(run_dir, **options)
    wait_for_step(processes[0], run_dir, 2)
    processes[frozen].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    try:
        assert _end_of_the_other(processes[1 - frozen]) == "noticed"
    finally:
        processes[frozen].kill()
    return time.monotonic() - begin


def survive_deaths(
    folder: Path, trials: int, seed: int = 0, show: Callable[[str], None] = print, **options: object
) -> Tally:
    """Kill or freeze one of two hosts at a random moment, see the other stop, and let both go on together.

    Args:
      folder: An empty one to work in.
      trials: How many.
      seed: Draws the host, the fault and the moment.
      show: Told of each trial.
      **options: Of the runs.

    Returns:
      What became of them.
    """
    draw, tally = random.Random(seed), Tally("the death of one of two hosts", show)
    peace = finish_two_in_peace(folder, **options)
    for number in range(trials):
        victim, fault = draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        # Now and then before they have met, mostly while they train.
        after_step, seconds = draw.choice([0, 1, 1, 1]), draw.uniform(0, 2)
        what = f"host {victim}, {fault.name} {seconds:.1f} s after {'a step' if after_step else 'its start'}"
        run = folder / f"death {number}"
        tally.add(what, _die, run, peace, victim, fault, after_step, seconds, options)
    return tally


def _die(
    run: Path,
    peace: Path,
    victim: int,
    fault: signal.Signals,
    after_step: int,
    seconds: float,
    options: dict[str, object],
) -> str:
    processes = start_two(run, **options, wait_seconds=WAIT_SECONDS)
    try:
        if after_step:
            wait_for_step(processes[0], run, after_step)
        time.sleep(seconds)
        processes[victim].send_signal(fault)
        outcome = _end_of_the_other(processes[1 - victim])
    finally:
        for process in processes:
            process.kill()
    _go_on(run, peace, **options)
    return outcome


def _end_of_the_other(survivor: Forked | Spawned) -> str:
    """Return what became of a host whose peer is gone."""
    code, output = survivor.end(MOST_SECONDS)
    assert "stack trace" not in output, output
    assert "Traceback" not in output, output
    # It may have been done before the other died.
    if code == 0:
        return "survived"
    assert code == 1, f"The survivor ended with {code}:\n{output}"
    assert LAST_LINE.fullmatch(output.splitlines()[-1]), output
    return "noticed"


def _go_on(run: Path, peace: Path, **options: object) -> None:
    for process in start_two(run, **options):
        process.finish()
    assert_same_end(run, peace)
