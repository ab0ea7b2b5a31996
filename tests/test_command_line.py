"""The command line as a user meets it: help at every level, wrong names, exit codes, plain terminals."""

import contextlib
import importlib.util
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import svb_jax
from svb_jax.experiments import demo, record, report
from svb_jax.experiments.__main__ import COMMANDS, main
from svb_jax.experiments.terminal import spell
from svb_jax.training import Diverged, Interrupted

ROOT = Path(__file__).parents[1]


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``python -m experiments`` in a process of its own."""
    command = [sys.executable, "-m", "experiments", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, check=False)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_help_names_every_command(words, capsys):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: svb COMMAND")
    for name, command in COMMANDS.items():
        assert f"  {name} " in printed
        assert command.summary in printed


@pytest.mark.parametrize("form", ["{} --help", "help {}"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, form, capsys):
    with pytest.raises(SystemExit) as ended:
        main(form.format(name).split())
    assert ended.value.code == 0
    assert f"usage: svb {name}" in capsys.readouterr().out


def test_half_a_command_gets_the_other_half(capsys):
    assert main(["data", "--help"]) == 0
    assert "svb data COMMAND" in capsys.readouterr().out
    assert main(["data"]) == 2
    printed = capsys.readouterr().err
    assert "svb data needs a command" in printed
    assert "download" in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tran"], "svb has no command 'tran'. Did you mean 'train'?"),
        (["runn", "table1"], "svb has no command 'runn'. Did you mean 'run'?"),
        (["dat", "import"], "svb has no command 'dat'. Did you mean 'data import'?"),
        (["help", "tran"], "svb has no command 'tran'. Did you mean 'train'?"),
        (["data", "dowload"], "svb data has no command 'dowload'. Did you mean 'download'?"),
        (["--seed", "1"], "svb has no command '--seed'.\n"),
        (["run"], "run needs the name of an experiment; `svb list` prints them."),
        (["run", "xyz"], "There is no experiment 'xyz'. Known: "),
        (["run", "tabel1"], "There is no experiment 'tabel1'. Did you mean 'table1'? Known: "),
    ],
)
def test_wrong_names_are_answered(words, sentence, capsys):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_an_unknown_network_is_answered_with_those_there_are(tmp_path, capsys):
    words = ["train", "--run-dir", str(tmp_path), "--dataset", "synthetic", "--image-size", "8", "--model"]
    assert main([*words, "foo"]) == 2
    printed = capsys.readouterr().err
    assert "convnet_8" in printed
    assert "Did you mean" not in printed
    assert main([*words, "convnet8"]) == 2
    assert "Did you mean 'convnet_8'" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"svb_jax {svb_jax.__version__}\n"


def test_hints_repeat_the_options_that_were_given(tmp_path, capsys):
    folders = ["--runs", str(tmp_path / "my runs"), "--results", str(tmp_path / "r")]
    assert main(["report", *folders]) == 1
    hint = f"svb run table1 --scale smoke --runs '{tmp_path}/my runs' --results {tmp_path}/r"
    assert hint in capsys.readouterr().err


def test_a_report_without_runs_hints_at_the_experiment_that_was_asked_for(tmp_path, capsys):
    folders = ["--runs", str(tmp_path), "--results", str(tmp_path)]
    assert main(["report", "table2", "figure1", *folders]) == 1
    printed = capsys.readouterr().err
    assert "finished runs of table2, figure1, got none" in printed
    assert "svb run table2 --scale smoke" in printed


@pytest.mark.parametrize("name", ["list", "report"])
def test_names_that_may_be_left_out_stand_in_brackets(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "[NAME ...]" in capsys.readouterr().out


class Stub:
    """A command that ends in an error."""

    error: BaseException

    @classmethod
    def parse(cls, arguments, prog):
        return cls()

    def run(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Interrupted("Asked to stop: step 3.", signal.SIGINT), 130, "Asked to stop: step 3.\n"),
        (Interrupted("Asked to stop: step 3.", signal.SIGTERM), 143, "Asked to stop: step 3.\n"),
        (Interrupted("Asked to stop: step 3."), 143, "Asked to stop: step 3.\n"),
        (KeyboardInterrupt(), 130, "Stopped.\n"),
        (Diverged("The loss is nan."), 1, "The loss is nan.\n"),
        (OSError(28, "No space left on device"), 1, "OSError: [Errno 28] No space left on device\n"),
        (
            MemoryError("Unable to allocate 7 EiB\nfor an array"),
            1,
            "Too little memory (Unable to allocate 7 EiB). A smaller batch or network needs less.\n",
        ),
        (MemoryError(), 1, "Too little memory. A smaller batch or network needs less.\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            1,
            "Too little memory (RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes). A smaller batch or "
            "network needs less.\n",
        ),
        (
            ModuleNotFoundError("No module named 'tyro'", name="tyro"),
            1,
            "svb demo needs tyro, which is not installed: pip install 'svb_jax[train]'\n",
        ),
    ],
)
def test_exit_codes(error, code, message, monkeypatch, capsys):
    monkeypatch.setattr(demo, "Demo", type("Failing", (Stub,), {"error": error}))
    assert main(["demo"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(("error", "code"), [(Diverged("The loss is nan."), 1), (KeyboardInterrupt(), 130)])
def test_exit_codes_do_not_depend_on_a_terminal(error, code, monkeypatch):
    monkeypatch.setattr(demo, "Demo", type("Failing", (Stub,), {"error": error}))
    # Every write to it fails; so does closing it, unless it has been silenced.
    with open("/dev/full", "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["demo"]) == code


OPEN_STREAMS = """
import os, sys
from _svb_jax_command import _open_standard_streams
_open_standard_streams()
print("lost", flush=True), print("lost", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as file:
    file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


def test_streams_that_were_closed_lead_nowhere(tmp_path):
    # Otherwise the file itself, and later a checkpoint, would be what native libraries complain to.
    command = shlex.join([sys.executable, "-c", OPEN_STREAMS, str(tmp_path / "file")])
    subprocess.run(f"{command} <&- >&- 2>&-", shell=True, cwd=ROOT, check=True)
    assert (tmp_path / "file").read_text() == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_without_the_extra_says_what_the_command_does_and_how_to_install_it(word, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["demo", word]) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"svb demo: {COMMANDS['demo'].summary}\n\n"
        "svb demo needs tyro, which is not installed: pip install 'svb_jax[train]'\n"
    )
    assert err == ""
    assert main(["demo"]) == 1
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize("is_installed", [True, False])
def test_help_says_which_commands_need_the_extra_where_it_is_missing(is_installed, monkeypatch, capsys):
    found = importlib.util.find_spec("json") if is_installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert ("All but inspect need more packages: pip install 'svb_jax[train]'" in printed) == (
        not is_installed
    )
    assert main(["data", "--help"]) == 0
    assert "inspect" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError("a fault"), RuntimeError("a fault"), TypeError("a fault")])
