"""Data sets that TFDS prepared on disk as ArrayRecord, read without TensorFlow."""

import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

_HOW_TO_GET = {
    "cifar10": "`python -m experiments data download --name cifar10`, or, without a network, "
    "`python -m experiments data import --name cifar10 --from cifar-10-binary.tar.gz`",
    "cifar100": "`python -m experiments data download --name cifar100`, or, without a network, "
    "`python -m experiments data import --name cifar100 --from cifar-100-binary.tar.gz`",
    "imagenet2012": "TFDS, which needs TensorFlow once and the archives of https://image-net.org: "
    "`tfds build imagenet2012 --file_format=array_record`",
}


@dataclass(frozen=True)
class StoredDataset:
    """A data set on disk. It can be sent to other processes, and opened there."""

    folder: Path
    num_classes: int
    num_train: int
    num_test: int
    test_split: str
    """What TFDS calls the split to test on: ImageNet's own test images have no labels."""

    def open(self, split: Literal["train", "test"]) -> Sequence[dict[str, Any]]:
        """Open a split for random access; its images stay the bytes of their JPEG or PNG files."""
        import tensorflow_datasets as tfds  # takes seconds: only for those who read such a data set

        stored_split = self.test_split if split == "test" else split
        builder: Any = tfds.builder_from_directory(self.folder)
        return builder.as_data_source(stored_split, decoders={"image": tfds.decode.SkipDecoding()})


def find_dataset(name: str, data_dir: Path) -> StoredDataset:
    """Find the newest version of a data set under ``data_dir``.

    Args:
      name: ``cifar10``, ``cifar100`` or ``imagenet2012``.
      data_dir: The folder that holds one folder a data set.

    Returns:
      The data set, to be opened.

    Raises:
      FileNotFoundError: The data set is not there; the message says how to get it.
      ValueError: It is there, in another format than ArrayRecord.
    """
    if name not in _HOW_TO_GET:
        raise ValueError(f"find_dataset needs one of {', '.join(_HOW_TO_GET)}, got {name!r}.")
    # TFDS's own answer to a missing data set speaks of file formats and conversion: look first.
    versions = stored_versions(name, data_dir)
    if not versions:
        raise FileNotFoundError(f"There is no {name} in {data_dir.resolve()}. Get it by {_HOW_TO_GET[name]}.")
    folder = versions[max(versions)]
    file_format = json.loads((folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise ValueError(f"{name} must be stored as array_record, got {file_format} in {folder}.")
    return _describe(folder)


def stored_versions(name: str, data_dir: Path) -> dict[tuple[int, ...], Path]:
    """Return the folders of a data set's whole versions; unfinished ones have other names than numbers."""
    return {
        tuple(map(int, path.parent.name.split("."))): path.parent
        for path in (data_dir / name).glob("*/dataset_info.json")
        if re.fullmatch(r"\d+(\.\d+)*", path.parent.name)
    }


def read_split(dataset: StoredDataset, split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray]:
    """Read a whole split of CIFAR's images, in the order of the official files.

    The first reading decodes every image, half a minute for CIFAR-10, and leaves the pixels beside the
    records for the next one, where that folder can be written.

    Args:
      dataset: From ``find_dataset``.
      split: ``train`` or ``test``.

    Returns:
      uint8 images (count, 32, 32, 3), and int32 labels (count,).
    """
    cache = dataset.folder / f"decoded_{split}.npz"
    try:
        # numpy checks the sums of the zip archive: a damaged file is an error here, not a wrong pixel.
        with cache.open("rb") as file, np.load(file) as arrays:
            return arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        images, labels = _decode_split(dataset.open(split))
    # A read-only or a full disk costs time at the next start, nothing else.
    with suppress(OSError):
        _save_whole(cache, images, labels)
    return images, labels


def decode_image(data: bytes) -> Image.Image:
    """Decode a JPEG or PNG file to an RGB image, whatever its own colours are."""
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _describe(folder: Path) -> StoredDataset:
    import tensorflow_datasets as tfds

    info: Any = tfds.builder_from_directory(folder).info
    test_split = "validation" if "validation" in info.splits else "test"
    return StoredDataset(
        folder,
        num_classes=info.features["label"].num_classes,
        num_train=info.splits["train"].num_examples,
        num_test=info.splits[test_split].num_examples,
        test_split=test_split,
    )


def _decode_split(source: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    images = np.empty((len(source), 32, 32, 3), np.uint8)
    labels = np.empty(len(source), np.int32)
    for example in source:
        # TFDS shuffles as it writes; the ids (train_00017) remember the order of the official files.
        place = int(example["id"].rpartition(b"_")[2])
        images[place] = np.asarray(decode_image(example["image"]))
        labels[place] = example["label"]
    return images, labels


def _save_whole(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as workshop:
        np.savez(Path(workshop, path.name), images=images, labels=labels)
        os.replace(Path(workshop, path.name), path)
