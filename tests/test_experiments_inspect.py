"""The spectrum of anyone's weights: every format, every layout, and files that are not what they say."""

import json
import pickle
import struct

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from svb_jax.experiments import demo, record, report
from svb_jax.experiments.__main__ import main
from svb_jax.experiments.weights import UnreadableWeightsError, load_weights, nested
from svb_jax.training.saving import Checkpoints
from svb_jax.training.state import TrainState
from tests.test_report import write_run

# Of the squares less one, 8, 0, -0.19 and -0.99: a norm of 8.0633.
ROW = "1 4 x 18 0.1000 3.0000 30.00 50.0% 8.0633"


@pytest.fixture
def kernel():
    """Outputs 4, inputs 2 of 3 x 3, with singular values 3, 1, 0.9 and 0.1."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (18, 4))
    return (left[:, :4] * [3.0, 1.0, 0.9, 0.1] @ right).reshape(3, 3, 2, 4).astype(np.float32)


def inspect(capsys, *words) -> list[str]:
    """Return the lines of the table, without its two of heading, by single spaces."""
    assert main(["inspect", *map(str, words)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[2:]]


def safetensors(arrays: dict[str, np.ndarray], types: dict[str, str]) -> bytes:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": types[name], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_npz(kernel, tmp_path, capsys):
    np.savez(tmp_path / "net.npz", **{"conv/kernel": kernel, "conv/bias": np.zeros(4), "step": np.array(3)})
    assert inspect(capsys, tmp_path / "net.npz") == [f"conv/kernel {ROW}"]
    assert list(tmp_path.iterdir()) == [tmp_path / "net.npz"]


def test_safetensors_of_another_framework(kernel, tmp_path, capsys):
    half = np.eye(4, dtype=jnp.bfloat16)
    arrays = {"conv.weight": np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)), "head.weight": half}
    types = {"conv.weight": "F32", "head.weight": "BF16"}
    (tmp_path / "net.safetensors").write_bytes(safetensors(arrays, types))
    lines = inspect(capsys, tmp_path / "net.safetensors", "--layout", "oihw")
    assert lines == [f"conv/weight {ROW}", "head/weight 1 4 x 4 1.0000 1.0000 1.00 100.0% 0.0000"]


def test_flax_msgpack(kernel, tmp_path, capsys):
    variables = {"params": {"conv": {"kernel": kernel}}, "batch_stats": {"norm": {"var": np.ones(4)}}}
    (tmp_path / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(variables))
    assert inspect(capsys, tmp_path / "flax_model.msgpack") == [f"conv/kernel {ROW}"]


@pytest.mark.parametrize("is_managed", [False, True])
def test_orbax_checkpoint_of_a_plain_loop(is_managed, kernel, tmp_path, capsys):
    params = {"conv": {"kernel": jnp.asarray(kernel)}}
    state = {"params": params, "opt_state": [{"mu": {"params": params}}], "step": 3}
    folder = tmp_path / "saved"
    if is_managed:
        with ocp.CheckpointManager(folder) as manager:
            manager.save(7, args=ocp.args.StandardSave(state))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, state)
    assert inspect(capsys, folder) == [f"conv/kernel {ROW}"]


def test_checkpoint_and_run_folder_hold_the_same_weights(kernel, tmp_path, capsys):
    params = {"conv": {"kernel": kernel}}
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        state = TrainState(step=np.int32(7), params=params, batch_stats={}, opt_state=(), totals=())
        checkpoints.save(state, seconds=1.0, test_error=50.0)
        checkpoints.wait()
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "7"):
        assert nested(load_weights(path))["conv"]["kernel"].tolist() == kernel.tolist()
        assert inspect(capsys, path) == [f"conv/kernel {ROW}"]


def test_layouts_and_patterns_choose_what_is_read(tmp_path, capsys):
    weights = {"blocks/kernel": np.stack([np.eye(3), 2 * np.eye(3)]), "query/kernel": np.ones((4, 2, 2))}
    np.savez(tmp_path / "net.npz", **weights, table=np.eye(2))
    path = tmp_path / "net.npz"
    assert main(["inspect", str(path)]) == 2
    assert "--layout" in capsys.readouterr().err
    (line,) = inspect(capsys, path, "--only", "blocks/*", "--scan", "blocks")
    assert line.startswith("blocks/kernel 2 3 x 3 1.0000 2.0000")
    np.savez(tmp_path / "stack.npz", **{"blocks/query/kernel": np.ones((3, 4, 2, 2))})
    (line,) = inspect(capsys, tmp_path / "stack.npz", "--scan", "blocks", "--layout", "attention")
    assert line.startswith("blocks/query/kernel 3 4 x 4")
    (line,) = inspect(capsys, path, "--only", "query/*", "--layout", "attention")
    assert line.startswith("query/kernel 1 4 x 4")
    (line,) = inspect(capsys, path, "--layout", "every-matrix", "--skip", "*/kernel")
    assert line.startswith("table 1 2 x 2")
    assert main(["inspect", str(path), "--only", "nothing"]) == 2
    assert "blocks/kernel" in capsys.readouterr().err


def test_a_plot_is_drawn_on_request_and_replaced_on_request(kernel, tmp_path, capsys):
    np.savez(tmp_path / "net.npz", **{"conv/kernel": kernel})
    words = ["inspect", str(tmp_path / "net.npz"), "--plot", str(tmp_path / "new" / "net.png")]
    assert main([*words, "--kind", "histogram"]) == 0
    assert (tmp_path / "new" / "net.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "new" / "net.png") in capsys.readouterr().out
    (tmp_path / "new" / "net.png").write_bytes(b"mine")
    assert main(words) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "new" / "net.png").read_bytes() == b"mine"
    assert main([*words, "--overwrite"]) == 0
    assert (tmp_path / "new" / "net.png").read_bytes() != b"mine"


class Trap:
    """Would create a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def hostile_files(folder):
    good = safetensors({"w": np.eye(2, dtype=np.float32)}, {"w": "F32"})
    trap = np.array([Trap(folder / "sprung")], dtype=object)
    np.savez(folder / "pickled.npz", trap, allow_pickle=True)
    np.save(folder / "one.npy", np.eye(2))
    (folder / "one.npy").rename(folder / "bare.npz")
    contents = {
        "empty.npz": b"",
        "text.npz": b"these are no weights",
        "pickle.npz": pickle.dumps(Trap(folder / "sprung")),
        "cut.npz": (folder / "pickled.npz").read_bytes()[:40],
        "empty.safetensors": b"",
        "huge.safetensors": struct.pack("<Q", 2**62) + b"{}",
        "cut.safetensors": good[:-3],
        "lying.safetensors": good.replace(b"[2, 2]", b"[9, 9]"),
        "negative.safetensors": good.replace(b"[0, 16]", b"[-8, 8]"),
        "odd.safetensors": good.replace(b'"F32"', b'"F99"'),
        "list.safetensors": struct.pack("<Q", 2) + b"[]",
        "text.msgpack": b"\xc1 these are no weights",
        "both.npz": None,
    }
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_bytes(content)
    np.savez(folder / "both.npz", **{"a": np.eye(2), "a/w": np.eye(2)})
    (folder / "orbax").mkdir()
    (folder / "orbax" / "_METADATA").write_text("{")
    (folder / "weights.bin").write_bytes(b"?")
    return [*contents, "pickled.npz", "bare.npz", "orbax", "weights.bin", "missing.npz"]


