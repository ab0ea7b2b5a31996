"""Signals from outside: the state is saved, one line is said, and the exit code tells which it was."""

import signal
import time
import tomllib
from pathlib import Path

import pytest

from svb_jax.training.checkpoint import load_newest
from svb_jax.training.stopping import Interrupted, StopSignals, TidyingUp
from tests.faults.hosts import two_hosts
from tests.faults.processes import Spawned
from tests.faults.runs import QUICK_OPTIONS, wait_for_step, wait_until
from tests.test_hosts import listeners

LONG = {**QUICK_OPTIONS, "epochs": 5000}


def _last_line(output: str) -> str:
    assert "Traceback" not in output, output
    return output.splitlines()[-1]


def _catches(process: Spawned, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; Python alone has one for SIGINT only."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "code", "seconds"),
    [
        *((signal.SIGINT, 130, seconds) for seconds in (0, 0.1, 0.3)),
        (signal.SIGTERM, 143, 0.3),
        (signal.SIGHUP, 129, 0.3),
    ],
)
def test_a_signal_in_the_first_seconds_is_one_line(number, code, seconds, tmp_path):
    process = Spawned(tmp_path / "run", **LONG)
    # Before that Python itself starts, and nothing of this project runs.
    wait_until(lambda: _catches(process, signal.SIGTERM), timeout=60)
    # JAX is not even being imported: its native library is not there.
    assert not _has_jaxlib(process)
    time.sleep(seconds)
    process.send_signal(number)
    assert process.end(timeout=20) == (code, "Stopped.\n")
    assert not (tmp_path / "run").exists()


def test_a_signal_while_jax_is_imported_is_one_line(tmp_path):
    process = Spawned(tmp_path / "run", **LONG)
    wait_until(lambda: _has_jaxlib(process), timeout=60)
    process.send_signal(signal.SIGINT)
    assert process.end(timeout=20) == (130, "Stopped.\n")
    assert not (tmp_path / "run").exists()


def _has_jaxlib(process):
    return "jaxlib" in Path(f"/proc/{process.pid}/maps").read_text()


def test_the_installed_command_starts_where_signals_are_answered():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"svb": "_svb_jax_command:main"}
    assert "_svb_jax_command.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]


def test_a_host_that_waits_for_others_can_be_stopped(tmp_path):
    first, _ = two_hosts()
    process = Spawned(tmp_path / "run", **LONG, **first, wait_seconds=200)
    port = int(first["coordinator"].rpartition(":")[2])
    wait_until(lambda: bool(listeners(port)), timeout=60)
    process.send_signal(signal.SIGINT)
    code, output = process.end(timeout=20)
    assert (code, _last_line(output)) == (130, "Stopped.")


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


def test_more_signals_while_it_ends_cause_no_traceback(tmp_path):
    process = Spawned(tmp_path / "run", **LONG)
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    for _ in range(50):
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    code, output = process.end(timeout=30)
    assert code == 130, output
    assert _last_line(output).startswith(("Stopped.", "Asked to stop"))


def test_work_that_must_be_tidied_up_is_told_by_an_error():
    with pytest.raises(Interrupted, match="Nothing was done") as stopped, TidyingUp("Nothing was done."):
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, previous)
