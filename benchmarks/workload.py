"""Work that is prepared once and done many times."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def nothing() -> None:
    """Return None: what work that needs no fresh start begins with."""


@dataclass(frozen=True)
class Workload:
    """Something to be timed.

    Attributes:
      run: Does the work once, on what ``fresh`` returned, and returns when it is finished.
      fresh: Makes what ``run`` uses up, outside the timed part, so that every call does the same work.
      facts: What was learnt while preparing, as plain numbers and strings.
      kernels: From ``run``'s result to the projected kernels by name, where that is what the work gives.
      seconds: From ``run``'s result to the time that counts, where that is not all of the call's.
      is_warm: Whether preparing has run it already, so that a first call shows no new memory.
    """

    run: Callable[[Any], Any]
    fresh: Callable[[], Any] = nothing
    facts: dict[str, Any] = field(default_factory=dict)
    kernels: Callable[[Any], dict[str, np.ndarray]] | None = None
    seconds: Callable[[Any], float] | None = None
    is_warm: bool = False


Task = dict[str, Any]
"""What a row is prepared from: plain numbers, strings and the paths of files."""
