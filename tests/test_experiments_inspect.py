"""The spectrum of anyone's weights: every format, every layout, and files that are not what they say."""

import json
import pickle
import struct
import sys

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

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


def test_float64_is_read_as_it_is(tmp_path, capsys):
    rotation = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    # Rounding to float32 would lose the smallest singular value.
    np.savez(tmp_path / "net.npz", **{"head/kernel": rotation * [1, 1, 1, 1e-9] @ rotation})
    (line,) = inspect(capsys, tmp_path / "net.npz")
    assert "1.0e+09" in line


def test_safetensors_of_another_framework(kernel, tmp_path, capsys):
    half = np.eye(4, dtype=jnp.bfloat16)
    arrays = {"conv.weight": np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)), "head.weight": half}
    types = {"conv.weight": "F32", "head.weight": "BF16"}
    (tmp_path / "net.safetensors").write_bytes(safetensors(arrays, types))
    lines = inspect(capsys, tmp_path / "net.safetensors", "--layout", "oihw")
    assert lines == [f"conv/weight {ROW}", "head/weight 1 4 x 4 1.0000 1.0000 1.00 100.0% 0.0000"]


def test_safetensors_leave_quantised_entries_out(tmp_path, capsys):
    eye = np.eye(4, dtype=np.float32)
    arrays = {"head.weight": eye, "packed.weight": eye.astype(np.uint32), "small.weight": eye.astype(np.int8)}
    types = {"head.weight": "F32", "packed.weight": "U32", "small.weight": "F8_E4M3"}
    (tmp_path / "net.safetensors").write_bytes(safetensors(arrays, types))
    assert [line.split()[0] for line in inspect(capsys, tmp_path / "net.safetensors")] == ["head/weight"]
    (tmp_path / "packed.safetensors").write_bytes(safetensors({"w": arrays["packed.weight"]}, {"w": "U32"}))
    assert main(["inspect", str(tmp_path / "packed.safetensors")]) == 2
    assert "needs floating-point weights of 16 bits or more, got none" in capsys.readouterr().err


def test_a_folder_of_safetensors_is_one_network(tmp_path, capsys):
    eye = np.eye(3, dtype=np.float32)
    for number, name in enumerate(("first.weight", "last.weight"), 1):
        shard = tmp_path / f"model-0000{number}-of-00002.safetensors"
        shard.write_bytes(safetensors({name: number * eye}, {name: "F32"}))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    lines = inspect(capsys, tmp_path)
    assert [line.split()[0] for line in lines] == ["first/weight", "last/weight"]
    assert "3 x 3 2.0000 2.0000" in lines[1]
    (tmp_path / "consolidated.safetensors").write_bytes(
        safetensors({"last.weight": eye}, {"last.weight": "F32"})
    )
    assert main(["inspect", str(tmp_path)]) == 1
    assert "'last.weight' in two files" in capsys.readouterr().err


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


def test_orbax_checkpoint_of_nnx(kernel, tmp_path, capsys):
    model = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(kernel)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"conv": nnx.state(model), "optimizer": nnx.state(optimizer)})
    assert inspect(capsys, tmp_path / "saved") == [f"conv/kernel {ROW}"]


def test_a_leaf_that_is_called_value_keeps_its_name(tmp_path, capsys):
    np.savez(tmp_path / "net.npz", **{"heads/query": np.eye(2), "heads/value": np.eye(2)})
    lines = inspect(capsys, tmp_path / "net.npz", "--layout", "every-matrix")
    assert [line.split()[0] for line in lines] == ["heads/query", "heads/value"]


def save_items(folder, **items) -> None:
    args = {
        name: ocp.args.StandardSave(item) if name != "notes" else ocp.args.JsonSave(item)
        for name, item in items.items()
    }
    with ocp.CheckpointManager(folder) as manager:
        manager.save(7, args=ocp.args.Composite(**args))


