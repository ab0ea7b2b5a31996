"""A request to stop, by SIGTERM, Ctrl-C or a closed terminal, that a run obeys between two steps."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from signal import SIGTERM
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_SECONDS = 1.0
"""How long native code may keep Python from answering a signal."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and saved its state before it did.

    Attributes:
      signal: What asked: SIGINT, SIGTERM or SIGHUP; SIGTERM too where another host was asked.
    """

    def __init__(self, message: str, signal: int | None = None):
        super().__init__(message)
        self.signal = SIGTERM if signal is None else signal


class StopSignals:
    """Remembers SIGTERM, SIGINT and SIGHUP while it is entered; a second one ends the process at once.

    What the user has told the process to ignore, as ``nohup`` does with SIGHUP, stays ignored.

    Examples:
      >>> with StopSignals() as stop:
      ...     signal.raise_signal(signal.SIGTERM)
      ...     stop.requested
      True
    """

    requested = False
    signal: int | None = None

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        # Python delivers signals to the main thread, and lets only that one ask for them.
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._obey)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _obey(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.signal = True, number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class TidyingUp(StopSignals):
    """Raises at the first signal, so that what was begun is tidied up; a second one ends the process at once.

    Args:
      message: Of the ``Interrupted`` that is raised.
    """

    def __init__(self, message: str):
        self._message = message

    def _obey(self, number: int, frame: FrameType | None) -> None:
        super()._obey(number, frame)
        raise Interrupted(self._message, number)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal end this process while native code waits, which would answer it only when it returns."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_end_at_signal, args=(read, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(previous)
        os.close(write)


def _end_at_signal(read: int, over: threading.Event) -> None:
    with os.fdopen(read, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            # Python's own answer comes first, if it can.
            if number[0] in NUMBERS and not over.wait(PATIENCE_SECONDS):
                print("Stopped.", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
