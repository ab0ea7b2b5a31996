"""The loop: the same losses on any number of devices, errors counted right, folders that tell it all."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import svb_jax
from svb_jax.training import Diverged, TrainConfig, parallel, train
from svb_jax.training.checkpoint import saved_steps
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.config import MAY_DIFFER, differences, to_fields
from svb_jax.training.feed import open_feed
from svb_jax.training.metrics import count_errors, zero_totals
from svb_jax.training.optimizer import Span, hyperparameters, learning_rate, make_projection
from svb_jax.training.parallel import Engine, fetch, split_rows
from svb_jax.training.session import Session
from svb_jax.training.step import Batch, make_eval_step

# So small on purpose: float32 noise that carries one activation over the kink of its ReLU grows a
# thousandfold in a few steps, on whatever devices; with ten thousand activations that hardly ever happens.
TINY = TrainConfig(
    model="convnet_8",
    width=0.125,
    dataset="synthetic",
    image_size=8,
    first=64,
    epochs=5,
    batch_size=16,
    learning_rate=0.05,
    final_learning_rate=0.05,
    learning_rate_stages=2,
    svb_epsilon=0.05,
    bbn_epsilon=0.05,
    project_after_last_epoch=True,
    devices=1,
)
FREE = dataclasses.replace(TINY, svb_epsilon=None, bbn_epsilon=None)


def _losses(config, num_steps):
    """Return the losses of the first steps, and the parameters after them."""
    session = Session(config)
    state = session.engine.place(session.initial_state())
    losses = []
    for _, batch in zip(range(num_steps), session.feed.train(0), strict=False):
        state, report = session.step(state, batch, stop=False)
        losses.append(float(report.pulse[0]))
    return np.array(losses), fetch(state)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Sessions that run the same program, as most here do, compile it once."""
    with cached_compilation(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def reference():
    """Twenty steps on one device, SVB and BBN projecting at the 4th, 8th, ... of them."""
    return _losses(TINY, 20)


@pytest.fixture(scope="module")
def free():
    """Six steps without bounds."""
    return _losses(FREE, 6)


@pytest.mark.parametrize(
    ("engine", "devices", "fsdp"),
    [
        ("pmap", 2, False),
        ("pmap", 8, False),
        ("shard_map", 1, False),
        ("shard_map", 8, False),
        ("jit", 1, True),
        ("jit", 2, True),
        ("jit", 8, False),
        ("jit", 8, True),
    ],
)
def test_losses_do_not_depend_on_the_devices(reference, engine, devices, fsdp, monkeypatch):
    # Small enough that kernels of so narrow a network are sharded too.
    monkeypatch.setattr(parallel, "SMALLEST_TO_SHARD", 64)
    losses, state = _losses(dataclasses.replace(TINY, engine=engine, devices=devices, fsdp=fsdp), 20)
    np.testing.assert_allclose(losses, reference[0], rtol=0, atol=1e-4)
    assert losses[-1] < losses[0]
    assert int(state.step) == 20


def test_parameters_and_momentum_stay_sharded(monkeypatch):
    monkeypatch.setattr(parallel, "SMALLEST_TO_SHARD", 64)
    session = Session(dataclasses.replace(TINY, engine="jit", devices=8, fsdp=True))
    state = session.engine.place(session.initial_state())
    expected = jax.tree.map(lambda leaf: leaf.sharding, state)
    state, _ = session.step(state, next(session.feed.train(0)), stop=False)
    is_alike = jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, expected)
    assert all(jax.tree.leaves(is_alike))
    sharded = [
        leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if not leaf.is_fully_replicated
    ]
    assert len(sharded) >= 4


def test_the_last_step_of_an_epoch_projects(reference):
    _, state = reference
    values = np.concatenate([np.ravel(v) for v in svb_jax.singular_values(state.params).values()])
    assert values.min() >= 1 / 1.05 - 1e-5
    assert values.max() <= 1.05 + 1e-5
    stats = svb_jax.projection_stats(state.opt_state)
    # Before step 20 was projected, its values had left the band.
    assert stats["svb/sigma_max"] > 1.05 + 1e-3
    assert stats["svb/share_clipped"] > 0
    assert stats["bbn/share_clipped"] > 0


def test_bounds_matter_from_the_first_projection_on(reference, free):
    np.testing.assert_allclose(free[0][:4], reference[0][:4], rtol=0, atol=1e-5)
    assert abs(free[0][4] - reference[0][4]) > 1e-3


def test_micro_batches_add_up_to_the_batch():
    # Without BatchNorm, whose statistics are those of a micro-batch, the step must be the same.
    plain = dataclasses.replace(FREE, model="deep_linear", learning_rate=1e-5, final_learning_rate=1e-5)
    whole, _ = _losses(plain, 4)
    pieces, _ = _losses(dataclasses.replace(plain, accumulate=4, devices=2), 4)
    np.testing.assert_allclose(pieces, whole, rtol=1e-5)  # raw pixels, no BatchNorm: losses of hundreds


