"""A run's folder: one process at a time, one configuration, and files that are made anew if damaged."""

import dataclasses
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from svb_jax._src.npz import load_npz
from svb_jax.training import Interrupted, train
from svb_jax.training.checkpoint import CheckpointError, load_newest, saved_steps
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.durable import RUN_FILES, altered
from svb_jax.training.lock import FolderInUse, locked
from svb_jax.training.run_folder import RunFolder
from svb_jax.training.session import Session
from tests.faults.runs import QUICK, assert_same_end
from tests.test_checkpoint import crash_at


@pytest.fixture(scope="module")
def peace(tmp_path_factory):
    """A run that nothing happens to."""
    config = dataclasses.replace(QUICK, run_dir=tmp_path_factory.mktemp("runs") / "peace")
    with cached_compilation(config.run_dir.parent / "compilation_cache"):
        train(config)
        yield config


@pytest.fixture(scope="module")
def crash(peace, tmp_path_factory):
    """A run that died in its last epoch, with checkpoints of its second and third."""
    config = dataclasses.replace(peace, run_dir=tmp_path_factory.mktemp("runs") / "crashed")
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, config, step=14)
    assert saved_steps(config.run_dir / "checkpoints") == [8, 12]
    return config


def _copy(config, run_dir):
    shutil.copytree(config.run_dir, run_dir)
    return dataclasses.replace(config, run_dir=run_dir)


@pytest.fixture
def crashed(crash, tmp_path):
    return _copy(crash, tmp_path / "crashed")


@pytest.fixture
def finished(peace, tmp_path):
    return _copy(peace, tmp_path / "finished")


def test_the_best_checkpoint_outlives_a_restart(peace, tmp_path, monkeypatch):
    errors = iter([50.0, 48.0, 51.0, 52.0, 53.0])
    evaluate = Session.evaluate

    def scripted(session, *arguments):
        return {**evaluate(session, *arguments), "test_error": next(errors)}

    monkeypatch.setattr(Session, "evaluate", scripted)
    config = dataclasses.replace(peace, run_dir=tmp_path / "run", epochs=5, keep_checkpoints=1)
    crash_at(monkeypatch, config, step=14)
    assert saved_steps(config.run_dir / "checkpoints") == [8, 12]
    assert train(config).best_test_error == 48.0
    assert saved_steps(config.run_dir / "checkpoints") == [8, 20]


