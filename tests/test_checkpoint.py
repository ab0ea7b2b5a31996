"""Checkpoints: whole or not used, whatever happens to their files, and the same on any devices."""

import contextlib
import dataclasses
import errno
import logging
import os
import resource
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from svb_jax.training import Interrupted, checkpoint, loop, train
from svb_jax.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_newest,
    saved_steps,
)
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.durable import set_aside
from svb_jax.training.run_folder import RunFolder
from svb_jax.training.saving import OUTDATED, Checkpoints
from tests.faults.runs import QUICK, assert_same_end


def _state(step, value=1.0):
    kernel = np.full((30, 40), value, np.float32)
    return {"step": np.int32(step), "params": {"kernel": kernel}, "opt_state": (kernel * 2, np.int32(step))}


def _save(folder, errors):
    """Save a state a step, with these test errors; a state's kernel is full of its step."""
    with Checkpoints(folder, keep=2) as checkpoints:
        for step, error in enumerate(errors, start=1):
            checkpoints.save(_state(step, step), seconds=10.0 * step, test_error=error)


def test_what_is_saved_comes_back(tmp_path):
    _save(tmp_path / "checkpoints", [5.0])
    newest, damaged = load_newest(tmp_path / "checkpoints")
    assert (newest.step, newest.notes.seconds, damaged) == (1, 10.0, {})
    filled = newest.fill(_state(0, 0.0))
    np.testing.assert_array_equal(filled["params"]["kernel"], np.ones((30, 40), np.float32))
    np.testing.assert_array_equal(filled["opt_state"][0], np.full((30, 40), 2, np.float32))
    assert filled["opt_state"][1].dtype == np.int32


def test_the_newest_and_the_best_are_kept(tmp_path):
    _save(tmp_path / "checkpoints", [5.0, 1.0, 3.0, 2.0, None, 4.0])
    assert saved_steps(tmp_path / "checkpoints") == [2, 5, 6]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_one(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_remove_outdated", lambda checkpoints: None)
        _save(folder, [5.0, 4.0, 3.0])
    assert saved_steps(folder) == [2, 3]
    assert load_checkpoint(folder / OUTDATED / "1").step == 1
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(_state(4), seconds=0.0, test_error=2.0)
    assert saved_steps(folder) == [3, 4]
    assert not (folder / OUTDATED).exists()


def test_a_copy_under_any_name_knows_its_step(tmp_path):
    _save(tmp_path / "checkpoints", [5.0])
    (tmp_path / "checkpoints" / "1").rename(tmp_path / "my best")
    assert load_checkpoint(tmp_path / "my best").step == 1


@pytest.fixture
def hosts(monkeypatch):
    """Let this host be the first of two; returns a function that says what the other one tells it."""

    def hears(value):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, value]))

    return hears


def test_hosts_continue_from_the_newest_that_all_can_read(hosts, tmp_path):
    _save(tmp_path, [5.0, 4.0])
    hosts(1)
    newest, damaged = load_newest(tmp_path)
    assert (newest.step, damaged) == (1, {2: "cannot be read by another host"})


@pytest.mark.parametrize("folder", [".", "none"])
def test_hosts_that_see_different_folders_are_told(folder, hosts, tmp_path):
    _save(tmp_path, [5.0])
    hosts(-1 if folder == "." else 1)
    other = 1 if folder == "." else 0
    with pytest.raises(CheckpointError, match=rf"Host {other} finds no whole checkpoint in .*same run_dir"):
        load_newest(tmp_path / folder)


def test_no_folder_is_no_checkpoint(tmp_path):
    assert load_newest(tmp_path / "checkpoints") == (None, {})


def test_another_structure_is_refused(tmp_path):
    _save(tmp_path / "checkpoints", [5.0])
    newest, _ = load_newest(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"params/bias, params/kernel do not match"):
        newest.fill({**_state(0), "params": {"bias": np.zeros(3)}})


def _flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def _truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _lose_a_key(file):
    # One bit turns the name of a key into another.
    file.write_bytes(file.read_bytes().replace(b'"seconds"', b'"sdconds"'))


def test_a_checkpoint_whose_notes_lost_a_key_is_passed_over(tmp_path):
    folder = tmp_path / "checkpoints"
    _save(folder, [5.0, 4.0])
    _lose_a_key(folder / "2" / "meta" / "metadata")
    newest, damaged = load_newest(folder)
    assert (newest.step, damaged) == (1, {2: "is damaged (wrong checksum: its notes)"})


def test_the_best_is_kept_over_a_restart(tmp_path):
    _save(tmp_path / "checkpoints", [5.0, 1.0, 3.0, 2.0])
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        for step in (5, 6, 7):
            checkpoints.save(_state(step), seconds=0.0, test_error=4.0)
    assert saved_steps(tmp_path / "checkpoints") == [2, 6, 7]


