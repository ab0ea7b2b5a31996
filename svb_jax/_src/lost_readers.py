"""Output that nobody can read any more: a closed terminal, a pipe without a reader, a full disk."""

import contextlib
import os
from typing import IO


def silence(stream: IO[str]) -> None:
    """Send the rest of a stream nowhere, so that it cannot fail again, at the latest when Python ends."""
    # What stands in for a terminal, as in a notebook or a test, may have no descriptor.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
