"""Training runs as processes of their own, to be signalled, killed and waited for."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired

from svb_jax.training.stopping import NUMBERS
from tests.faults.runs import to_words

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["svb_jax.training.loop", "svb_jax.experiments.train", "tensorflow_datasets", "tyro"]
)


class Spawned(subprocess.Popen):
    """A run, or what continues it, started as a user would: its imports alone take seconds."""

    def __init__(self, run_dir: Path, **options: object):
        command = [sys.executable, "-m", "experiments", "train", *to_words(run_dir, options)]
        root = Path(__file__).parents[2]
        with _answering_signals():
            super().__init__(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """Wait for its end, and return its exit code and what it said."""
        try:
            output, _ = self.communicate(timeout=timeout)
        finally:
            self.kill()
        return self.returncode, output

    def finish(self) -> str:
        """Wait for it to end well, and return what it said."""
        return _well(*self.end())


@contextlib.contextmanager
def _answering_signals() -> Iterator[None]:
    """Let what is started ignore no signal: it would inherit what ``nohup`` and a shell's ``&`` ignore."""
    ignored = [number for number in NUMBERS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


class Forked:
    """The same, forked from a process that has everything imported, which takes a second.

    What it says is kept in a file beside its folder.
    """

    def __init__(self, run_dir: Path, log: Path | None = None, **options: object):
        self._log = log or run_dir.with_name(f"{run_dir.name}.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._process = _CONTEXT.Process(target=_train, args=(self._log, to_words(run_dir, options)))
        self._process.start()

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it without warning, if it still runs."""
        self._process.kill()
        self._process.join()

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """Wait for its end, and return its exit code and what it said.

        Raises:
          TimeoutExpired: It had to be killed; its output ends with what each of its threads was doing.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_signal(signal.SIGUSR1)
            time.sleep(1)
            self.kill()
            raise TimeoutExpired("svb train", timeout, self._log.read_text())
        return self._process.exitcode, self._log.read_text()

    def finish(self) -> str:
        """Wait for it to end well, and return what it said."""
        return _well(*self.end())


def _well(code: int, output: str) -> str:
    if code != 0:
        raise RuntimeError(f"The run ended with {code}:\n{output}")
    return output


def _train(log: Path, words: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    import jax

    from svb_jax.experiments.__main__ import main

    # Also a program that compiles in no time is found again by the next process.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    code = main(["train", *words])
    # A command ends with these; a process of multiprocessing leaves them out.
    atexit._run_exitfuncs()
    sys.exit(code)
