"""Where ``svb`` starts: signals are answered before JAX, which takes seconds to import, is imported.

Beside the package and not inside it, because importing anything inside it imports JAX first.
"""

import os
import signal
import sys
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h\n"
"""A progress bar hides it."""


def main() -> int:
    """Run the command line; until a command answers signals itself, each ends the process with one line."""
    _open_standard_streams()
    ending = _Ending(os.getpid())
    ending.begin()
    from svb_jax.experiments.__main__ import main as run

    ending.code = run()
    return ending.code


def _open_standard_streams() -> None:
    """Send nowhere what whoever started this process has closed.

    The next file would get the stream's number, and with it the messages of native libraries: a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class _Ending:
    """Ends this process at a signal: a KeyboardInterrupt could become any error of what is being imported."""

    def __init__(self, process: int):
        self._process = process
        self.code = 0
        """What the command has returned; not 0 if it has said why it ends."""

    def begin(self) -> None:
        """Answer Ctrl-C, SIGTERM and SIGHUP from now on, unless they are ignored, as by ``nohup``."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._answer)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked worker: it ends as it would without this.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the signal may have come in the middle of a write, or the reader be gone
                continue
        if not self.code:
            # Not 2, which a run on many hosts gives to JAX.
            terminal = sys.stderr.fileno()
            os.write(terminal, (SHOW_CURSOR if os.isatty(terminal) else b"") + b"Stopped.\n")
        # Exit hooks of what is half imported, or of JAX at a second signal, would fail with tracebacks.
        os._exit(self.code or 128 + number)
