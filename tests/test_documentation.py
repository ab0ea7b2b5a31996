"""README and the guides do what they say: code runs, output is real, and every command runs or is exempt.

The cells of notebooks are run by the build of the site.
"""

import doctest
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tyro

import benchmarks.__main__
import svb_jax
from svb_jax.experiments.__main__ import COMMANDS, _parse, main
from svb_jax.training import importing
from tests.test_experiments_inspect import safetensors
from tests.tiny_cifar import TINY10, write_tiny_cifar

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "experiments/results/README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]

# Commands that no test runs as they are printed, and what vouches for them instead.
EXEMPT = {
    r"pip install |python -m venv |\S+/bin/pip |uv |pre-commit ": "it changes the environment",
    r"ruff |pyright$|pytest|sphinx-build |bash \.ci/": "it is the check itself; .ci/run calls it",
    r"svb demo$": "two minutes; .ci/run calls it",
    r"svb data download ": "needs the network; tests/test_data_import.py stands in for it",
    r"svb data import --name cifar100": "needs it; tests/test_data_import.py makes a small one",
    r"tfds build imagenet2012 ": "needs ImageNet, by hand, and TensorFlow",
    r"svb run (?!.*--scale smoke)": "minutes to weeks; tests/test_experiments_run.py runs all as smoke tests",
    r"svb train .*--(cluster|coordinator)": "needs several hosts; tests/test_hosts.py starts two processes",
    r"svb compile ": "minutes in the TPU's compiler; tests/test_compiling.py compiles a smaller step",
    r"python -m benchmarks (?!report)": "minutes to hours; tests/test_benchmarks.py measures small networks",
    r"python -m tests\.faults": "minutes to hours; tests/test_faults.py attacks a few times",
}
# What a Python block says if it reads CIFAR-10; it gets a few images.
NEEDS_DATA = "tfds.data_source"
# Longer lines of a drawing would be cut at the right edge of the site's text.
WIDEST_DRAWING = 90


