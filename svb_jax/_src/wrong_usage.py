"""Errors that are sentences for the user, told from faults."""

import traceback
from pathlib import Path


def is_wrong_usage(error: BaseException, package: Path = Path(__file__).parents[1]) -> bool:
    """Return whether an error is a package's own sentence about what it was asked for.

    A ValueError that was raised inside a library is a fault, and no wrong usage.

    Args:
      error: One that was raised.
      package: The folder of this package, or of another.
    """
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(package)