HOLDER = """
import sys, time
from pathlib import Path
from svb_jax.training.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_told_of_the_first(peace, tmp_path):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run")
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", HOLDER, config.run_dir]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            in_use = rf"run is in use by process {holder.pid} on .*, since \d{{4}}.* give another run_dir"
            with pytest.raises(FolderInUse, match=in_use):
                train(config)
        finally:
            holder.kill()
    train(config)
    assert_same_end(config.run_dir, peace.run_dir)


def test_a_lock_without_a_name_still_holds(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock").write_text("garbage")
        with pytest.raises(FolderInUse, match="by another process"), locked(tmp_path):
            pass
    with locked(tmp_path) as is_locked:
        assert is_locked


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_text("{"), None])
def test_another_configuration_is_refused_whatever_config_json_says(crashed, lose):
    other = dataclasses.replace(crashed, seed=7, learning_rate=2e-5)
    file = crashed.run_dir / "config.json"
    if lose is None:
        file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    else:
        lose(file)
    with pytest.raises(ValueError, match=r"learning_rate=1e-05, not 2e-05, seed=0, not 7"):
        train(other)


def _cut_a_line(path):
    lines = path.read_text().splitlines()
    lines[0] = lines[0][:30]
    path.write_text("\n".join(lines) + "\n")


def _make_a_folder(path):
    path.unlink()
    path.mkdir()


def _flip_a_digit(path):
    content = path.read_bytes()
    place = content.index(b'"test_error": ') + len(b'"test_error": ')
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize(
    "damage",
    [
        _cut_a_line,
        _flip_a_digit,
        _make_a_folder,
        Path.unlink,
        lambda path: path.write_bytes(b"\xff\xfe\n"),
        lambda path: path.write_text("3\n{}\n"),
    ],
)
def test_damaged_metrics_are_restored_from_the_checkpoint(peace, crashed, damage, capsys):
    damage(crashed.run_dir / "metrics.jsonl")
    train(crashed)
    assert "metrics.jsonl is damaged or gone, and is made anew" in capsys.readouterr().err
    assert_same_end(crashed.run_dir, peace.run_dir)


def test_metrics_after_the_checkpoint_are_no_damage(peace, crashed, capsys):
    with (crashed.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "epoch": 4')
    train(crashed)
    assert "damaged" not in capsys.readouterr().err
    assert_same_end(crashed.run_dir, peace.run_dir)


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [_flip_a_bit, lambda path: path.write_bytes(b"PK"), _make_a_folder, Path.unlink]
)
def test_a_damaged_spectrum_is_made_anew(peace, crashed, damage):
    damage(crashed.run_dir / "spectrum.npz")
    train(crashed)
    again, first = (load_npz(run.run_dir / "spectrum.npz") for run in (crashed, peace))
    assert again.keys() == first.keys()
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, _flip_a_bit) for name in RUN_FILES),
        ("metrics.jsonl", Path.unlink),
        ("config.json", _make_a_folder),
        ("result.json", _make_a_folder),
    ],
)
def test_a_damaged_file_of_a_complete_run_is_made_anew(peace, finished, name, damage, capsys):
    before = (finished.run_dir / "metrics.jsonl").read_bytes()
    damage(finished.run_dir / name)
    assert name in altered(finished.run_dir, RUN_FILES)
    result = train(finished)
    assert result.best_test_error == train(peace).best_test_error
    assert altered(finished.run_dir, RUN_FILES) == []
    assert (finished.run_dir / "metrics.jsonl").read_bytes() == before
    assert_same_end(finished.run_dir, peace.run_dir)
    said = capsys.readouterr().err
    assert damage is Path.unlink or f"{name} is damaged, and is made anew; the old one is now" in said


@pytest.mark.parametrize("content", [b"", b'{"test_error": 5', b"{}", b"null", b"[1]", b"\xff"])
def test_a_result_that_is_none_is_no_complete_run(finished, content):
    (finished.run_dir / "result.json").write_bytes(content)
    (finished.run_dir / "SHA256SUMS").unlink()
    folder, said = RunFolder(finished), []
    assert folder.result() is None
    folder.set_damaged_aside(said.append)
    assert "result.json is damaged, and is made anew" in said[0]
    assert (finished.run_dir / "damaged" / "result.json").read_bytes() == content


def test_damaged_sums_alone_lose_nothing(peace, finished):
    _flip_a_bit(finished.run_dir / "SHA256SUMS")
    train(finished)
    assert altered(finished.run_dir, RUN_FILES) == []
    assert_same_end(finished.run_dir, peace.run_dir)


def test_damage_that_cannot_be_mended_is_told_and_nothing_is_touched(finished):
    (finished.run_dir / "checkpoints").rename(finished.run_dir / "moved")
    _flip_a_digit(finished.run_dir / "metrics.jsonl")
    damaged = (finished.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl in .* is damaged, and there is no checkpoint"):
        train(finished)
    assert (finished.run_dir / "metrics.jsonl").read_bytes() == damaged
    assert (finished.run_dir / "result.json").exists()


def _replace(path, make):
    path.unlink(missing_ok=True)
    make(path)


def _zeros_without_end(path):
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(120)
def test_pipes_devices_and_folders_in_place_of_files_are_set_aside(peace, crashed):
    folder = crashed.run_dir
    _replace(folder / "metrics.jsonl", _zeros_without_end)
    _replace(folder / "spectrum.npz", os.mkfifo)
    _replace(folder / "config.json", os.mkfifo)
    _replace(folder / "result.json.partial", os.mkfifo)
    _replace(folder / "SHA256SUMS", os.mkdir)
    _replace(folder / "checkpoints" / "12" / "state" / "manifest.ocdbt", os.mkfifo)
    train(crashed)
    assert (folder / "damaged" / "12").is_dir()
    assert_same_end(folder, peace.run_dir)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


@pytest.mark.timeout(120)
def test_notes_that_never_end_are_passed_over(crashed):
    for make in (os.mkfifo, _zeros_without_end):
        _replace(crashed.run_dir / "checkpoints" / "12" / "meta" / "metadata", make)
        newest, damaged = load_newest(crashed.run_dir / "checkpoints")
        assert newest.step == 8
        assert "Not a regular file" in damaged[12]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [os.mkfifo, _zeros_without_end])
def test_a_complete_run_whose_files_never_end_is_made_anew(peace, finished, make):
    for name in RUN_FILES:
        _replace(finished.run_dir / name, make)
    train(finished)
    assert_same_end(finished.run_dir, peace.run_dir)


def test_links_in_a_run_folder_lead_to_no_other_file(peace, crashed, tmp_path):
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    for name in (*RUN_FILES, "SHA256SUMS"):
        for path in (crashed.run_dir / name, crashed.run_dir / f"{name}.partial"):
            _replace(path, lambda path: path.symlink_to(treasure))
    train(crashed)
    assert_same_end(crashed.run_dir, peace.run_dir)
    (crashed.run_dir / "result.json").unlink()
    _replace(crashed.run_dir / "lock", lambda path: path.symlink_to(treasure))
    with pytest.raises(OSError, match=r"symbolic links: .*lock"):
        train(crashed)
    assert treasure.read_text() == "mine"


def test_the_sums_are_those_of_sha256sum(finished):
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=finished.run_dir, check=True)


def _npz(**arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _declare(path, shape):
    """Write an .npz whose header declares more entries than follow."""
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kernel.npy", member.getvalue() + b"\0" * 16)


def test_an_npz_is_measured_before_it_is_read(tmp_path):
    _declare(tmp_path / "huge.npz", (1_000_000, 1_000_000))
    with pytest.raises(ValueError, match=r"huge\.npz is not a whole \.npz of arrays: kernel.npy declares"):
        load_npz(tmp_path / "huge.npz")


def test_an_npz_with_objects_is_refused(tmp_path):
    (tmp_path / "objects.npz").write_bytes(_npz(weights=np.array([{}], object)))
    with pytest.raises(ValueError, match=r"declares .* of object"):
        load_npz(tmp_path / "objects.npz")


def test_every_cut_and_flip_of_an_npz_is_noticed_or_harmless(tmp_path):
    arrays = {"a/kernel": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.asfortranarray(np.eye(3))}
    content, path = _npz(**arrays), tmp_path / "weights.npz"
    damaged = [content[:end] for end in range(0, len(content), 7)]
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    for number, bad in enumerate(damaged):
        path.write_bytes(bad)
        try:
            read = load_npz(path)
        except ValueError:
            continue
        assert read.keys() == arrays.keys(), number
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[name], array, err_msg=str(number))


def test_an_interrupted_run_releases_its_folder(peace, tmp_path, monkeypatch):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run")
    crash_at(monkeypatch, config, step=9, error=Interrupted("stopped"))
    with locked(config.run_dir):
        pass
