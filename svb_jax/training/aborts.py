"""JAX aborts a process that has lost its hosts, with a stack trace: here it ends with a sentence instead."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_CODE = 1

_ABOUT_HOSTS = re.compile(rb"[IWEF]\d{4} \S+ +\d+ (coordination_|client\.h|preemption_|service\.)")
_LOG_LINE = re.compile(rb"[IWEF]\d{4} \S+ +\d+ ")
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class _Explained:
    """What stands between the native libraries and the terminal."""

    def __init__(self, sentence: Callable[[], str]):
        self._sentence = sentence
        self._terminal = os.dup(2)
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        # Python's own messages, and the progress bar, go on straight to the terminal.
        if sys.stderr is sys.__stderr__:
            sys.stderr = os.fdopen(os.dup(self._terminal), "w", buffering=1, errors="backslashreplace")
        self._pump = threading.Thread(target=self._pass_on, args=(read,), daemon=True)
        self._pump.start()
        # Kept: ctypes frees a callback that nobody refers to.
        self._handler = _Handler(self._leave)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def _leave(self, _: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._terminal, f"{self._sentence()}\n".encode(errors="replace"))
        os._exit(EXIT_CODE)

    def _pass_on(self, read: int) -> None:
        """Pass on what the native libraries say, but for the service that JAX's hosts meet at."""
        is_shown = True
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                # A message may have several lines; the stack trace belongs to its last one.
                if _LOG_LINE.match(line):
                    is_shown = not _ABOUT_HOSTS.match(line)
                if is_shown:
                    with contextlib.suppress(OSError):
                        os.write(self._terminal, line)

    def close(self) -> None:
        """Give the terminal back to the native libraries, and let them abort as they like."""
        ctypes.CDLL(None).signal(signal.SIGABRT, None)
        os.dup2(self._terminal, 2)
        self._pump.join(timeout=1)


@contextlib.contextmanager
def explaining_aborts(sentence: Callable[[], str]) -> Iterator[None]:
    """Let a native ``abort`` end this process with a sentence and exit code 1.

    Args:
      sentence: Returns it; called by whatever thread aborts, and must not fail.
    """
    explained = _Explained(sentence)
    try:
        yield
    finally:
        explained.close()
