"""A request to stop, by SIGTERM or Ctrl-C, that a run obeys between two steps."""

import signal
import threading
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and saved its state before it did."""


class StopSignals:
    """Remembers SIGTERM and SIGINT while it is entered; a second one ends the process at once.

    Examples:
      >>> with StopSignals() as stop:
      ...     signal.raise_signal(signal.SIGTERM)
      ...     stop.requested
      True
    """

    requested = False

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        # Python delivers signals to the main thread, and lets only that one ask for them.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
