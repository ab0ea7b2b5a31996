"""ImageNet's path through the loop: streamed by workers, trained, tested, stopped and continued."""

import dataclasses
import itertools
import json
import multiprocessing
import signal

import jax
import numpy as np
import pytest

from svb_jax import models
from svb_jax.training import Interrupted, TrainConfig, load_newest, train
from svb_jax.training.checkpoint import saved_steps
from svb_jax.training.feed import open_feed
from svb_jax.training.parallel import Engine, split_rows
from svb_jax.training.session import Session
from tests.faults.runs import assert_same_end
from tests.small_imagenet import write_small_imagenet

# ImageNet's own network as narrow, as shallow and on images as small as it can be still takes minutes to
# compile; the plain one shows the same path in seconds. Its last maps are then of one pixel: BatchNorm over
# four numbers makes its gradients large, and a small rate keeps it finite.
NETWORKS = {
    "plain": {"model": "convnet_8", "width": 0.125, "image_size": 16, "learning_rate": 0.1},
    "inception": {
        **{"model": "inception_resnet_imagenet", "width": 0.05, "depth": 1, "image_size": 75},
        **{"learning_rate": 0.001},
    },
}
CONFIG = TrainConfig(
    dataset="imagenet2012",
    epochs=1,
    batch_size=4,
    final_learning_rate=0.0005,
    learning_rate_stages=2,
    svb_epsilon=0.05,
    bbn_epsilon=0.05,
    project_every_epochs=0.5,
    devices=1,
    workers=0,
)


@pytest.fixture(scope="module", params=["plain", pytest.param("inception", marks=pytest.mark.slow)])
def peace(tmp_path_factory, request):
    """A run that nothing happens to, and that decodes its images itself: 24 of them in 6 steps."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_small_imagenet(folder / "data", num_train=24, num_test=10)
    network = NETWORKS[request.param]
    config = dataclasses.replace(CONFIG, data_dir=folder / "data", run_dir=folder / "peace", **network)
    train(config)
    return config


def _workers_of_each_step(monkeypatch, signal_after=None):
    """Note how many worker processes there are at each step, and ask to stop after one of them."""
    counts, take = [], Session.step

    def watching(*arguments, **options):
        result = take(*arguments, **options)
        counts.append(len(multiprocessing.active_children()))
        if len(counts) == signal_after:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(Session, "step", watching)
    return counts


def test_a_stopped_run_goes_on_bit_for_bit_with_other_workers(peace, monkeypatch):
    config = dataclasses.replace(peace, run_dir=peace.run_dir.with_name("stopped"), workers=2)
    with monkeypatch.context() as patch:
        counts = _workers_of_each_step(patch, signal_after=1)
        with pytest.raises(Interrupted, match="step 4 of 6 is saved"):
            train(config)
    assert counts == [2] * 4
    assert saved_steps(config.run_dir / "checkpoints") == [4]
    with monkeypatch.context() as patch:
        counts = _workers_of_each_step(patch)
        result = train(dataclasses.replace(config, workers=1))
    assert counts == [1] * 2
    assert not multiprocessing.active_children()
    assert_same_end(config.run_dir, peace.run_dir)
    expected = json.loads((peace.run_dir / "result.json").read_text())
    for name in ("test_error", "test_error_top5", "test_error_projected", "train_error", "steps"):
        assert getattr(result, name) == expected[name]


def test_errors_are_those_of_the_final_network_on_central_crops(peace):
    session = Session(peace)
    start, _ = load_newest(peace.run_dir / "checkpoints")
    state = start.fill(jax.eval_shape(session.initial_state))
    model = models.make(peace.model, num_classes=1000, width=peace.width, depth=peace.depth)
    logits, labels = [], []
    for batch in session.feed.test():
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        answers = jax.jit(model.apply)(variables, batch.images[0].astype(np.float32))
        logits.append(np.asarray(answers)[batch.mask[0]])
        labels.append(batch.labels[0][batch.mask[0]])
    best = np.argsort(-np.concatenate(logits), axis=1, kind="stable")
    labels = np.concatenate(labels)[:, None]
    assert sorted(labels[:, 0]) == list(range(10))
    (line,) = [json.loads(line) for line in (peace.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line["svb/share_clipped"] > 0
    assert line["test_error"] == pytest.approx(100 * (best[:, :1] != labels).all(axis=1).mean())
    assert line["test_error_top5"] == pytest.approx(100 * (best[:, :5] != labels).all(axis=1).mean())


def test_devices_and_micro_batches_share_the_stream_as_they_share_memory(peace):
    def batches(config):
        feed = open_feed(config, Engine("pmap", config.devices))
        return list(itertools.islice(feed.train(2), 2))

    parted = dataclasses.replace(peace, batch_size=8, accumulate=2, devices=2)
    whole = batches(dataclasses.replace(parted, accumulate=1, devices=1))
    rows = split_rows(np.arange(8), 2, Engine("pmap", 2))
    for batch, all_of_it in zip(batches(parted), whole, strict=True):
        np.testing.assert_array_equal(batch.images, all_of_it.images[0, 0][rows])
        np.testing.assert_array_equal(batch.labels, all_of_it.labels[0, 0][rows])