def test_faults_keep_their_traceback(error, monkeypatch):
    monkeypatch.setattr(demo, "Demo", type("Failing", (Stub,), {"error": error}))
    with pytest.raises(type(error), match="a fault"):
        main(["demo"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "words", [["list"], ["list", "table1"], ["list", "--costs", "table1"], ["inspect", "net.npz"], ["data"]]
)
def test_terminals_without_unicode_get_plain_letters(encoding, words, tmp_path, monkeypatch):
    np.savez(tmp_path / "net.npz", **{"conv/kernel": np.eye(3, dtype=np.float32)})
    monkeypatch.chdir(tmp_path)
    assert "?" not in printed_on_a_terminal(words, encoding, monkeypatch)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_on_a_terminal_without_unicode(name, monkeypatch):
    help_text = printed_on_a_terminal([*name.split(), "--help"], "ascii", monkeypatch)
    assert f"usage: svb {name}" in help_text
    assert "?" not in help_text


def printed_on_a_terminal(words, encoding, monkeypatch) -> str:
    screen = io.BytesIO()
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(screen, encoding, write_through=True))
    with contextlib.suppress(SystemExit):
        main(words)
    return screen.getvalue().decode(encoding)


def test_a_process_on_a_plain_terminal_spells_and_names_the_module(tmp_path):
    done = call("list", "table1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"eps of SVB" in done.stdout
    done = call("report", "--runs", str(tmp_path), "--results", str(tmp_path))
    assert b"Try: python -m experiments run table1" in done.stderr


def test_tables_on_a_plain_terminal_stay_aligned(monkeypatch):
    _, *table = printed_on_a_terminal(["list", "table1"], "ascii", monkeypatch).splitlines()
    assert "eps of BBN" in table[1]
    assert "6.10 (6.22 +/- 0.14)" in table[3]
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize("words", [["list"], ["list", "table1"], ["run", "--help"], ["--help"]])
def test_a_reader_that_leaves_early_is_no_failure(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "experiments", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_spelling_leaves_nothing_but_ascii():
    everything = "".join(path.read_text() for path in (ROOT / "svb_jax/experiments").glob("*.py"))
    spelled = spell(everything)
    assert spelled.isascii()
    assert "\\" not in spell(
        "".join({letter for letter in everything if letter != "\\"} - {*"ñ\N{COMBINING TILDE}"})
    )


def test_a_path_that_a_terminal_has_no_letters_for_keeps_its_identity(tmp_path):
    done = call("inspect", str(tmp_path / "año.npz"), PYTHONIOENCODING="ascii")
    assert done.stderr.endswith(b"/a\\xf1o.npz.\n"), done.stderr


def test_report_looks_where_run_writes():
    assert report.Report().results == record.RESULTS
