"""CIFAR's official binary layout, read from the archive or its folder; nothing is unpacked to disk."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from svb_jax.training.archive import walk

Origin = Literal["official", "modified", "unverified"]
"""Whether a data set is what its authors published; unverified if nothing is known to compare it with."""


@dataclass(frozen=True)
class Layout:
    """Where one of the two data sets keeps its records, and what its official archive is known by."""

    name: str
    folder: str
    files: Mapping[str, Mapping[str, int]]
    """For each split, the files in order, and how many images each holds."""
    labels: Mapping[str, tuple[str, int]]
    """In the order of the bytes that lead a record: the feature, the file of its names, how many."""
    url: str
    size: int
    sha256: str
    """Of the archive, as TFDS publishes it."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of each split's pixels and labels, if known."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The classes of each label, if known."""

    @property
    def archive(self) -> str:
        """The official archive's file name."""
        return self.url.rpartition("/")[2]

    @property
    def record_bytes(self) -> int:
        """One byte a label, then the red, the green and the blue plane of 32 x 32."""
        return len(self.labels) + 3072


class Records(NamedTuple):
    """The images of a split and their labels of each kind."""

    images: np.ndarray
    labels: dict[str, np.ndarray]


class Contents(NamedTuple):
    """What an archive holds."""

    splits: dict[str, Records]
    label_names: dict[str, list[str]]

    def digests(self) -> dict[str, str]:
        """Return the digest of each split."""
        return {
            split: digest(records.images, records.labels["label"]) for split, records in self.splits.items()
        }


MOST_BYTES_OF_NAMES = 100_000

CIFAR10 = Layout(
    name="cifar10",
    folder="cifar-10-batches-bin",
    files={
        "train": {f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
        "test": {"test_batch.bin": 10_000},
    },
    labels={"label": ("batches.meta.txt", 10)},
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    digests={
        "train": "72c15e60c081b70e34054cb162580e0d24094d4efdce45b6c8c1fe5acc39221e",
        "test": "8353b1fbf11acba6dc8b5e9d2fb108294de95b6e979d31428bf914289e4189c5",
    },
    names={
        "label": (
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        )
    },
)
CIFAR100 = Layout(
    name="cifar100",
    folder="cifar-100-binary",
    files={"train": {"train.bin": 50_000}, "test": {"test.bin": 10_000}},
    labels={"coarse_label": ("coarse_label_names.txt", 20), "label": ("fine_label_names.txt", 100)},
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    size=168_513_733,
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)


def read_contents(layout: Layout, source: Path) -> Contents:
    """Read the official archive, the folder that it unpacks to, or the folder around that.

    Args:
      layout: Which data set to expect.
      source: The archive or the folder.

    Returns:
      Every record, in the order of the files.

    Raises:
      FileNotFoundError: There is nothing at ``source``.
      ValueError: It is not the binary archive, or it is damaged; the message says in what way.
    """
    files = _read_files(layout, source)
    splits = {
        split: _parse(layout, split, b"".join(files[name] for name in names))
        for split, names in layout.files.items()
    }
    label_names = {
        label: _parse_names(file, files[file], count) for label, (file, count) in layout.labels.items()
    }
    return Contents(splits, label_names)


def digest(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the SHA-256 of all pixels, image by image, and then of all labels, four bytes each."""
    whole = hashlib.sha256(np.ascontiguousarray(images).data)
    whole.update(labels.astype("<i4").tobytes())
    return whole.hexdigest()


def origin_of(layout: Layout, source: Path, contents: Contents) -> Origin:
    """Compare what was read with what is known of the official data set.

    Args:
      layout: The data set.
      source: The archive or the folder that was read.
      contents: What it holds.

    Returns:
      ``official``, ``modified``, or ``unverified`` for a folder of a data set whose digests are not known.
    """
    if layout.digests:
        names = {label: tuple(contents.label_names[label]) for label in layout.names}
        is_official = contents.digests() == layout.digests and names == layout.names
    elif source.is_file():
        with source.open("rb") as file:
            is_official = hashlib.file_digest(file, "sha256").hexdigest() == layout.sha256
    else:
        return "unverified"
    return "official" if is_official else "modified"


def _read_files(layout: Layout, source: Path) -> dict[str, bytes]:
    sizes = {name: n * layout.record_bytes for split in layout.files.values() for name, n in split.items()}
    needed = {*sizes, *(file for file, _ in layout.labels.values())}
    contents: dict[str, bytes] = {}
    seen: set[str] = set()
    for file in walk(source, layout.folder, max(sizes.values()), f"Fetch {layout.url} anew."):
        seen.update(file.path.parts)
        name = file.path.name
        if name not in needed:
            continue
        # The size comes before the reading: a file that is far too long must not fill the memory.
        if file.size != sizes.get(name, file.size):
            raise ValueError(
                f"{name} in {source} must have {sizes[name]:,} bytes, {layout.record_bytes:,} a record, "
                f"got {file.size:,}: it is cut short or damaged. Fetch {layout.url} anew."
            )
        if name not in sizes and file.size > MOST_BYTES_OF_NAMES:
            raise ValueError(
                f"{name} in {source} must be a list of names, got {file.size:,} bytes. "
                f"Fetch {layout.url} anew."
            )
        if name in contents:
            raise ValueError(f"{source} holds {name} twice: it is not the official {layout.archive}.")
        contents[name] = file.read()
    _require_all(layout, source, needed - contents.keys(), seen)
    return contents


def _require_all(layout: Layout, source: Path, missing: set[str], seen: set[str]) -> None:
    if not missing:
        return
    if seen & {"cifar-10-batches-py", "cifar-100-python", "batches.meta", "meta", "data_batch_1"}:
        raise ValueError(
            f"{source} is the Python version of the data set, which is made of pickles, and a pickle can "
            f"run any code when it is loaded. Use the binary version, {layout.archive}, from {layout.url}."
        )
    raise ValueError(
        f"{source} lacks {', '.join(sorted(missing))}: {layout.name} needs {layout.archive} or its folder "
        f"{layout.folder}/, from {layout.url}."
    )


def _parse(layout: Layout, split: str, data: bytes) -> Records:
    records = np.frombuffer(data, np.uint8).reshape(-1, layout.record_bytes)
    planes = records[:, len(layout.labels) :].reshape(-1, 3, 32, 32)
    labels = {label: records[:, column].astype(np.int32) for column, label in enumerate(layout.labels)}
    for label, (_, count) in layout.labels.items():
        per_class = np.bincount(labels[label], minlength=count)
        # Every class of either data set is equally frequent: a shifted or foreign file never is.
        if len(per_class) != count or per_class.min() != per_class.max():
            raise ValueError(
                f"The {split} records of {layout.name} must have {len(records) // count:,} of each of "
                f"{count} values of {label}, got counts from {per_class.min():,} to {per_class.max():,} "
                f"of {len(per_class)}: the files are damaged. Fetch {layout.url} anew."
            )
    return Records(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)


def _parse_names(file: str, data: bytes, count: int) -> list[str]:
    # Every byte is a Latin-1 character, and only the printable ASCII ones can be in a name.
    names = [line.strip() for line in data.decode("latin-1").split("\n") if line.strip()]
    wrong = [name for name in names if not (name.isascii() and name.isprintable())]
    if wrong:
        raise ValueError(f"{file} must name the classes in printable ASCII, got {wrong[0]!a}.")
    if len(names) != count:
        raise ValueError(f"{file} must name {count} classes, a line each, got {len(names)}.")
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"{file} must name {count} different classes, got {repeated[0]!r} more than once.")
    return names
