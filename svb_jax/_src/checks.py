"""What a wrong call is told: which function, what it needs, what it got."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.core import Tracer


def known_number(caller: str, name: str, value: Any) -> float | None:
    """Return a number's value, or None while it is being traced; raise if it is no number."""
    if isinstance(value, Tracer):
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{caller} needs {name} to be a number, got {value!r}.") from error


def check_choice(caller: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{caller} needs {name} to be one of {', '.join(choices)}, got {value!r}.")


def check_epsilon(caller: str, epsilon: Any) -> None:
    """Raise unless a band's epsilon is finite and not negative."""
    check_not_negative(caller, "epsilon", epsilon)


def check_not_negative(caller: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is finite and not negative."""
    number = known_number(caller, name, value)
    if number is not None and not 0 <= number < math.inf:
        raise ValueError(f"{caller} needs a finite {name} >= 0, got {value}.")


def check_positive(caller: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is positive and finite."""
    number = known_number(caller, name, value)
    if number is not None and not 0 < number < math.inf:
        raise ValueError(f"{caller} needs a positive, finite {name}, got {value}.")


def check_band(caller: str, lower: Any, upper: Any) -> None:
    """Raise unless 0 <= lower <= upper < inf."""
    low, high = known_number(caller, "lower", lower), known_number(caller, "upper", upper)
    if low is not None and high is not None and not 0 <= low <= high < math.inf:
        raise ValueError(f"{caller} needs 0 <= lower <= upper < inf, got lower={lower} and upper={upper}.")


def check_count(caller: str, name: str, count: Any) -> None:
    """Raise unless ``count`` is a whole number, 1 or more."""
    number = known_number(caller, name, count)
    if number is not None and not (number >= 1 and number.is_integer()):
        raise ValueError(f"{caller} needs {name} to be a whole number, 1 or more, got {count}.")


def check_bands(caller: str, epsilon: Any) -> Mapping[str, Any]:
    """Return from patterns of paths to epsilons, or raise unless all that are known are sensible."""
    bands = epsilon if isinstance(epsilon, Mapping) else {"*": epsilon}
    if not bands:
        raise ValueError(f"{caller} needs epsilon for at least one pattern of paths, got {{}}.")
    for each in bands.values():
        if not callable(each):
            check_epsilon(caller, each)
    return bands


def check_inner(caller: str, inner: Any) -> None:
    """Raise unless ``inner`` is an optimizer."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"{caller} needs an optax optimizer first, then epsilon; got {inner!r} for the optimizer."
        )


def check_projection(caller: str, centre: Any, axis_name: Any, mesh: Any, shardings: Any) -> None:
    """Raise unless a band's centre, and what the work is distributed over, make sense."""
    if not callable(centre):
        check_positive(caller, "centre", centre)
    if axis_name is not None and not (mesh is None and shardings is None):
        raise ValueError(
            f"{caller} takes axis_name (inside pmap or shard_map), or mesh and shardings (under jit), "
            "not both."
        )