def test_files_that_are_not_what_they_say_get_a_sentence(tmp_path, capsys):
    for name in hostile_files(tmp_path):
        assert main(["inspect", str(tmp_path / name)]) in (1, 2), name
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), f"{name}: {out}{err}"
        assert name in err or name == "both.npz", err
        assert "Traceback" not in err
    assert not (tmp_path / "sprung").exists()


def test_weights_that_are_no_tree_are_refused():
    for paths in (("a", "a/b"), ("a/b", "a")):
        with pytest.raises(UnreadableWeightsError):
            nested(dict.fromkeys(paths, np.eye(2)))


def test_demo_compares_three_methods_that_differ_in_nothing_else():
    assert [demo.EXPERIMENT.method(row) for row in demo.ROWS] == ["sgd", "svb", "svb+bbn"]
    assert [demo.EXPERIMENT.baseline(row) for row in demo.ROWS] == [None, "sgd", "sgd"]
    assert {config.dataset for config in demo.ROWS.values()} == {"digits"}


@pytest.mark.slow
def test_demo_trains_compares_and_writes_one_page(tmp_path, capsys):
    demo.Demo(runs=tmp_path).run()
    printed = capsys.readouterr().out
    assert "svb+bbn" in printed
    page = tmp_path / "demo" / "report.html"
    assert str(page) in printed
    assert page.read_text().count("<svg") == 3


def test_the_demo_prints_its_comparison(tmp_path, capsys):
    for row in demo.ROWS:
        write_run(tmp_path, demo.EXPERIMENT, row, 0, 10.0, scale="full")
    [chapter] = report.chapters_of([demo.EXPERIMENT], record.collect(tmp_path / "none", tmp_path))
    demo.print_comparison(chapter.runs)
    assert capsys.readouterr().out.count("10.00") >= 3
