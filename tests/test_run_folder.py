"""A run's folder: one process at a time, one configuration, and files that are made anew if damaged."""

import dataclasses
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from svb_jax._src.npz import load_npz
from svb_jax.experiments import deep_linear, record, transformer
from svb_jax.experiments.__main__ import main
from svb_jax.experiments.run_files import write_run
from svb_jax.training import Interrupted, train
from svb_jax.training.checkpoint import CheckpointError, load_newest, saved_steps
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.config import to_fields
from svb_jax.training.durable import RUN_FILES, altered, set_aside
from svb_jax.training.lock import FolderInUse, locked
from svb_jax.training.run_folder import RunFolder
from svb_jax.training.saving import OUTDATED
from svb_jax.training.session import Session
from tests.faults.processes import Forked
from tests.faults.runs import QUICK, QUICK_OPTIONS, assert_same_end, to_words, wait_for_step
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


def test_the_best_checkpoint_does_not_go_in_silence(peace, crashed, capsys):
    # Without its error, it would give way to the next one.
    _flip_a_bit(crashed.run_dir / "checkpoints" / "8" / "meta" / "metadata")
    train(dataclasses.replace(crashed, keep_checkpoints=1))
    assert "The checkpoint of step 8 " in capsys.readouterr().err
    assert (crashed.run_dir / "damaged" / "8" / "state").is_dir()
    assert_same_end(crashed.run_dir, peace.run_dir)


def test_what_is_lost_while_a_run_goes_on_is_made_anew(peace, tmp_path, monkeypatch, capsys):
    config, evaluate = dataclasses.replace(peace, run_dir=tmp_path / "run"), Session.evaluate

    def lose(session, *arguments):
        if (config.run_dir / "metrics.jsonl").read_text().count("\n") == 2:
            for name in ("metrics.jsonl", "spectrum.npz"):
                (config.run_dir / name).unlink()
                (config.run_dir / name).touch()
            (config.run_dir / "config.json").write_text("{}")
        return evaluate(session, *arguments)

    monkeypatch.setattr(Session, "evaluate", lose)
    train(config)
    assert "metrics.jsonl is damaged or gone, and is made anew" in capsys.readouterr().err
    assert_same_end(config.run_dir, peace.run_dir)
    np.testing.assert_equal(*(load_npz(run.run_dir / "spectrum.npz") for run in (config, peace)))
    assert json.loads((config.run_dir / "config.json").read_text()) == to_fields(config)
    assert altered(config.run_dir, RUN_FILES) == []


def test_nothing_is_left_of_a_run_that_died_before_its_first_checkpoint(peace, tmp_path, monkeypatch):
    config = dataclasses.replace(peace, run_dir=tmp_path / "run")
    crash_at(monkeypatch, dataclasses.replace(config, depth=3), step=2)
    train(config)
    np.testing.assert_equal(*(load_npz(run.run_dir / "spectrum.npz") for run in (config, peace)))


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


