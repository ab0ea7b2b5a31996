import bz2
import errno
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from svb_jax.experiments.data import Download, Import
from svb_jax.training import importing, train
from svb_jax.training.cifar_binary import CIFAR10, CIFAR100
from svb_jax.training.data import load
from svb_jax.training.importing import download, import_archive
from svb_jax.training.lock import FolderInUse, locked
from svb_jax.training.stopping import Interrupted
from tests.faults.runs import QUICK
from tests.test_checkpoint import crash_at
from tests.tiny_cifar import TINY10, TINY100, write_tiny_cifar


@pytest.fixture(autouse=True)
def _tiny_layouts(monkeypatch):
    monkeypatch.setitem(importing.LAYOUTS, "cifar10", TINY10)
    monkeypatch.setitem(importing.LAYOUTS, "cifar100", TINY100)


@pytest.fixture
def folder(tmp_path):
    """The official folder of a tiny CIFAR-10, inside ``tmp_path / "download"``."""
    write_tiny_cifar(TINY10, tmp_path / "download" / TINY10.folder)
    return tmp_path / "download" / TINY10.folder


def pack(folder: Path) -> Path:
    archive = folder.parent.parent / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def assert_refused(source, data_dir, match, name="cifar10"):
    with pytest.raises(ValueError, match=match):
        import_archive(name, source, data_dir)
    assert not list(data_dir.glob("**/*"))


@pytest.mark.parametrize("form", ["archive", "folder", "folder around it"])
def test_tfds_reads_what_was_imported(form, folder, tmp_path):
    source = {"archive": pack(folder), "folder": folder, "folder around it": folder.parent}[form]
    target = import_archive("cifar10", source, tmp_path / "data")
    assert target == tmp_path / "data" / "cifar10" / "3.0.2"
    examples = list(tfds.data_source("cifar10", data_dir=tmp_path / "data", split="train"))
    assert len(examples) == 20
    first = np.fromfile(folder / "data_batch_1.bin", np.uint8)[:3073]
    (stored,) = [example for example in examples if example["id"] == b"train_00000"]
    assert stored["label"] == first[0]
    for channel in range(3):
        plane = first[1 + 1024 * channel : 1025 + 1024 * channel].reshape(32, 32)
        assert np.array_equal(stored["image"][:, :, channel], plane)
    names = tfds.builder("cifar10", data_dir=tmp_path / "data").info.features["label"].names
    assert names == [f"b_class_{i}" for i in range(10)]
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"cifar10", "lock"}


def test_cifar100_keeps_both_labels_and_loads_the_fine_one(tmp_path):
    expected = write_tiny_cifar(TINY100, tmp_path / TINY100.folder)
    import_archive("cifar100", tmp_path, tmp_path / "data", modified=True)
    dataset = load("cifar100", tmp_path / "data")
    assert dataset.num_classes == 100
    assert np.array_equal(dataset.train.images, expected["train"][0])
    assert np.array_equal(dataset.train.labels, np.arange(200) % 100)
    for example in tfds.data_source("cifar100", data_dir=tmp_path / "data", split="test"):
        assert example["coarse_label"] == int(example["id"][5:]) % 20


