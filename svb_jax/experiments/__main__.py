"""The command line: ``svb COMMAND --help``, or ``python -m experiments`` in a checkout.

Exit codes: 0 done; 1 a failed run, or an extra that is not installed; 2 wrong usage; 130 stopped by Ctrl-C,
143 by SIGTERM and 129 by SIGHUP, with the state saved, so that the same command continues.
"""

import importlib.util
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import svb_jax
from svb_jax._src.extras import needs_extra
from svb_jax._src.lost_readers import silence
from svb_jax._src.suggestions import did_you_mean
from svb_jax._src.wrong_usage import is_wrong_usage
from svb_jax.experiments.program import program
from svb_jax.experiments.terminal import make_printable


class Command(NamedTuple):
    """A dataclass whose fields are the command's options, and whose ``run`` does it."""

    module: str
    name: str
    summary: str


# Commands of two words stand here as they are typed. Modules are imported when they are needed.
COMMANDS = {
    "demo": Command("demo", "Demo", "compare SGD, SVB and SVB+BBN on handwritten digits, in two minutes"),
    "inspect": Command(
        "inspection", "Inspect", "print the singular values of a checkpoint or a file of weights"
    ),
    "train": Command("train", "Train", "train a network"),
    "data import": Command("data", "Import", "import CIFAR from an official archive or folder"),
    "data download": Command("data", "Download", "download an official CIFAR archive and import it"),
    "list": Command("listing", "List", "list the paper's figures and tables, and what they cost"),
    "run": Command("runner", "Run", "run a figure, a table, or single rows of one"),
    "compile": Command("compiling", "Compile", "compile a row for an accelerator that you do not have"),
    "report": Command("report", "Report", "compare finished runs with the paper's numbers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      arguments: The words after ``svb``; those of this process if not given.

    Returns:
      The exit code.

    Example:
      >>> main(["data", "--help"])
      usage: svb data COMMAND [options]
      <BLANKLINE>
        import    import CIFAR from an official archive or folder
        download  download an official CIFAR archive and import it
      <BLANKLINE>
      svb data COMMAND --help lists the options of a command.
      0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    make_printable()
    try:
        for name in COMMANDS:
            if words[: len(name.split())] == name.split():
                return _run(name, words[len(name.split()) :])
        return _help(words)
    except BrokenPipeError:
        # `svb list | head` has read enough. Python would complain once more when it closes the output.
        silence(sys.stdout)
        return 0


def _run(name: str, arguments: Sequence[str]) -> int:
    # Orbax logs every failure with a page of traceback; ours says it in a sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        with needs_extra(f"{program()} {name}", "train"):
            return _parse(name, arguments).run() or 0
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as stopped:
        _complain(str(stopped) if stopped.args else "Stopped.")
        return 128 + getattr(stopped, "signal", signal.SIGINT)
    except Exception as error:
        if not (is_wrong_usage(error) or _is_failure(error) or _is_out_of_memory(error)):
            # A fault keeps its traceback.
            raise
        if isinstance(error, ModuleNotFoundError) and {"-h", "--help"} & {*arguments}:
            # The options are listed by a package of the extra; what the command is for needs none.
            print(f"{program()} {name}: {COMMANDS[name].summary}\n\n{error}")
            return 0
        _complain(_sentence(error))
        return 2 if is_wrong_usage(error) else 1


def _complain(sentence: str) -> None:
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        # Nobody can read it: the exit code still tells.
        silence(sys.stderr)


def _sentence(error: Exception) -> str:
    if _is_out_of_memory(error):
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        return f"Too little memory{f' ({reason})' if reason else ''}. A smaller batch or network needs less."
    # The system's errors are half a sentence: "[Errno 28] No space left on device".
    is_terse = isinstance(error, OSError) and error.errno is not None
    return f"{type(error).__name__}: {error}" if is_terse else str(error)


def _is_out_of_memory(error: Exception) -> bool:
    # JAX raises errors of two types, and says which kind they are of in the text alone.
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _parse(name: str, arguments: Sequence[str]) -> Any:
    """Return the command's options, filled in; ends the process for --help and for what does not parse."""
    command = COMMANDS[name]
    options = getattr(importlib.import_module(f"svb_jax.experiments.{command.module}"), command.name)
    prog = f"{program()} {name}"
    if hasattr(options, "parse"):
        return options.parse(arguments, prog)
    import tyro

    return tyro.cli(options, prog=prog, args=arguments)


def _is_failure(error: Exception) -> bool:
    """Return whether a run failed for a reason that its message tells: a disk, the network, the numbers."""
    is_own = type(error).__module__.startswith("svb_jax.")
    return isinstance(error, OSError | ModuleNotFoundError) or (is_own and isinstance(error, RuntimeError))


def _help(words: Sequence[str]) -> int:
    """Answer what is no command: a request for help, half a command, or a name that is mistyped."""
    if words[:1] == ["--version"]:
        print(f"svb_jax {svb_jax.__version__}")
        return 0
    group = words[0] if words and any(name.startswith(f"{words[0]} ") for name in COMMANDS) else ""
    prefix, rest = f"{program()} {group}".strip(), words[1:] if group else words
    known = {
        name.removeprefix(group).strip(): command.summary
        for name, command in COMMANDS.items()
        if name.startswith(group)
    }
    usage = _usage(prefix, known)
    if rest[:1] in (["-h"], ["--help"]) or not words:
        print(usage)
        return 0
    if not rest:
        problem = f"{prefix} needs a command."
    else:
        hint = did_you_mean(rest[0], known) or did_you_mean(" ".join(rest[:2]), known)
        problem = f"{prefix} has no command {rest[0]!r}.{hint}"
    print(f"{problem}\n\n{usage}", file=sys.stderr)
    return 2


def _usage(prefix: str, summaries: Mapping[str, str]) -> str:
    width = max(map(len, summaries))
    commands = [f"  {name:{width}}  {summary}" for name, summary in summaries.items()]
    more = [f"{prefix} COMMAND --help lists the options of a command."]
    if "inspect" in summaries and importlib.util.find_spec("tyro") is None:
        more += ["All but inspect need more packages: pip install 'svb_jax[train]'"]
    return "\n".join([f"usage: {prefix} COMMAND [options]", "", *commands, "", *more])


if __name__ == "__main__":
    sys.exit(main())
