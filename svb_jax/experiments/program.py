"""How the command line was called, so that its hints can be typed as they are."""

import dataclasses
import shlex
import sys
from typing import Any


def program() -> str:
    """Return ``svb``, or ``python -m experiments`` where that was typed.

    Example:
      >>> program()
      'svb'
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = spec.parent if spec else ""
    return f"python -m {package}" if package in ("experiments", "svb_jax.experiments") else "svb"


def command(words: str, **options: Any) -> str:
    """Return a command as it is typed.

    Example:
      >>> command("report", runs="my runs", out=None)
      "svb report --runs 'my runs'"
    """
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in options.items() if value
    ]
    return " ".join([program(), words, *flags])


def given(options: Any, *names: str) -> dict[str, Any]:
    """Return those of a command's options that differ from their defaults, to repeat them in a hint."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value != defaults[name]}