def test_orbax_items_of_any_name(kernel, tmp_path, capsys, monkeypatch):
    state = {"conv": {"kernel": jnp.asarray(kernel)}}
    save_items(tmp_path / "one", train_state=state, notes={"by": "us"})
    assert inspect(capsys, tmp_path / "one") == [f"conv/kernel {ROW}"]
    save_items(tmp_path / "usual", ema=state, params={"other": state["conv"]})
    assert inspect(capsys, tmp_path / "usual") == [f"other/kernel {ROW}"]
    save_items(tmp_path / "two", ema=state, train_state=state)
    # Short paths, since long messages are cut.
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "two"]) == 1
    assert "several checkpoints; name one of them: two/7/ema, two/7/train_state" in capsys.readouterr().err
    assert inspect(capsys, tmp_path / "two" / "7" / "train_state") == [f"conv/kernel {ROW}"]


def test_items_called_as_ours_are_not_taken_for_ours(kernel, tmp_path, capsys):
    args = {
        "state": ocp.args.StandardSave({"conv": {"kernel": kernel}}),
        "meta": ocp.args.JsonSave({"epoch": 1}),
    }
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(7, args=ocp.args.Composite(**args))
    assert inspect(capsys, tmp_path / "saved") == [f"conv/kernel {ROW}"]


def test_a_folder_of_something_else_is_answered_with_what_it_holds(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path} cannot be read: it is empty.\n"
    (tmp_path / "model.bin").write_bytes(b"?")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no Orbax checkpoint and no run, but model.bin" in capsys.readouterr().err


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
    (line,) = inspect(capsys, "--skip", "query", "--skip", "table", "--scan", "blocks", path)
    assert line.startswith("blocks/kernel 2 3 x 3")
    assert main(["inspect", str(path), "--only", "table"]) == 2
    hint = "called kernel, w or weight (--layout every-matrix takes all arrays of rank two and more)"
    assert hint in capsys.readouterr().err
    for option in ("--only", "--skip"):
        assert main(["inspect", str(path), option, "blok"]) == 2
        assert "inspect found no leaf that 'blok' matches; " in capsys.readouterr().err


def test_kernels_that_could_be_pytorchs_or_flaxs_are_answered_with_the_option(tmp_path, capsys):
    np.savez(tmp_path / "net.npz", **{"conv.weight": np.ones((4, 3, 3, 3))})
    assert main(["inspect", str(tmp_path / "net.npz")]) == 2
    assert "--layout oihw (outputs first)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "best.ckpt"])
def test_pickles_are_answered_with_what_to_save_instead(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"PK")
    assert main(["inspect", str(tmp_path / name)]) == 1
    assert f"{name}. Python's pickles, which can run code, are not read: save" in capsys.readouterr().err


def test_a_damaged_file_is_named_once(tmp_path, capsys):
    (tmp_path / "cut.npz").write_bytes(b"PK")
    assert main(["inspect", str(tmp_path / "cut.npz")]) == 1
    assert capsys.readouterr().err.count("cut.npz") == 1


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


def test_a_plot_of_an_unknown_type_is_refused_before_anything_is_computed(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "missing.npz"), "--plot", str(tmp_path / "net.foo")]) == 2
    assert f"--plot writes .png, .svg, .pdf, got {tmp_path}/net.foo" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["inspect", str(tmp_path / "missing.npz"), "--plot", str(tmp_path / "net.png")]) == 1
    out, err = capsys.readouterr()
    assert err == "inspect --plot needs matplotlib, which is not installed: pip install 'svb_jax[plot]'\n"
    assert out == ""


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
        assert main(["inspect", str(tmp_path / name)]) == 1, name
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), f"{name}: {out}{err}"
        assert name in err or name == "both.npz", err
        assert "Traceback" not in err
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"dtype", b"dtypo"),
        (b'"F32"', b"[32]"),
        (b"[2, 2]", b"[4.0]"),
        (b"[2, 2]", b"[-2,-2]"),
        (b"[0, 16]", b"[0]"),
    ],
)
def test_entries_that_safetensors_cannot_have_are_named(before, after, tmp_path, capsys):
    text = safetensors({"w": np.eye(2, dtype=np.float32)}, {"w": "F32"})[8:-16].replace(before, after)
    (tmp_path / "shard.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "in shard.safetensors, the header does not say what 'w' is" in capsys.readouterr().err


def test_paths_too_deep_for_a_tree_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "deep.npz", **{"a/" * 5000 + "kernel": np.eye(2)})
    assert main(["inspect", str(tmp_path / "deep.npz")]) == 1
    assert "lies 5000 levels deep" in capsys.readouterr().err


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
