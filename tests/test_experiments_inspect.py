"""The spectrum of a checkpoint and of plain weights, and the demo's three runs."""

import numpy as np
import pytest

from experiments import demo
from experiments.inspection import Inspect, load_weights, nested
from svb_jax.training.checkpoint import Checkpoints
from svb_jax.training.state import TrainState


@pytest.fixture
def kernel():
    """Outputs 4, inputs 2 of 3 x 3, with singular values 3, 1, 0.9 and 0.1."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (18, 4))
    return (left[:, :4] * [3.0, 1.0, 0.9, 0.1] @ right).reshape(3, 3, 2, 4).astype(np.float32)


def test_npz_of_weights_is_printed_and_plotted(kernel, tmp_path, capsys):
    np.savez(tmp_path / "net.npz", **{"conv/kernel": kernel, "conv/bias": np.zeros(4)})
    Inspect(path=tmp_path / "net.npz").run()
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("conv/kernel")]
    # Of the squares less one, 8, 0, -0.19 and -0.99: a norm of 8.0633.
    assert " ".join(line.split()) == "conv/kernel 1 4 x 18 0.1000 3.0000 30.00 50.0% 8.0633"
    assert (tmp_path / "net.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "net.png") in printed


def test_layout_decides_which_axis_is_the_output(kernel, tmp_path, capsys):
    np.savez(tmp_path / "torch.npz", **{"conv.weight": kernel.transpose(3, 2, 0, 1)})
    Inspect(path=tmp_path / "torch.npz", layout="oihw", plot=tmp_path / "here.png").run()
    assert "4 x 18  0.1000  3.0000" in capsys.readouterr().out
    assert (tmp_path / "here.png").is_file()


def test_checkpoint_and_run_folder_hold_the_same_weights(kernel, tmp_path):
    params = {"conv": {"kernel": kernel}}
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        state = TrainState(step=np.int32(7), params=params, batch_stats={}, opt_state=(), totals=())
        checkpoints.save(state, seconds=1.0, test_error=50.0)
        checkpoints.wait()
    for path in (tmp_path, tmp_path / "checkpoints" / "7"):
        assert nested(load_weights(path))["conv"]["kernel"].tolist() == kernel.tolist()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="inspect needs"):
        Inspect(path=tmp_path).run()


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
