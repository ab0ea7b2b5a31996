"""A request to stop, by SIGTERM, Ctrl-C or a closed terminal, that a run obeys between two steps."""

import signal
import threading
from signal import SIGTERM
from types import FrameType


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
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.signal = True, number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