def test_a_lock_holds_when_its_file_is_removed(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(FolderInUse, match="in use by another process"), locked(tmp_path):
            pass
    with locked(tmp_path) as is_locked:
        assert is_locked


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


@pytest.mark.parametrize(
    ("name", "value"), [("test_error", "5"), ("steps", 1.5), ("jax", None), ("seconds", [])]
)
def test_a_result_of_other_types_without_sums_is_made_anew(peace, finished, name, value):
    (finished.run_dir / "SHA256SUMS").unlink()
    path = finished.run_dir / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert dataclasses.asdict(train(finished))[name] != value
    assert_same_end(finished.run_dir, peace.run_dir)


@pytest.mark.parametrize("run_dir", ["", ".", "there/..", "link", "absolute"])
def test_a_run_does_not_settle_in_the_current_folder(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    asked = tmp_path if run_dir == "absolute" else Path(run_dir)
    with pytest.raises(ValueError, match=r"needs a run_dir of its own, got .*, the current folder"):
        dataclasses.replace(QUICK, run_dir=asked)
    assert dataclasses.replace(QUICK, run_dir=Path("there")).run_dir == Path("there")


@pytest.mark.parametrize("name", ["run_dir", "data_dir"])
@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket", "file:///tmp/run"])
def test_the_address_of_a_bucket_does_not_become_a_local_folder(name, address):
    refused = rf"TrainConfig needs {name} in a file system \(mount the bucket\), got '{address[:2]}"
    with pytest.raises(ValueError, match=refused):
        dataclasses.replace(QUICK, **{name: Path(address)})


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["train", *to_words(tmp_path, QUICK_OPTIONS)]) == 2
    assert capsys.readouterr().err == (
        f"train needs a run_dir of its own, got {tmp_path}, whose config.json is of something else.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["*", "?", "[1]", "a\\b"])
def test_a_path_that_orbax_misreads_is_refused_and_a_link_will_do(name, crashed, tmp_path):
    folder = tmp_path / name / "run"
    shutil.copytree(crashed.run_dir, folder)
    with pytest.raises(ValueError, match=r"train needs a run_dir without \*, \?, \[ and \\ in its path"):
        train(dataclasses.replace(crashed, run_dir=folder))
    (tmp_path / "link").symlink_to(folder)
    train(dataclasses.replace(crashed, run_dir=tmp_path / "link"))


@pytest.mark.parametrize("name", ["checkpoints", "damaged", "."])
def test_a_file_in_place_of_a_folder_gets_a_sentence(name, tmp_path, capsys):
    run_dir = tmp_path / "run"
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.write_text("in the way")
    assert main(["train", *to_words(run_dir, QUICK_OPTIONS)]) == 1
    assert capsys.readouterr().err == f"{path} must be a folder, got something else. Move it away.\n"


def test_a_folder_in_place_of_the_lock_gets_a_sentence(tmp_path, capsys):
    lock = tmp_path / "run" / "lock"
    lock.mkdir(parents=True)
    assert main(["train", *to_words(lock.parent, QUICK_OPTIONS)]) == 1
    assert capsys.readouterr().err.endswith(f"{lock} must be a file, got a folder or a link. Move it away.\n")


def test_a_run_whose_checkpoints_are_moved_away_ends_as_in_peace(tmp_path):
    options = {**QUICK_OPTIONS, "epochs": 12}
    Forked(tmp_path / "peace", **options).finish()
    run = tmp_path / "run"
    process = Forked(run, **options)
    wait_for_step(process, run, 3)
    (run / "checkpoints").rename(run / "moved")
    code, output = process.end()
    # In the middle of a save it stops with a sentence; otherwise it goes on in a new folder.
    if code != 0:
        assert "could not be saved" in output.splitlines()[-1], output
        Forked(run, **options).finish()
    assert_same_end(run, tmp_path / "peace")
    newest, damaged = load_newest(run / "moved")
    assert newest is not None
    assert damaged == {}


@pytest.mark.parametrize("row", [deep_linear.EXPERIMENT, transformer.EXPERIMENT], ids=lambda row: row.name)
def test_a_run_in_one_go_keeps_others_out(row, tmp_path):
    config = row.configure(next(iter(row.rows)), runs=tmp_path, scale="smoke", seed=0)
    with locked(config.run_dir), pytest.raises(FolderInUse, match="in use by process"):
        row.train(config)


def test_a_run_in_one_go_is_written_whole_and_with_sums(tmp_path):
    config = deep_linear.LinearConfig(run_dir=tmp_path / "deep_linear" / "svb" / "smoke" / "seed0")
    spectrum = {"initial/layer/kernel": np.ones(3), "final/layer/kernel": np.ones(3)}
    write_run(config, [{"epoch": 1, "test_error": 0.5}], spectrum, {"seconds": 1.0})
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=config.run_dir, check=True)
    assert {path.name for path in config.run_dir.iterdir()} == {*RUN_FILES, "SHA256SUMS"}
    assert record.read_run(config.run_dir).metrics == [{"epoch": 1, "test_error": 0.5}]
    _flip_a_digit(config.run_dir / "metrics.jsonl")
    with pytest.raises(record.DamagedRunError, match=r"metrics\.jsonl in .* is damaged"):
        record.read_run(config.run_dir)


def test_a_run_in_one_go_that_dies_while_it_writes_is_not_complete(tmp_path, monkeypatch):
    config = deep_linear.LinearConfig(run_dir=tmp_path / "run")
    for last in RUN_FILES:

        def die(partial, path, last=last):
            if path.name == last:
                raise KeyboardInterrupt
            os.replace(partial, path)

        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            write_run(config, [], {}, {"seconds": 1.0})
        assert not record.is_complete(config.run_dir)


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


@pytest.mark.parametrize("name", ["15", "16", "99"])
def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(name, peace, crashed, capsys):
    (crashed.run_dir / "checkpoints" / "12").rename(crashed.run_dir / "checkpoints" / name)
    train(crashed)
    assert f"The checkpoint of step {name} is that of step 12; it is now in" in capsys.readouterr().err
    assert saved_steps(crashed.run_dir / "checkpoints") == [12, 16]
    assert_same_end(crashed.run_dir, peace.run_dir)


@pytest.mark.parametrize("name", ["0012", "١٢", "12 (copy)", "-12", "12.old"])
def test_names_that_only_resemble_a_step_are_left_alone(name, peace, crashed):
    folder = crashed.run_dir / "checkpoints"
    (folder / "12").rename(folder / name)
    train(crashed)
    assert (folder / name / "meta" / "metadata").is_file()
    assert saved_steps(folder) == [12, 16]
    assert_same_end(crashed.run_dir, peace.run_dir)


def test_an_older_checkpoint_of_another_run_is_not_continued(crashed, tmp_path, monkeypatch):
    other = dataclasses.replace(crashed, run_dir=tmp_path / "other", seed=7)
    crash_at(monkeypatch, other, step=14)
    ours, theirs = (run.run_dir / "checkpoints" for run in (crashed, other))
    shutil.rmtree(ours / "8")
    shutil.copytree(theirs / "8", ours / "8")
    _flip_a_bit(ours / "12" / "state" / "manifest.ocdbt")
    with pytest.raises(ValueError, match=r"cannot continue the run in .*: it has seed=7, not 0"):
        train(crashed)


def test_a_damaged_checkpoint_on_another_disk_is_set_aside(peace, crashed, monkeypatch):
    def rename(source, target):
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        original(source, target)

    original = os.rename
    _flip_a_bit(crashed.run_dir / "checkpoints" / "12" / "meta" / "metadata")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert set_aside(crashed.run_dir / "checkpoints" / "12", crashed.run_dir).is_dir()
    train(crashed)
    assert_same_end(crashed.run_dir, peace.run_dir)


def test_nothing_is_set_aside_where_a_link_leads_to(peace, crashed, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "metrics.jsonl").write_text("mine")
    (crashed.run_dir / "damaged").symlink_to(theirs)
    _cut_a_line(crashed.run_dir / "metrics.jsonl")
    train(crashed)
    assert (theirs / "metrics.jsonl").read_text() == "mine"
    assert (crashed.run_dir / "damaged" / "metrics.jsonl").is_file()
    assert_same_end(crashed.run_dir, peace.run_dir)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to(path.parents[2])])
def test_what_stands_where_old_checkpoints_go_is_removed(make, peace, crashed, tmp_path):
    make(crashed.run_dir / "checkpoints" / OUTDATED)
    before = sorted(tmp_path.iterdir())
    train(crashed)
    assert sorted(tmp_path.iterdir()) == before
    assert not os.path.lexists(crashed.run_dir / "checkpoints" / OUTDATED)
    assert_same_end(crashed.run_dir, peace.run_dir)


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
    with pytest.raises(OSError, match=r"lock must be a file, got a folder or a link"):
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
