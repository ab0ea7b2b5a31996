"""What a wrong call is told: which function, what it needs, what it got."""

import math
from collections.abc import Sequence
from typing import Any

from jax.core import Tracer


def known_number(value: Any) -> float | None:
    """Return a number's value, or None while it is being traced."""
    return None if isinstance(value, Tracer) else float(value)


def check_choice(caller: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{caller} needs {name} to be one of {', '.join(choices)}, got {value!r}.")


def check_epsilon(caller: str, epsilon: Any) -> None:
    """Raise unless a band's epsilon is finite and not negative."""
    number = known_number(epsilon)
    if number is not None and not 0 <= number < math.inf:
        raise ValueError(f"{caller} needs a finite epsilon >= 0, got {epsilon}.")


def check_positive(caller: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is positive and finite."""
    number = known_number(value)
    if number is not None and not 0 < number < math.inf:
        raise ValueError(f"{caller} needs a positive, finite {name}, got {value}.")


def check_band(caller: str, lower: Any, upper: Any) -> None:
    """Raise unless 0 <= lower <= upper < inf."""
    low, high = known_number(lower), known_number(upper)
    if low is not None and high is not None and not 0 <= low <= high < math.inf:
        raise ValueError(f"{caller} needs 0 <= lower <= upper < inf, got lower={lower} and upper={upper}.")


def check_count(caller: str, name: str, count: Any) -> None:
    """Raise unless ``count`` is a whole number, 1 or more."""
    number = known_number(count)
    if number is not None and not (number >= 1 and number.is_integer()):
        raise ValueError(f"{caller} needs {name} to be a whole number, 1 or more, got {count}.")


def check_params(caller: str, params: Any) -> None:
    """Raise if an update was asked for without the parameters."""
    if params is None:
        raise ValueError(f"{caller} needs the parameters: call tx.update(grads, state, params).")
