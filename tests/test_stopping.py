"""Signals from outside: the state is saved, one line is said, and the exit code tells which it was."""

import signal
import time

import pytest

from svb_jax.training.checkpoint import load_newest
from svb_jax.training.stopping import StopSignals
from tests.faults.processes import Spawned
from tests.faults.runs import QUICK_OPTIONS, wait_for_step

LONG = {**QUICK_OPTIONS, "epochs": 5000}


def _last_line(output: str) -> str:
    assert "Traceback" not in output, output
    return output.splitlines()[-1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops(number, code, tmp_path):
    process = Spawned(tmp_path / "run", **LONG)
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(number)
    ended, output = process.end(timeout=60)
    assert ended == code, output
    newest, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert f"Asked to stop: step {newest.step} of" in _last_line(output)


def test_a_second_signal_ends_it_at_once_and_loses_no_checkpoint(tmp_path):
    process = Spawned(tmp_path / "run", **LONG)
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    code, output = process.end(timeout=30)
    assert code == 130, output
    assert _last_line(output).startswith(("Stopped.", "Asked to stop"))
    newest, damaged = load_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert damaged == {}


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, previous)
