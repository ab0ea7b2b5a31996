"""The command line: ``python -m experiments COMMAND --help``.

Exit codes: 0 done, or stopped on request with everything saved; 2 wrong usage; anything else a failed run.
"""

import difflib
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """A dataclass whose fields are the command's options, and whose ``run`` does it."""

    module: str
    name: str
    summary: str


# Commands of two words stand here as they are typed. Modules are imported when they are needed.
COMMANDS = {
    "demo": Command("experiments.demo", "Demo", "compare SGD, SVB and SVB with BBN on digits, in minutes"),
    "list": Command("experiments.listing", "List", "name the paper's figures and tables, with their costs"),
    "run": Command("experiments.runner", "Run", "run a figure or a table, or rows of it"),
    "report": Command("experiments.report", "Report", "write finished runs beside the paper's numbers"),
    "inspect": Command("experiments.inspection", "Inspect", "show the spectrum of a checkpoint or weights"),
    "train": Command("experiments.train", "Train", "train a network"),
    "data import": Command("experiments.data", "Import", "read CIFAR from an official archive or folder"),
    "data download": Command("experiments.data", "Download", "fetch an official CIFAR archive and read it"),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
      arguments: The words after ``python -m experiments``.

    Returns:
      The exit code.

    Examples:
      >>> main(["--help"])
      usage: python -m experiments COMMAND [options]
      ...
      0
    """
    if list(arguments[:1]) in (["-h"], ["--help"]):
        print(_usage())
        return 0
    for name in COMMANDS:
        words = name.split()
        if list(arguments[: len(words)]) == words:
            return _run(name, arguments[len(words) :])
    asked = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    near = difflib.get_close_matches(asked, COMMANDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    print(f"There is no command {asked!r}.{hint}\n\n{_usage()}", file=sys.stderr)
    return 2


def _run(name: str, arguments: Sequence[str]) -> int:
    import tyro

    from svb_jax.training import CheckpointError, Diverged, Interrupted
    from svb_jax.training.hosts import is_wrong_usage

    # Orbax logs every failure with a page of traceback; ours says it in a sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    command = COMMANDS[name]
    options = getattr(importlib.import_module(command.module), command.name)
    try:
        # tyro exits by itself: on --help with 0, on options that do not parse with 2.
        return tyro.cli(options, prog=f"python -m experiments {name}", args=arguments).run() or 0
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 0
    except (CheckpointError, Diverged, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        # A fault keeps its traceback.
        if not (is_wrong_usage(error) or is_wrong_usage(error, Path(__file__).parent)):
            raise
        print(error, file=sys.stderr)
        return 2


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    more = "python -m experiments COMMAND --help says more."
    return "\n".join(["usage: python -m experiments COMMAND [options]", "", *commands, "", more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
