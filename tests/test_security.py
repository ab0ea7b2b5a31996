"""What the package must never do with what it reads."""

import ast
from pathlib import Path

import svb_jax

SOURCES = sorted(Path(svb_jax.__file__).parent.rglob("*.py"))
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def _offences(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module] if (node.module or "").split(".")[0] in RUNS_WHAT_IT_READS else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from [node.func.id] if node.func.id in ("eval", "exec") else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield from [] if getattr(node.value, "value", True) is False else ["allow_pickle"]
        elif isinstance(node, ast.Attribute) and node.attr in ("extractall", "extract"):
            yield node.attr


def test_offences_are_seen():
    code = (
        "import pickle\nfrom marshal import loads\neval('1')\nnp.load(f, allow_pickle=True)\ntar.extractall()"
    )
    assert set(_offences(ast.parse(code))) == {"pickle", "marshal", "eval", "extractall", "allow_pickle"}
    assert list(_offences(ast.parse("np.load(f, allow_pickle=False)"))) == []


def test_nothing_that_is_read_can_run():
    assert len(SOURCES) > 50
    found = {source.name: list(_offences(ast.parse(source.read_text()))) for source in SOURCES}
    assert {name: offences for name, offences in found.items() if offences} == {}
