"""What trackers wrote is read back from their files; one that fails stops nothing."""

import asyncio
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import wandb
from tensorboardX.proto import event_pb2
from wandb.proto import wandb_internal_pb2

from svb_jax.experiments import runner, table1
from svb_jax.experiments.__main__ import main
from svb_jax.training import Tracker, TrainConfig, train
from svb_jax.training.trackers import SafeTrackers, TensorBoard, WeightsAndBiases, make_trackers
from tests.test_checkpoint import full_disk
from tests.test_report import write_run

SPECTRUM = {"conv/kernel": np.array([0.5, 1.0, 1.5]), "head/kernel": np.array([[1.0, 1.0], [2.0, 2.0]])}


def tensorboard_events(run_dir) -> list[event_pb2.Event]:
    """Read TensorBoard's files: a length, its sum, an event, its sum, and so on."""
    events = []
    for file in sorted((run_dir / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def wandb_records(run_dir) -> list[wandb_internal_pb2.Record]:
    """Read the file of an offline run: seven bytes, then blocks of chunks (sum, length, kind, content)."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    content, place, whole, records = file.read_bytes(), 7, b"", []
    while place + 7 < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        # Kinds 1 and 4 end a record: a whole one, and the last chunk of one.
        if kind in (1, 4):
            records, whole = [*records, wandb_internal_pb2.Record.FromString(whole)], b""
    return records


def play(tracker, run_dir):
    tracker.start({"model": "convnet_8", "svb_epsilon": 0.5}, run_dir)
    tracker.spectrum(0, SPECTRUM)
    tracker.scalars(7, {"test_error": 8.25, "svb/sigma_max": 1.5})
    tracker.finish()


def test_tensorboard_keeps_scalars_histograms_and_the_configuration(tmp_path):
    play(TensorBoard(), tmp_path)
    values = {
        value.tag: (event.step, value)
        for event in tensorboard_events(tmp_path)
        for value in event.summary.value
    }
    assert values["test_error"][0] == 7
    assert values["test_error"][1].simple_value == 8.25
    assert values["svb/sigma_max"][1].simple_value == 1.5
    histogram = values["spectrum/head/kernel"][1].histo
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 1.0, 2.0, 6.0)
    (text,) = values["config/text_summary"][1].tensor.string_val
    assert b"svb_epsilon: 0.5" in text


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # A session that another test began would keep that test's settings.
    wandb.teardown()
    play(WeightsAndBiases(), tmp_path)
    # Its service flushes the file when it ends, as it does with the process.
    wandb.teardown()
    logged, config = {}, {}
    for record in wandb_records(tmp_path):
        for item in record.history.item:
            logged["/".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
    assert (logged["test_error"], logged["svb/sigma_max"]) == (8.25, 1.5)
    assert sum(logged["spectrum/head/kernel/values"]) == 4
    assert (config["model"], config["svb_epsilon"]) == ("convnet_8", 0.5)


def test_run_makes_trackers_anew_for_each_run(tmp_path, monkeypatch):
    told = []

    def train(config, trackers):
        told.append(trackers)
        write_run(tmp_path / "runs", table1.EXPERIMENT, "svb", config.seed, 40.0)

    monkeypatch.setattr(runner, "train", train)
    words = ["run", "table1/svb", "--scale", "small", "--seeds", "0", "1", "--runs", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results"), "--tracker", "tests.test_trackers:Notebook"]
    assert main(words) == 0
    (first,), (second,) = told
    assert type(first).__name__ == type(second).__name__ == "Notebook"
    assert first is not second


def test_run_refuses_a_tracker_where_the_loop_has_none(capsys):
    assert main(["run", "transformer", "--scale", "smoke", "--tracker", "tensorboard"]) == 2
    assert "run --tracker does not work with transformer" in capsys.readouterr().err


class Notebook(Tracker):
    """A user's own, in five lines."""

    def __init__(self):
        self.lines = []

    def scalars(self, step, values):
        self.lines.append((step, values))


@pytest.mark.parametrize("failing", ["start", "scalars", "spectrum", "finish"])
@pytest.mark.parametrize("failure", [OSError, SystemExit, asyncio.CancelledError])
def test_a_tracker_that_fails_is_dropped_and_named_once(failing, failure, tmp_path):
    def fail(*_):
        raise failure("the network is down")

    said, good = [], Notebook()
    bad = type("Bad", (Tracker,), {failing: fail})()
    play(SafeTrackers([bad, good], said.append), tmp_path)
    assert said == [f"Bad failed and is dropped: {failure.__name__}: the network is down"]
    assert good.lines == [(7, {"test_error": 8.25, "svb/sigma_max": 1.5})]


# What cannot be flushed is not closed before Python lets go of it.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(60)
def test_tensorboard_on_a_full_disk_is_dropped_and_keeps_nobody_waiting(tmp_path):
    said, spectra = [], {f"layer_{number}/kernel": np.arange(100.0) for number in range(30)}
    safe = SafeTrackers([TensorBoard()], said.append)
    with full_disk():
        safe.start({"model": "convnet_8"}, tmp_path)
        for step in range(3):
            safe.spectrum(step, spectra)
    safe.finish()
    assert said == ["TensorBoard failed and is dropped: OSError: [Errno 27] File too large"]


def test_numbers_that_are_unknown_are_not_handed_on():
    good = Notebook()
    SafeTrackers([good], print).scalars(3, {"loss": None, "error": float("nan"), "seconds": 1.0})
    assert good.lines == [(3, {"seconds": 1.0})]


def test_a_run_tells_its_trackers(tmp_path):
    class Failing(Tracker):
        def scalars(self, step, values):
            raise RuntimeError("no room")

    good = Notebook()
    config = TrainConfig(
        model="convnet_8", width=0.125, dataset="synthetic", image_size=8, first=64, batch_size=32, epochs=2,
        learning_rate_stages=2, svb_epsilon=0.5, devices=1, run_dir=tmp_path / "run",
    )  # fmt: skip
    train(config, [Failing(), good, TensorBoard()])
    assert [step for step, _ in good.lines] == [2, 4]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [values["test_error"] for _, values in good.lines] == [line["test_error"] for line in lines]
    tags = {
        (event.step, value.tag)
        for event in tensorboard_events(tmp_path / "run")
        for value in event.summary.value
    }
    assert {
        (2, "test_error"),
        (4, "test_error"),
        (0, "spectrum/head/kernel"),
        (4, "spectrum/head/kernel"),
    } <= tags


def test_trackers_by_name():
    assert [type(t).__name__ for t in make_trackers(["jsonl", "wandb", "tensorboard"])] == [
        "WeightsAndBiases",
        "TensorBoard",
    ]
    (own,) = make_trackers(["tests.test_trackers:Notebook"])
    assert type(own).__name__ == "Notebook"
    for name in ("tensorbord", "my_module:", ":Slack"):
        with pytest.raises(ValueError, match=rf"tensorboard, wandb or module:Class, got '{name}'"):
            make_trackers([name])
    with pytest.raises(ValueError, match=r"got 'tensorbord'\. Did you mean 'tensorboard'\?"):
        make_trackers(["tensorbord"])


def svb_train(folder, tracker: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command, whose module search path has no working directory."""
    svb = Path(sys.executable).with_name("svb")
    words = ["train", "--model", "convnet_8", "--image-size", "8", "--first", "64", "--batch-size", "32"]
    words += ["--width", "0.125", "--dataset", "synthetic", "--epochs", "1", "--learning-rate-stages", "1"]
    command = [svb, *words, "--tracker", tracker]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_installed_command_finds_a_tracker_in_the_working_directory(tmp_path):
    guide = (Path(__file__).parents[1] / "docs/trackers.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```$", guide, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_module.py").write_text(source.partition("\n\n\ntrain(")[0])
    done = svb_train(tmp_path, "my_module:Slack")
    assert done.returncode == 0, done.stderr
    assert "step 2: " in done.stdout


@pytest.mark.parametrize(
    ("tracker", "sentence"),
    [
        ("nowhere:Slack", r"nowhere cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("broken_tracker:Slack", r"broken_tracker cannot be imported: SyntaxError: "),
        ("svb_jax:Nope", r"svb_jax \(.*__init__.py\) has no class Nope\."),
        ("needy_tracker:Slack", r"Slack\(\) failed: KeyError: 'SLACK_TOKEN'"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_wrong_usage(tracker, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_tracker.py").write_text("class Slack(:\n")
    (tmp_path / "needy_tracker.py").write_text("def Slack():\n    return {}['SLACK_TOKEN']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--tracker", tracker]) == 2
    printed = capsys.readouterr().err
    assert re.match(rf"Tracker '{tracker}': {sentence}", printed)
    assert printed.count("\n") == 1
