"""The command line: ``python -m benchmarks COMMAND --help``."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "projection": ("Projection", "project all matrices of whole networks, in every way there is"),
    "step": ("Step", "take training steps with plain SGD, with SVB and BBN, and as PyTorch takes them"),
    "scaling": ("Scaling", "project over more devices, at more widths and depths, and for ImageNet"),
    "loop": ("Loop", "train, and see what the input pipeline and the loop add to the bare steps"),
    "accelerators": ("Accelerators", "compile for TPUs and GPUs, and read what their compilers planned"),
    "report": ("Report", "print the tables of everything that has been measured"),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
      arguments: The words after ``python -m benchmarks``.

    Returns:
      The exit code: 0 done, 2 wrong usage.

    Example:
      >>> main(["--help"])
      usage: python -m benchmarks COMMAND [options]
      ...
      0
    """
    command, *options = arguments or ["--help"]
    if command not in COMMANDS:
        is_help = command in ("-h", "--help")
        problem = "" if is_help else f"There is no command {command!r}.\n\n"
        print(problem + _usage(), file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    import tyro

    name, _ = COMMANDS[command]
    choices = getattr(importlib.import_module(f"benchmarks.{command}"), name)
    try:
        # tyro exits by itself: on --help with 0, on options that do not parse with 2.
        tyro.cli(choices, prog=f"python -m benchmarks {command}", args=options).run()
    except ValueError as error:
        # Ours begin with this; anyone else's is a fault, and keeps its traceback.
        if not str(error).startswith(("benchmarks", "svb_jax")):
            raise
        print(error, file=sys.stderr)
        return 2
    return 0


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    more = "python -m benchmarks COMMAND --help says more."
    return "\n".join(["usage: python -m benchmarks COMMAND [options]", "", *commands, "", more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