def test_official_sizes_and_hashes_are_those_that_tfds_publishes():
    checksums = Path(tfds.__path__[0], "url_checksums")
    for layout in (CIFAR10, CIFAR100):
        line = (checksums / f"{layout.name}.txt").read_text().split()
        assert line[:3] == [layout.url, str(layout.size), layout.sha256]
    assert {name: sum(files.values()) for name, files in CIFAR10.files.items()} == {
        "train": 50_000,
        "test": 10_000,
    }
    assert {name: sum(files.values()) for name, files in CIFAR100.files.items()} == {
        "train": 50_000,
        "test": 10_000,
    }


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_pickles_are_refused_and_never_loaded(form, tmp_path):
    folder = tmp_path / "download" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    source = pack(folder) if form == "archive" else folder
    assert_refused(source, tmp_path / "data", r"pickle.*Use the binary version, cifar-10-binary\.tar\.gz")


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside.txt"),
        tarfile.TarInfo("/absolute.txt"),
        tarfile.TarInfo("cifar-10-batches-bin/../../outside.txt"),
        *[tarfile.TarInfo("cifar-10-batches-bin/link") for _ in range(3)],
    ],
    ids=["parent", "absolute", "through the folder", "symbolic link", "hard link", "device"],
)
def test_members_that_point_outside_are_refused(member, folder, tmp_path, request):
    kinds = {"symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
    member.type = next((kinds[kind] for kind in kinds if kind in request.node.name), tarfile.REGTYPE)
    member.linkname = "/etc/passwd"
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname=folder.name)
        tar.addfile(member, io.BytesIO())
    assert_refused(archive, tmp_path / "data", member.name)
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize("lost", [100, 3073])
def test_a_file_cut_short_is_refused(lost, folder, tmp_path):
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-lost])
    match = rf"data_batch_3\.bin .* must have 12,292 bytes, 3,073 a record, got {12292 - lost:,}"
    assert_refused(folder, tmp_path / "data", match)
    assert_refused(pack(folder), tmp_path / "data", match)


def test_an_archive_cut_short_is_refused(folder, tmp_path):
    archive = pack(folder)
    archive.write_bytes(archive.read_bytes()[:-2000])
    assert_refused(archive, tmp_path / "data", "is not a whole tar archive")


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "page.tar.gz").write_text("<html>404 not found</html>")
    assert_refused(tmp_path / "page.tar.gz", tmp_path / "data", "is not a whole tar archive")


def test_a_missing_file_is_named(folder, tmp_path):
    (folder / "test_batch.bin").unlink()
    assert_refused(pack(folder), tmp_path / "data", r"lacks test_batch\.bin: cifar10 needs cifar-10-binary")


def test_the_other_data_set_is_refused(folder, tmp_path):
    assert_refused(
        folder, tmp_path / "data", r"lacks .*train\.bin: cifar100 needs cifar-100", name="cifar100"
    )


@pytest.mark.parametrize(("label", "found"), [(9, "from 1 to 3 of 10"), (200, "from 0 to 2 of 201")])
def test_labels_that_are_not_balanced_are_refused(label, found, folder, tmp_path):
    file = folder / "data_batch_1.bin"
    file.write_bytes(bytes([label]) + file.read_bytes()[1:])
    assert_refused(
        folder, tmp_path / "data", f"must have 2 of each of 10 values of label, got counts {found}"
    )


def exchange_labels(folder):
    file = folder / "data_batch_1.bin"
    content = bytearray(file.read_bytes())
    content[0], content[3073] = content[3073], content[0]
    file.write_bytes(content)


def rename_a_class(folder):
    file = folder / "batches.meta.txt"
    file.write_text(file.read_text().replace("b_class_3", "dog"))


@pytest.mark.parametrize("modify", [exchange_labels, rename_a_class])
def test_a_modified_data_set_is_refused_unless_it_is_wanted(modify, folder, tmp_path):
    modify(folder)
    match = r"is not the official cifar10: its pixels, labels or class names differ .* --modified"
    assert_refused(folder, tmp_path / "data", match)
    assert_refused(pack(folder), tmp_path / "data", match)
    import_archive("cifar10", folder, tmp_path / "data", modified=True)
    assert load("cifar10", tmp_path / "data").origin == "modified"


def test_a_run_on_modified_data_says_so(folder, tmp_path, capsys):
    exchange_labels(folder)
    import_archive("cifar10", folder, tmp_path / "data", modified=True)
    config = replace(
        QUICK,
        dataset="cifar10",
        data_dir=tmp_path / "data",
        run_dir=tmp_path / "run",
        epochs=1,
        first=16,
        learning_rate_stages=1,
    )
    assert train(config).data_origin == "modified"
    assert "The cifar10 in" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data_origin"] == "modified"