@pytest.mark.parametrize("damage", [_flip_a_byte, _truncate, lambda file: file.unlink()])
@pytest.mark.parametrize("which", ["largest", "meta/metadata", "state/_METADATA"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, which):
    folder = tmp_path / "checkpoints"
    _save(folder, [5.0, 4.0])
    files = [path for path in (folder / "2" / "state").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size) if which == "largest" else folder / "2" / which
    damage(file)
    newest, damaged = load_newest(folder)
    assert newest.step == 1
    np.testing.assert_array_equal(newest.arrays["params/kernel"], np.ones((30, 40), np.float32))
    assert list(damaged) == [2]
    assert saved_steps(folder) == [1, 2]


def test_a_damaged_checkpoint_of_many_arrays_is_told_without_a_traceback(tmp_path, monkeypatch):
    uncaught = []
    monkeypatch.setattr(sys, "unraisablehook", uncaught.append)
    kernels = {str(number): np.full((30, 40), number, np.float32) for number in range(60)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save({"step": np.int32(1), "params": kernels}, seconds=0.0, test_error=None)
    _truncate(tmp_path / "1" / "state" / "manifest.ocdbt")
    # Which reads are under way when the first one fails is chance: several times.
    for _ in range(10):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(tmp_path / "1")
    # Reads that were left behind would end, and complain, about now.
    time.sleep(0.5)
    assert uncaught == []


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EMFILE, "Too many open files"),
        ValueError("PERMISSION_DENIED: Error opening ... [os_error_code='13']"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("reading", ["read_regular", "_read_arrays"])
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_damaged(
    reading, refusal, tmp_path, monkeypatch
):
    def refuse(path):
        raise refusal

    _save(tmp_path, [5.0, 4.0])
    monkeypatch.setattr(checkpoint, reading, refuse)
    kind = MemoryError if isinstance(refusal, MemoryError) else OSError
    with pytest.raises(kind):
        load_newest(tmp_path)


def test_a_folder_that_may_not_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch):
    def scandir(path):
        if str(path).endswith("state"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    original = os.scandir
    _save(tmp_path, [5.0, 4.0])
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="Permission denied"):
        load_newest(tmp_path)


def test_swapped_arrays_are_noticed(tmp_path):
    folder = tmp_path / "checkpoints"
    _save(folder, [5.0, 4.0])
    (folder / "2" / "state").rename(folder / "old")
    (folder / "1" / "state").rename(folder / "2" / "state")
    with pytest.raises(CheckpointError, match=r"wrong checksum: opt_state/0, opt_state/1, params/kernel"):
        load_checkpoint(folder / "2")


def test_nothing_is_thrown_away_when_nothing_is_whole(tmp_path):
    folder = tmp_path / "checkpoints"
    _save(folder, [5.0, 4.0])
    for step in (1, 2):
        (folder / str(step) / "meta" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole: step 2 .*; step 1 "):
        load_newest(folder)
    assert saved_steps(folder) == [1, 2]


def test_a_step_can_be_saved_again_after_its_damaged_one_is_set_aside(tmp_path):
    folder = tmp_path / "checkpoints"
    _save(folder, [5.0, 4.0])
    assert set_aside(folder / "2", tmp_path) == tmp_path / "damaged" / "2"
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(_state(2, 7.0), seconds=0.0, test_error=4.0)
    assert load_checkpoint(folder / "2").arrays["params/kernel"][0, 0] == 7.0


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    with checkpoints, pytest.raises(FloatingPointError, match="params/kernel is not finite after step 3"):
        checkpoints.save(_state(3, np.inf), seconds=0.0, test_error=None)
    assert saved_steps(tmp_path / "checkpoints") == []


@contextlib.contextmanager
def full_disk():
    """Let every file that grows beyond a kilobyte fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "absl")
    uncaught = []
    monkeypatch.setattr(sys, "unraisablehook", uncaught.append)
    folder = tmp_path / "checkpoints"
    kernels = np.random.default_rng(0).normal(size=(60, 30, 40)).astype(np.float32)
    state = {"step": np.int32(1), "params": {str(number): kernel for number, kernel in enumerate(kernels)}}
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(state, seconds=0.0, test_error=None)
    # Which writes are under way when the first one fails is chance: several times.
    for step in range(2, 8):
        full = pytest.raises(CheckpointError, match=r"could not be saved .* newest whole one is of step 1")
        with full_disk(), full, Checkpoints(folder, keep=2) as checkpoints:
            checkpoints.save({**state, "step": np.int32(step)}, seconds=0.0, test_error=None)
            checkpoints.wait()
    # Writes that a failed save left behind would end, and complain, about now.
    time.sleep(0.5)
    assert uncaught == []
    assert saved_steps(folder) == [1]
    np.testing.assert_array_equal(load_checkpoint(folder / "1").arrays["params/59"], kernels[59])
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save({**state, "step": np.int32(2)}, seconds=0.0, test_error=None)
    assert saved_steps(folder) == [1, 2]


def test_a_long_path_does_not_hide_why_a_save_failed(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "absl")
    # TensorStore tells the reason after the names of its files.
    folder = tmp_path / ("long " * 40)
    kernel = np.random.default_rng(0).normal(size=(300, 40))
    full = pytest.raises(CheckpointError, match=r"could not be saved in .*File too large\. There is no older")
    with full_disk(), full, Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save({"step": np.int32(1), "params": {"kernel": kernel}}, seconds=0.0, test_error=None)
        checkpoints.wait()


def test_a_failed_save_leaves_no_thread_that_keeps_the_process(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "absl")
    folder, before = tmp_path / "checkpoints", set(threading.enumerate())
    failed = pytest.raises(CheckpointError, match="could not be saved")
    with failed, Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(_state(1), seconds=0.0, test_error=None)
        checkpoints.wait()
        # No folder can be made in a file: as on a disk that has become read-only.
        folder.rename(tmp_path / "moved")
        folder.write_text("")
        checkpoints.save(_state(2), seconds=0.0, test_error=None)
        checkpoints.wait()
    # Python waits for these before a process ends.
    waiting = [thread for thread in threading.enumerate() if not thread.daemon and thread not in before]
    end = time.monotonic() + 10
    for thread in waiting:
        thread.join(max(0.0, end - time.monotonic()))
    assert [thread.name for thread in waiting if thread.is_alive()] == []


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    folder = RunFolder(dataclasses.replace(QUICK, run_dir=tmp_path))
    with full_disk():
        for write in (
            lambda: folder.add_metrics({"step": 1, "long": "x" * 1000}),
            lambda: folder.add_spectrum("final", {"conv": np.random.default_rng(0).normal(size=1000)}),
        ):
            with pytest.raises(OSError, match=r"File too large: .*(metrics.jsonl|spectrum.npz)"):
                write()
    assert not (tmp_path / "spectrum.npz").exists()


@pytest.fixture(scope="module")
def peace(tmp_path_factory):
    """A run that nothing happens to."""
    config = dataclasses.replace(QUICK, run_dir=tmp_path_factory.mktemp("runs") / "peace")
    with cached_compilation(config.run_dir.parent / "compilation_cache"):
        train(config)
        yield config


def _train_until(monkeypatch, config, step, action):
    """Train, and do something when the host has seen a step finish."""
    look_back = loop._Run._look_back

    def watching(run):
        seen, _ = run.under_way[0]
        details = look_back(run)
        if seen == step:
            action()
        return details

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_look_back", watching)
        train(config)


def crash_at(monkeypatch, config, step, error=None):
    """Train until the host has seen a step finish, and die of an error."""
    plug = error or OSError("pulled the plug")

    def pull_the_plug():
        raise plug

    with pytest.raises(type(plug)):
        _train_until(monkeypatch, config, step, pull_the_plug)


@pytest.mark.parametrize("step", [2, 4, 9])
def test_a_crashed_run_goes_on_as_if_nothing_had_happened(peace, tmp_path, monkeypatch, step):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run", checkpoint_every_epochs=0.5)
    crash_at(monkeypatch, config, step)
    assert not (config.run_dir / "result.json").exists()
    train(config)
    assert_same_end(config.run_dir, peace.run_dir)


def test_sigterm_saves_between_two_checkpoints_and_the_run_goes_on(peace, tmp_path, monkeypatch):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run", checkpoint_every_epochs=2)
    with pytest.raises(Interrupted, match=r"step \d+ of 16 is saved"):
        _train_until(monkeypatch, config, 5, lambda: signal.raise_signal(signal.SIGTERM))
    (saved,) = saved_steps(config.run_dir / "checkpoints")
    assert 5 < saved < 12
    train(config)
    assert_same_end(config.run_dir, peace.run_dir)


def test_a_run_falls_back_and_ends_the_same(peace, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run")
    crash_at(monkeypatch, config, step=14)
    assert saved_steps(config.run_dir / "checkpoints") == [8, 12]
    (config.run_dir / "checkpoints" / "12" / "meta" / "metadata").write_text("{")
    train(config)
    said = capsys.readouterr().err
    assert "The checkpoint of step 12 cannot be read" in said
    assert "from step 8" in said
    assert (config.run_dir / "damaged" / "12").is_dir()
    assert_same_end(config.run_dir, peace.run_dir)


def test_a_run_goes_on_with_other_devices_and_another_engine(peace, tmp_path, monkeypatch):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run", devices=8)
    crash_at(monkeypatch, config, step=9)
    result = train(dataclasses.replace(config, devices=2, engine="shard_map"))
    assert result.hardware.startswith("2 x")
    ends = [load_newest(run.run_dir / "checkpoints")[0].arrays for run in (config, peace)]
    assert int(ends[0]["step"]) == 16
    for name in (name for name in ends[0] if name.startswith("params/")):
        np.testing.assert_allclose(ends[0][name], ends[1][name], rtol=0, atol=1e-6, err_msg=name)


def test_wall_time_accumulates(peace, tmp_path, monkeypatch):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run")
    crash_at(monkeypatch, config, step=9)
    saved = load_newest(config.run_dir / "checkpoints")[0]
    assert train(config).seconds > saved.notes.seconds > 0
