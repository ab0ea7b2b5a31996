"""What a mistyped name may have meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, or nothing if none is near.

    Example:
      >>> did_you_mean("tabel1", ["table1", "figure1"])
      " Did you mean 'table1'?"
      >>> did_you_mean("foo", ["table1", "figure1"])
      ''
    """
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the few that are most like ``name``, for a message."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0)
    return f"the nearest: {', '.join(map(repr, found))}" if found else "there is none at all"
