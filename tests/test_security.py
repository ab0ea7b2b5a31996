"""What the package must never do with what it reads."""

import ast
import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import svb_jax
from svb_jax._src import npz
from svb_jax.experiments import weights
from svb_jax.experiments.__main__ import main
from svb_jax.experiments.weights import load_weights

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


def declare_terabytes(path):
    header = io.BytesIO()
    fields = {"descr": "<f4", "fortran_order": False, "shape": (1_000_000, 1_000_000)}
    np.lib.format.write_array_header_1_0(header, fields)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kernel.npy", header.getvalue())


def compress_a_bomb(path):
    np.savez_compressed(path, kernel=np.zeros((1000, 1000), np.float32))


def name_arrays_alike(path):
    np.savez(path, **{"a/kernel": np.eye(2), "a.kernel": np.eye(3)})


def write_safetensors(path, header):
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))


def entry(start, end):
    return json.dumps({"dtype": "F32", "shape": [2, 2], "data_offsets": [start, end]})


def repeat_a_name(path):
    write_safetensors(path, f'{{"w": {entry(0, 16)}, "w": {entry(16, 32)}}}')


def share_bytes(path):
    write_safetensors(path, f'{{"v": {entry(0, 16)}, "w": {entry(8, 24)}}}')


def link_to_an_endless_device(path):
    path.symlink_to("/dev/zero")


def hide_a_pipe(path):
    path.mkdir()
    (path / "_METADATA").write_text("{}")
    os.mkfifo(path / "manifest.ocdbt")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (
            declare_terabytes,
            "x.npz",
            "kernel.npy declares (1000000, 1000000) of float32, which it cannot hold",
        ),
        (compress_a_bomb, "x.npz", "it declares 4,000,128 bytes in a file of "),
        (name_arrays_alike, "x.npz", "there are two arrays called 'a/kernel'"),
        (os.mkfifo, "x.npz", "Not a regular file"),
        (os.mkfifo, "x.msgpack", "Not a regular file"),
        (link_to_an_endless_device, "x.safetensors", "Not a regular file"),
        (repeat_a_name, "x.safetensors", "it has 'w' twice"),
        (share_bytes, "x.safetensors", "'v' and 'w' share bytes"),
        (hide_a_pipe, "orbax", "Not a regular file"),
    ],
)
def test_weights_that_are_made_to_harm_get_a_sentence(make, name, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(npz, "_UNSUSPICIOUS_BYTES", 1 << 20)
    make(tmp_path / name)
    assert main(["inspect", str(tmp_path / name)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{tmp_path / name} cannot be read: " in err
    assert reason in err
    assert "Errno" not in err


def test_weights_beyond_the_memory_get_a_sentence(tmp_path, monkeypatch, capsys):
    def read(path):
        raise MemoryError

    monkeypatch.setitem(weights.READERS, ".npz", read)
    np.savez(tmp_path / "x.npz", kernel=np.eye(2))
    assert main(["inspect", str(tmp_path / "x.npz")]) == 1
    assert capsys.readouterr().err.endswith("cannot be read: this machine has too little memory.\n")


def test_names_do_not_command_the_terminal(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **{"\x1b]0;pwned\x07/kernel": np.eye(2, dtype=np.float32)})
    assert main(["inspect", str(tmp_path / "x.npz")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b]0;pwned\\x07/kernel" in printed


def test_the_parameters_of_two_networks_keep_their_paths(tmp_path):
    np.savez(tmp_path / "x.npz", **{"net/params/kernel": np.eye(2), "average/params/kernel": np.eye(2)})
    assert set(load_weights(tmp_path / "x.npz")) == {"net/params/kernel", "average/params/kernel"}