def test_bfloat16_computes_coarsely_and_keeps_float32_parameters(free):
    losses, state = _losses(dataclasses.replace(FREE, dtype="bfloat16"), 4)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.batch_stats))} == {
        np.dtype("float32")
    }
    difference = np.abs(losses - free[0][:4])
    assert 1e-5 < difference.max() < 0.1


def test_errors_are_counted_with_ties_in_order_and_nan_wrong():
    logits = jnp.array(
        [
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # label 6: first
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # label 2: fifth
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # label 1: sixth
            [7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # label 0: ties go to the first
            [7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # label 1: and so this is second
            [jnp.nan] * 7,  # label 0: never right
            [9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # label 1: wrong, but masked out
        ]
    )
    labels = jnp.array([6, 2, 1, 0, 1, 0, 1])
    totals = count_errors(logits, labels, jnp.array([True] * 6 + [False]))
    assert (int(totals.wrong), int(totals.wrong_top5), int(totals.count)) == (4, 2, 6)
    assert not np.isfinite(float(totals.loss))
    finite = count_errors(jnp.zeros((2, 7)), jnp.array([0, 1]), jnp.array([True, False]))
    np.testing.assert_allclose(float(finite.loss), np.log(7), rtol=1e-6)


def test_the_rate_goes_down_in_equal_stages():
    config = dataclasses.replace(TINY, learning_rate=1.0, final_learning_rate=0.01, learning_rate_stages=3)
    rates = [float(learning_rate(hyperparameters(config), step, Span(5, 10))) for step in range(12)]
    np.testing.assert_allclose(rates, [1.0] * 3 + [0.1] * 3 + [0.01] * 6, rtol=1e-6)


def test_a_global_batch_is_split_alike_on_any_number_of_devices():
    indices = np.arange(16)
    one, four = (split_rows(indices, 2, Engine("pmap", devices)) for devices in (1, 4))
    assert one.tolist() == [[list(range(8)), list(range(8, 16))]]
    np.testing.assert_array_equal(np.concatenate(list(four), axis=1), one[0])
    with pytest.raises(ValueError, match="batch_size that 4 devices x 2 micro-batches divide, got 12"):
        split_rows(np.arange(12), 2, Engine("pmap", 4))


def test_the_test_set_is_seen_once():
    config = dataclasses.replace(TINY, batch_size=48, devices=2)
    feed = open_feed(config, Engine("pmap", 2))
    batches = list(feed.test())
    assert [batch.images.shape for batch in batches] == [(2, 24, 8, 8, 3)] * 3
    labels = np.concatenate([batch.labels[batch.mask] for batch in batches])
    assert sum(int(batch.mask.sum()) for batch in batches) == 128
    np.testing.assert_array_equal(labels, feed._dataset.test.labels)


def test_evaluation_adds_up_over_devices_and_ignores_the_filling():
    class Echo:
        """A network that answers with the first pixel."""

        def apply(self, variables, images, train):
            return jax.nn.one_hot(images[:, 0, 0, 0].astype(jnp.int32), 10)

    engine = Engine("pmap", 2)
    step = engine.compile(make_eval_step(Echo()), num_replicated=3)
    pixels = np.array([[3, 4], [5, 6]], np.uint8)
    images = np.broadcast_to(pixels[:, :, None, None, None], (2, 2, 8, 8, 3)).copy()
    batch = Batch(images, np.array([[3, 4], [0, 0]], np.int32), np.array([[True, True], [True, False]]))
    totals = fetch(step(engine.replicate(zero_totals()), {}, {}, engine.shard(batch)))
    assert (int(totals.wrong), int(totals.count)) == (1, 3)


def test_a_projection_lands_in_the_band_and_says_what_it_found():
    params = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 1.0, 0.1]))}}
    config = dataclasses.replace(TINY, bbn_epsilon=None)
    projected, found = make_projection(config)(params, {})
    np.testing.assert_allclose(projected["dense"]["kernel"], np.diag([1.05, 1.0, 1 / 1.05]), atol=1e-6)
    np.testing.assert_allclose([found["svb/sigma_min"], found["svb/sigma_max"]], [0.1, 3.0], rtol=1e-6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = dataclasses.replace(TINY, run_dir=tmp_path_factory.mktemp("runs") / "tiny", devices=2)
    return config, train(config)


def test_a_finished_run_leaves_everything(finished):
    config, result = finished
    folder = config.run_dir
    assert json.loads((folder / "config.json").read_text()) == to_fields(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(4, 1), (8, 2), (12, 3), (16, 4), (20, 5)]
    needed = {"seconds", "train_loss", "train_error", "test_error", "test_error_top5", "learning_rate"}
    assert needed <= set(lines[0])
    assert lines[0]["seconds"] < lines[1]["seconds"]
    assert {"svb/sigma_min", "svb/sigma_max", "svb/share_clipped", "bbn/share_clipped"} <= set(lines[0])
    saved = json.loads((folder / "result.json").read_text())
    assert saved == dataclasses.asdict(result)
    assert result.test_error == lines[-1]["test_error"]
    assert result.best_test_error == min(line["test_error"] for line in lines)
    assert result.test_error_projected is not None
    assert (result.steps, result.jax) == (20, jax.__version__)
    assert result.hardware.startswith("2 x cpu")


def test_singular_values_are_measured_in_an_epoch_without_projection(tmp_path):
    run_dir = tmp_path / "run"
    train(dataclasses.replace(TINY, run_dir=run_dir, epochs=2, project_after_last_epoch=False))
    first, last = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert "sigma_max" not in first
    # The statistics are those of the first epoch's projection still.
    assert last["svb/step"] == first["svb/step"] == first["step"]
    assert last["sigma_min"] < 1 < last["sigma_max"] != last["svb/sigma_max"]


def test_an_epoch_can_be_evaluated_before_its_projection(finished, tmp_path):
    after, result = finished
    lines = {}
    for name, evaluate, bounds in [
        ("before", "before", {}),
        ("free", "after", {"svb_epsilon": None, "bbn_epsilon": None}),
    ]:
        config = dataclasses.replace(after, run_dir=tmp_path / name, evaluate=evaluate, **bounds)
        last = train(config)
        if name == "before":
            assert last.train_error == result.train_error
        text = (config.run_dir / "metrics.jsonl").read_text()
        lines[name] = [json.loads(line) for line in text.splitlines()]
    lines["after"] = list(map(json.loads, (after.run_dir / "metrics.jsonl").read_text().splitlines()))
    # The same training, projected at the same moments; the first epoch's errors are those of no bounds.
    first = {name: run[0]["test_loss"] for name, run in lines.items()}
    assert first["before"] == first["free"] != first["after"]
    for name in ("train_loss", "svb/sigma_max", "bbn/share_clipped"):
        ours, theirs = ([line[name] for line in lines[which]] for which in ("before", "after"))
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def test_the_spectrum_starts_at_one_and_ends_as_trained(finished):
    config, _ = finished
    spectrum = np.load(config.run_dir / "spectrum.npz")
    initial = {name.removeprefix("initial/") for name in spectrum if name.startswith("initial/")}
    final = {name.removeprefix("final/") for name in spectrum if name.startswith("final/")}
    assert initial == final
    assert len(initial) == 8
    for name in initial:
        np.testing.assert_allclose(spectrum[f"initial/{name}"], 1.0, atol=1e-5)
        assert np.abs(spectrum[f"final/{name}"] - 1.0).max() > 1e-3


def test_a_finished_run_is_not_run_again(finished):
    config, result = finished
    before = (config.run_dir / "result.json").stat().st_mtime_ns
    assert train(config) == result
    assert (config.run_dir / "result.json").stat().st_mtime_ns == before


def test_another_configuration_is_refused_by_field(finished):
    config, _ = finished
    other = dataclasses.replace(config, svb_epsilon=0.5, seed=7, engine="shard_map")
    with pytest.raises(ValueError, match=r"svb_epsilon=0\.05, not 0\.5, seed=0, not 7") as refusal:
        train(other)
    assert "engine" not in str(refusal.value)


def test_only_the_place_of_a_run_may_change():
    assert {field.name for field in dataclasses.fields(TrainConfig)} >= MAY_DIFFER
    wider = dataclasses.replace(TINY, width=0.5)
    assert differences(to_fields(TINY), to_fields(wider)) == {"width": (0.125, 0.5)}


def test_a_field_that_a_saved_run_does_not_know_had_its_default():
    saved = to_fields(TINY)
    del saved["momentum"]
    slower = dataclasses.replace(TINY, momentum=0.5)
    assert differences(saved, to_fields(TINY)) == {}
    assert differences(saved, to_fields(slower)) == {"momentum": (0.9, 0.5)}
    assert differences({**saved, "unknown": 3}, to_fields(TINY)) == {"unknown": (3, None)}


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    # The second of two stages, from step 11 on, takes a step to infinity; 8 is the last checkpoint before.
    config = dataclasses.replace(FREE, run_dir=tmp_path / "run", final_learning_rate=1e38)
    with pytest.raises(Diverged, match=r"at step 12\. The last good checkpoint is .*checkpoints/8"):
        train(config)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [4, 8]
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_refused_configuration_leaves_no_trace(tmp_path):
    config = dataclasses.replace(TINY, run_dir=tmp_path / "run", batch_size=30, devices=4)
    with pytest.raises(ValueError, match="batch_size that 4 devices"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("svb_epsilon", -0.1),
        ("svb_epsilon", float("nan")),
        ("learning_rate", 0.0),
        ("devices", 0),
        ("weight_decay", -1.0),
        ("weight_decay", float("nan")),
        ("momentum", 2.0),
        ("momentum", -0.1),
        ("momentum", float("nan")),
        ("width", float("nan")),
        ("seed", 2**32),
        ("first", 0),
        ("run_dir", Path("")),
        ("run_dir", Path("runs/\udcff")),
        ("run_dir", Path(".")),
    ],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"TrainConfig needs .*{field}.*, got"):
        dataclasses.replace(TINY, **{field: value})
