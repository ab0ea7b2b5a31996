"""Bring CIFAR-10 and CIFAR-100 to disk as TFDS data sets, without TensorFlow."""

import contextlib
import hashlib
import http.client
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from svb_jax.training.cifar_binary import (
    CIFAR10,
    CIFAR100,
    Contents,
    Layout,
    Records,
    origin_of,
    read_contents,
)
from svb_jax.training.lock import locked
from svb_jax.training.provenance import Provenance, write_provenance
from svb_jax.training.records import stored_versions
from svb_jax.training.stopping import TidyingUp

LAYOUTS = {layout.name: layout for layout in (CIFAR10, CIFAR100)}
TIMEOUT_SECONDS = 5.0
WORKSHOP = ".importing-"


def import_archive(name: str, source: Path, data_dir: Path, *, modified: bool = False) -> Path:
    """Write an official binary archive as the TFDS data set of the same name.

    Any program can read the result, ``tfds.data_source(name, data_dir=...)``. It appears whole or not at
    all: an import that dies leaves nothing that could be taken for a data set.

    Args:
      name: ``cifar10`` or ``cifar100``.
      source: ``cifar-10-binary.tar.gz`` or ``cifar-100-binary.tar.gz``, or the folder that it unpacks to.
      data_dir: The folder that holds one folder a data set; made if need be.
      modified: Take a data set that is not known to be the official one; every run on it says so.

    Returns:
      The folder of the new data set.

    Raises:
      FileExistsError: The data set is already there.
      FileNotFoundError: There is nothing at ``source``.
      ValueError: The archive is damaged, not the binary one, or not known to be the official one; the message
        says in what way.
    """
    layout = _layout("import_archive", name)
    _refuse_existing(layout, data_dir)
    # Read before anything is written: a source that is refused leaves no trace.
    accepted = _read(layout, source, modified)
    with _workshop(data_dir) as workshop:
        return _write(layout, *accepted, data_dir, workshop)


def download(name: str, data_dir: Path) -> Path:
    """Fetch the official archive, check its hash, and import it.

    Args:
      name: ``cifar10`` or ``cifar100``.
      data_dir: As for ``import_archive``.

    Returns:
      The folder of the new data set.

    Raises:
      ConnectionError: The archive cannot be fetched; the message names the other way.
      FileExistsError: The data set is already there.
    """
    layout = _layout("download", name)
    _refuse_existing(layout, data_dir)
    with _workshop(data_dir) as workshop:
        archive = workshop / layout.archive
        with archive.open("wb") as file:
            _fetch(layout, file)
        return _write(layout, *_read(layout, archive, modified=False), data_dir, workshop)


@contextlib.contextmanager
def _workshop(data_dir: Path) -> Iterator[Path]:
    """Yield a folder to work in, beside the target: the last step is a rename within a file system."""
    # Takes seconds, and a signal that raises in the middle of it could become any error.
    import tensorflow_datasets  # noqa: F401

    with locked(data_dir, "data_dir") as is_locked, TidyingUp("Stopped. Nothing was imported."):
        # One import at a time: what others have left belongs to no living process. Without locks it might.
        for left in data_dir.glob(f"{WORKSHOP}*") if is_locked else ():
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=WORKSHOP, dir=data_dir) as workshop:
            yield Path(workshop)


def _read(layout: Layout, source: Path, modified: bool) -> tuple[Contents, Provenance]:
    contents = read_contents(layout, source)
    origin, digests = origin_of(layout, source, contents), contents.digests()
    if origin != "official" and not modified:
        reason = (
            f"is not the official {layout.name}: its pixels, labels or class names differ"
            if origin == "modified"
            else f"cannot be verified: of {layout.name} only the hash of {layout.archive} is known"
        )
        found = ", ".join(f"{split} {value}" for split, value in digests.items())
        raise ValueError(
            f"{source} {reason} (SHA-256 {found}). Nothing was imported. Fetch {layout.url} anew; or, if "
            "this data set is wanted as it is, ask for it by --modified, and every run will say so."
        )
    # What nobody can verify must not pass for official.
    return contents, Provenance(origin="official" if origin == "official" else "modified", digests=digests)


def _write(
    layout: Layout, contents: Contents, provenance: Provenance, data_dir: Path, workshop: Path
) -> Path:
    builder = _builder(layout, contents, workshop)
    # TFDS would say that it downloads, and name the workshop as the place where the data set stays.
    with contextlib.redirect_stdout(None):
        builder.download_and_prepare()
    write_provenance(Path(builder.data_dir), provenance)
    (data_dir / layout.name).mkdir(exist_ok=True)
    return Path(builder.data_dir).rename(data_dir / layout.name / str(builder.version))


def _layout(function: str, name: str) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"{function} needs one of {', '.join(LAYOUTS)}, got {name!r}.")
    return LAYOUTS[name]


def _refuse_existing(layout: Layout, data_dir: Path) -> None:
    for folder in stored_versions(layout.name, data_dir).values():
        raise FileExistsError(f"{layout.name} is already in {folder}; remove that folder to make it anew.")


def _fetch(layout: Layout, file: BinaryIO) -> None:
    digest = hashlib.sha256()
    for chunk in _chunks(layout):
        digest.update(chunk)
        file.write(chunk)
    if digest.hexdigest() != layout.sha256:
        raise ConnectionError(
            f"{layout.url} sent a file with SHA-256 {digest.hexdigest()}, the official archive has "
            f"{layout.sha256}. It was thrown away; try again."
        )


def _chunks(layout: Layout) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(layout.url, timeout=TIMEOUT_SECONDS) as response:
            while chunk := response.read(1 << 20):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"Cannot fetch {layout.url} ({error}). Bring {layout.archive} here in another way, and run "
            f"`svb data import --name {layout.name} --from {layout.archive}`."
        ) from error


def _builder(layout: Layout, contents: Contents, data_dir: Path) -> Any:
    """Make TFDS's own builder take its records from ``contents``: it reads its files by TensorFlow."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    stock: Any = tfds.builder_cls(layout.name)
    # A second class of the stock one's name, which TFDS must go on finding under that name.
    with registered.skip_registration():

        class Imported(stock):
            name = layout.name

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                for label, names in contents.label_names.items():
                    self.info.features[label].names = names
                return {split: _examples(split, records) for split, records in contents.splits.items()}

    return Imported(data_dir=data_dir, file_format="array_record")


def _examples(split: str, records: Records) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, pixels in enumerate(records.images):
        labels = {label: int(values[index]) for label, values in records.labels.items()}
        # TFDS turns arrays into PNG by TensorFlow, and Pillow's images by Pillow.
        yield index, {"id": f"{split}_{index:05d}", "image": Image.fromarray(pixels), **labels}