def test_a_run_is_not_continued_on_other_data(folder, tmp_path, monkeypatch):
    import_archive("cifar10", folder, tmp_path / "data")
    exchange_labels(folder)
    import_archive("cifar10", folder, tmp_path / "other", modified=True)
    config = replace(
        QUICK,
        dataset="cifar10",
        data_dir=tmp_path / "data",
        run_dir=tmp_path / "run",
        first=None,
        batch_size=10,
    )
    crash_at(monkeypatch, config, step=6)
    with pytest.raises(ValueError, match=r"other images or labels: the cifar10 in .*other is not the one"):
        train(replace(config, data_dir=tmp_path / "other"))
    (tmp_path / "data").rename(tmp_path / "moved")
    train(replace(config, data_dir=tmp_path / "moved"))


def test_another_archive_of_cifar100_is_refused_and_so_is_a_folder(tmp_path):
    folder = tmp_path / "download" / TINY100.folder
    write_tiny_cifar(TINY100, folder)
    assert_refused(pack(folder), tmp_path / "data", "is not the official cifar100", name="cifar100")
    match = (
        r"cannot be verified: of cifar100 only the hash of cifar-100-binary\.tar\.gz is known .*--modified"
    )
    assert_refused(folder, tmp_path / "data", match, name="cifar100")
    import_archive("cifar100", folder, tmp_path / "data", modified=True)
    assert load("cifar100", tmp_path / "data").origin == "modified"


def test_the_official_archive_of_cifar100_is_known_by_its_hash(tmp_path, monkeypatch):
    folder = tmp_path / "download" / TINY100.folder
    write_tiny_cifar(TINY100, folder)
    archive = pack(folder)
    official = replace(TINY100, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(importing.LAYOUTS, "cifar100", official)
    import_archive("cifar100", archive, tmp_path / "data")
    assert load("cifar100", tmp_path / "data").origin == "official"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (b"caf\xc3\xa9", "printable ASCII, got 'caf"),
        (b"cat\0", r"printable ASCII, got 'cat\\x00'"),
        (b"b_class_4", "10 different classes, got 'b_class_4' more than once"),
    ],
)
def test_class_names_must_be_names(name, found, folder, tmp_path):
    file = folder / "batches.meta.txt"
    file.write_bytes(file.read_bytes().replace(b"b_class_3", name))
    assert_refused(folder, tmp_path / "data", found)


@pytest.mark.parametrize("kind", ["pipe", "endless device"])
@pytest.mark.timeout(20)
def test_pipes_and_devices_are_not_opened(kind, folder, tmp_path):
    file = folder / "batches.meta.txt"
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    assert_refused(folder, tmp_path / "data", r"batches\.meta\.txt must be a file, got a pipe, a device")


def archive_of(tmp_path, *members):
    """Write a compressed archive of (member, content) as they are, whatever they claim."""
    path = tmp_path / "archive.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for member, content in members:
            file.write(member.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * (-len(content) % 512))
        file.write(b"\0" * 1024)
    return path


def member(name, size, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_member_of_negative_size_is_refused(kind, tmp_path):
    archive = archive_of(tmp_path, (member("cifar-10-batches-bin/x", -1024, kind), b""))
    assert_refused(archive, tmp_path / "data", r"declares -1,024 bytes|not a whole tar archive|lacks")


@pytest.mark.timeout(20)
def test_too_many_members_are_refused(tmp_path):
    archive = archive_of(tmp_path, *((member(f"file{i}", 0), b"") for i in range(1100)))
    assert_refused(archive, tmp_path / "data", "must hold a few files, got more than 1000")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["batches.meta.txt", "unknown"])
