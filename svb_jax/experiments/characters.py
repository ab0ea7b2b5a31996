"""Text to train on that every Python brings along: the help topics of ``pydoc``, as characters."""

import hashlib
from dataclasses import dataclass

import numpy as np

NEWLINE_AND_PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Characters:
    """A text as numbers, the last tenth of it for validation."""

    train: np.ndarray
    validation: np.ndarray
    sha256: str
    """Of the text: the topics change from one version of Python to the next."""

    @property
    def vocabulary(self) -> int:
        """How many different characters there can be."""
        return len(NEWLINE_AND_PRINTABLE)


def load(length: int | None = None) -> Characters:
    """Read Python's help topics, 465,000 characters in Python 3.11, in the order of their names.

    Args:
      length: Take only so many characters from the start.

    Example:
      >>> text = load(length=1000)
      >>> len(text.train), len(text.validation), text.vocabulary
      (900, 100, 96)
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:length]
    # What is not ASCII (quotation marks, dashes) becomes a question mark.
    ascii_text = text.encode("ascii", "replace")
    place = np.full(128, NEWLINE_AND_PRINTABLE.index("?"), np.int32)
    place[[ord(character) for character in NEWLINE_AND_PRINTABLE]] = np.arange(len(NEWLINE_AND_PRINTABLE))
    numbers = place[np.frombuffer(ascii_text, np.uint8)]
    end = round(len(numbers) * (1 - VALIDATION_SHARE))
    return Characters(numbers[:end], numbers[end:], hashlib.sha256(ascii_text).hexdigest())