class Block(NamedTuple):
    """Fenced text on a page, the lines before it counted for tracebacks."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    content = page.read_text()
    fences = re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", content, flags=re.MULTILINE)
    return [Block(page, content[: m.start(2)].count("\n"), m[1].strip(), m[2]) for m in fences]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def pages_with(is_wanted: Callable[[Block], bool]):
    pages = dict.fromkeys(block.page for block in BLOCKS if is_wanted(block))
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def test_every_block_is_of_a_kind_that_something_checks():
    checked = {"python", "console", "sh", "{code-cell} ipython3"}
    markup = {"{toctree}", "{eval-rst}", "{include} ../CHANGELOG.md", "{include} ../SECURITY.md"}
    others = [block for block in BLOCKS if block.language not in checked | markup]
    # Text proves nothing: it is for what is neither code nor output.
    assert [(block.page.name, block.language) for block in others] == [("architecture.md", "text")]
    assert max(len(line) for block in others for line in block.text.splitlines()) <= WIDEST_DRAWING


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_hidden_from_these_tests(page):
    fences = re.findall(r"^[ >]*(?:```|~~~)", page.read_text(), flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", pages_with(lambda block: block.language in ("python", "console")))
def test_python_and_console_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    if NEEDS_DATA in page.read_text():
        monkeypatch.setitem(importing.LAYOUTS, "cifar10", TINY10)
        write_tiny_cifar(TINY10, tmp_path / TINY10.folder)
        importing.import_archive("cifar10", tmp_path, tmp_path / "data")
    for block in blocks(page):
        if block.language == "console":
            check_console(block, capsys)
        elif block.language == "python" and not block.text.startswith(">>>"):
            # Blank lines in front, so that a traceback has the page's own line numbers.
            source = "\n" * block.line + block.text
            exec(compile(source, str(page), "exec"), {"__name__": "page"})


def check_console(block: Block, capsys) -> None:
    """Run the commands after ``$`` in turn, and compare what they print with what the page shows."""
    for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", block.text, flags=re.MULTILINE):
        capsys.readouterr()
        assert run(command) == 0
        assert capsys.readouterr().out == shown, f"{block.page}, below line {block.line}: {command}"


@pytest.mark.parametrize("page", pages_with(lambda block: block.text.startswith(">>> ")))
def test_examples_with_output_are_doctests(page):
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


def test_modules_with_an_api_page_need_no_import_of_their_own():
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    modules = sorted(set(re.findall(r"currentmodule:: (svb_jax\.\w+)", pages)))
    assert len(modules) == 4
    for module in modules:
        subprocess.run([sys.executable, "-c", f"import svb_jax; {module}.__all__"], check=True)


@pytest.mark.parametrize(
    "module",
    ["svb_jax", "svb_jax.ahead_of_time", "svb_jax.linen", "svb_jax.models", "svb_jax.training"],
)
def test_every_public_name_has_an_example_that_runs(module):
    code = "".join(block.text for block in BLOCKS if block.language in ("python", "{code-cell} ipython3"))
    public = importlib.import_module(module)
    without = [
        name
        for name in public.__all__
        # A doctest of its own, or a block of a page.
        if ">>> " not in (inspect.getdoc(getattr(public, name)) or "") and not re.search(rf"\b{name}\b", code)
    ]
    assert without == []


def test_the_loop_of_the_guide_bounds_its_network():
    cells = [
        block.text
        for block in blocks(ROOT / "docs/notebooks/your_network.md")
        if "code-cell" in block.language
    ]
    (last,) = [number for number, text in enumerate(cells) if "apply_gradients" in text]
    names = {"__name__": "guide"}
    exec(compile("\n".join(cells[: last + 1]), "your_network.md", "exec"), names)
    values = np.concatenate([np.ravel(s) for s in svb_jax.singular_values(names["state"].params).values()])
    assert 1 / 1.5 - 5e-6 < values.min() < values.max() < 1.5 + 5e-6
    assert int(svb_jax.projection_stats(names["state"].opt_state)["bbn/step"]) == 4


def commands() -> list[str]:
    """Every command of a shell block, continued lines joined, each once."""
    lines = [
        line
        for block in BLOCKS
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    parts = [part.split("#")[0].strip() for line in lines for part in line.split(" && ")]
    typed = [" ".join(part.replace("python -m experiments", "svb").split()) for part in parts]
    return sorted({part for part in typed if part})


def is_exempt(command: str) -> bool:
    return any(re.match(pattern, command) for pattern in EXEMPT)


@pytest.mark.parametrize("pattern", EXEMPT)
def test_no_exemption_outlives_its_command(pattern):
    assert any(re.match(pattern, command) for command in commands())


def run(command: str) -> int:
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "benchmarks"]:
        return benchmarks.__main__.main(words[3:])
    assert words[0] == "svb", f"neither run nor exempt: {command}"
    return main(words[1:])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with what the commands read: someone's weights, records of runs, other environments."""
    folder = tmp_path_factory.mktemp("workspace")
    kernel = np.eye(8, 4, dtype=np.float32)
    (folder / "model.safetensors").write_bytes(safetensors({"head.weight": kernel}, {"head.weight": "F32"}))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoints/1000", {"head": {"kernel": jnp.asarray(kernel)}})
    for name in ("table1", "transformer"):
        shutil.copytree(ROOT / "experiments/results" / name, folder / "experiments/results" / name)
    for name in ("torch-env", "tpu-env", "gpu-env"):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin/python").symlink_to(sys.executable)
    (folder / "docs").mkdir()
    write_tiny_cifar(TINY10, folder / TINY10.folder)
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(folder / TINY10.folder, TINY10.folder)
    return folder


@pytest.mark.parametrize("command", [command for command in commands() if not is_exempt(command)])
def test_commands_run(command, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(importing.LAYOUTS, "cifar10", TINY10)
    assert run(command) == 0


@pytest.mark.parametrize(
    "command", [c for c in commands() if is_exempt(c) and re.match(r"svb |python -m (?!venv)", c)]
)
def test_commands_that_are_exempt_parse(command, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    words = shlex.split(command.replace(" ...", ""))
    if words[0] == "svb":
        (name,) = [name for name in COMMANDS if words[1:][: len(name.split())] == name.split()]
        assert _parse(name, words[1 + len(name.split()) :]) is not None
    elif words[:3] == ["python", "-m", "benchmarks"]:
        options, _ = benchmarks.__main__.COMMANDS[words[3]]
        module = __import__(f"benchmarks.{words[3]}", fromlist=[options])
        assert tyro.cli(getattr(module, options), args=words[4:]) is not None
    else:
        flags = {word for word in words if word.startswith("--")}
        asked = subprocess.run([sys.executable, *words[1:3], "--help"], check=True, capture_output=True)
        assert flags <= {*re.findall(r"--\w+", asked.stdout.decode())}


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# Sphinx follows the links of the site's own pages.
@pytest.mark.parametrize("page", PAGES[:4], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_outside_the_site_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in targets:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in map(slug, headings), f"{path}#{anchor}"