def test_a_member_that_is_far_too_large_is_refused_unread(name, tmp_path):
    archive = archive_of(tmp_path, (member(f"cifar-10-batches-bin/{name}", 3 << 30), b"\0" * 100_000))
    assert_refused(archive, tmp_path / "data", r"declares 3,221,225,472 bytes\. Nothing was imported")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind",
    [
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    ],
)
def test_a_header_that_is_far_too_large_is_refused_unread(kind, tmp_path):
    archive = archive_of(tmp_path, (member("header", 50_000_000, kind), bytes(50_000_000)))
    tracemalloc.start()
    assert_refused(archive, tmp_path / "data", "'header' extends a header by 50,000,000 bytes")
    # A stream's buffer of one megabyte, and room for its copies.
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def pax(**fields):
    """The content of a pax header, each record with its own length in front."""
    content = b""
    for key, value in fields.items():
        record = f" {key}={value}\n".encode()
        length = len(record) + len(str(len(record)))
        content += str(length + (len(str(length)) > len(str(len(record))))).encode() + record
    return content


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fields", [{"GNU.sparse.major": 1, "GNU.sparse.minor": 0}, {"GNU.sparse.map": "0"}])
def test_a_map_of_holes_is_refused_unread(fields, tmp_path):
    content, holes = pax(**fields), b"9999999\n" + b"0\n" * 2_000_000
    archive = archive_of(
        tmp_path, (member("x", len(content), tarfile.XHDTYPE), content), (member("x", len(holes)), holes)
    )
    assert_refused(archive, tmp_path / "data", "'x' is sparse")


def test_an_old_map_of_holes_is_refused(tmp_path):
    archive = archive_of(tmp_path, (member("x", 0, tarfile.GNUTYPE_SPARSE), b""))
    assert_refused(archive, tmp_path / "data", "'x' is sparse")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "members",
    [
        [(member("x", 0, tarfile.XHDTYPE), b"")] * 5000,
        [(member("x", 60_000, tarfile.XHDTYPE), b"9" * 50_000 + b" size=1\n"), (member("x", 0), b"")],
    ],
    ids=["header after header", "a length of 50,000 digits"],
)
def test_headers_that_confuse_tarfile_get_a_sentence(members, tmp_path):
    assert_refused(archive_of(tmp_path, *members), tmp_path / "data", "is not a whole tar archive|lacks")


def test_an_archive_with_pax_headers_is_imported(folder, tmp_path):
    archive = tmp_path / "archive.tar"
    with tarfile.open(
        archive, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "a global one"}
    ) as tar:
        tar.add(folder, arcname=folder.name, filter=lambda info: info.replace(mtime=1.5, deep=False))
    import_archive("cifar10", archive, tmp_path / "data")
    assert len(load("cifar10", tmp_path / "data").train) == 20


def test_more_than_a_gigabyte_in_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("svb_jax.training.archive.MOST_BYTES", 100_000)
    archive = archive_of(tmp_path, *((member(f"file{i}", 12_000), bytes(12_000)) for i in range(100)))
    assert_refused(archive, tmp_path / "data", "it holds more than 100,000 bytes")


def test_a_member_that_is_there_twice_is_refused(folder, tmp_path):
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for _ in range(2):
            tar.add(folder, arcname=folder.name)
    assert_refused(archive, tmp_path / "data", r"holds \S+ twice")


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_other_compressions_are_refused(compress, folder, tmp_path):
    packed = gzip.decompress(pack(folder).read_bytes())
    archive = tmp_path / "archive.tar.gz"
    for content in (compress(packed), compress(packed)[:500]):
        archive.write_bytes(content)
        assert_refused(archive, tmp_path / "data", "is not a whole tar archive")


def test_class_names_must_be_complete(folder, tmp_path):
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    assert_refused(folder, tmp_path / "data", r"batches\.meta\.txt must name 10 classes, a line each, got 2")


def test_a_source_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder at .*nowhere"):
        import_archive("cifar10", tmp_path / "nowhere", tmp_path / "data")


def test_other_data_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="import_archive needs one of cifar10, cifar100, got 'mnist'"):
        import_archive("mnist", tmp_path, tmp_path)


def test_an_existing_data_set_is_left_alone(folder, tmp_path):
    target = import_archive("cifar10", folder, tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    for fetch in (import_archive, lambda name, _, data_dir: download(name, data_dir)):
        with pytest.raises(FileExistsError, match="already in"):
            fetch("cifar10", folder, tmp_path / "data")
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before


KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from pathlib import Path
from svb_jax.training import importing, train
from svb_jax.training.lock import FolderInUse, locked
from tests.faults.runs import QUICK
from tests.tiny_cifar import TINY10

def examples(split, records):
    for number, example in enumerate(original(split, records)):
        if split == "test" and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield example

importing.LAYOUTS["cifar10"] = TINY10
original, importing._examples = importing._examples, examples
importing.import_archive("cifar10", Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_an_import_that_is_killed_leaves_no_data_set(folder, tmp_path):
    data_dir = tmp_path / "data"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_THE_MIDDLE, folder, data_dir],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="There is no cifar10"):
        load("cifar10", data_dir)
    assert len(list(data_dir.glob(".importing-*"))) == 1
    import_archive("cifar10", folder, data_dir)
    assert len(load("cifar10", data_dir).train) == 20
    assert not list(data_dir.glob(".importing-*"))


def test_an_import_that_is_stopped_tidies_up(folder, tmp_path, monkeypatch):
    def examples(split, records):
        signal.raise_signal(signal.SIGTERM)
        yield from original(split, records)

    original = importing._examples
    monkeypatch.setattr(importing, "_examples", examples)
    with pytest.raises(Interrupted, match="Nothing was imported"):
        import_archive("cifar10", folder, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["lock"]


def test_without_locks_the_folder_of_another_import_is_left_alone(folder, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    living = tmp_path / "data" / ".importing-other"
    living.mkdir(parents=True)
    import_archive("cifar10", folder, tmp_path / "data")
    assert living.is_dir()


def test_two_imports_at_once_are_refused(folder, tmp_path):
    in_use = pytest.raises(FolderInUse, match=r"data is in use by process \d+ .* give another data_dir")
    with locked(tmp_path / "data"), in_use:
        import_archive("cifar10", folder, tmp_path / "data")


def serve(monkeypatch, archive: Path, sha256: str | None = None) -> None:
    """Let the official address be a file."""
    sha256 = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
    layout = replace(TINY10, url=archive.as_uri(), sha256=sha256)
    monkeypatch.setitem(importing.LAYOUTS, "cifar10", layout)


def test_download_checks_the_hash_and_imports(monkeypatch, folder, tmp_path, capsys):
    serve(monkeypatch, pack(folder))
    Download(name="cifar10", data_dir=tmp_path / "data").run()
    dataset = load("cifar10", tmp_path / "data")
    assert len(dataset.train) == 20
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"cifar10", "lock"}
    printed = capsys.readouterr().out
    assert "(official)" in printed
    assert f"test: 10 images, SHA-256 {dataset.test.digest()}" in printed


def test_a_download_with_another_hash_is_thrown_away(monkeypatch, folder, tmp_path):
    serve(monkeypatch, pack(folder), sha256="0" * 64)
    with pytest.raises(ConnectionError, match=f"the official archive has {'0' * 64}"):
        download("cifar10", tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["lock"]


def test_without_a_network_the_other_way_is_named(monkeypatch, tmp_path):
    layout = replace(TINY10, url="http://127.0.0.1:9/cifar-10-binary.tar.gz")  # nobody listens there
    monkeypatch.setitem(importing.LAYOUTS, "cifar10", layout)
    way = r"data import --name cifar10 --from cifar-10-binary\.tar\.gz"
    with pytest.raises(ConnectionError, match=way):
        download("cifar10", tmp_path)


def test_a_server_that_keeps_silent_is_given_up(monkeypatch, tmp_path):
    assert importing.TIMEOUT_SECONDS <= 10
    monkeypatch.setattr(importing, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        layout = replace(TINY10, url=f"http://127.0.0.1:{server.getsockname()[1]}/archive.tar.gz")
        monkeypatch.setitem(importing.LAYOUTS, "cifar10", layout)
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=r"timed out.*data import"):
            download("cifar10", tmp_path)
        assert time.monotonic() - start < 20


def test_the_command_reports_what_it_imported(folder, tmp_path, capsys):
    Import(name="cifar10", source=folder, data_dir=tmp_path / "data").run()
    digest = load("cifar10", tmp_path / "data").train.digest()
    assert f"train: 20 images, SHA-256 {digest}" in capsys.readouterr().out
