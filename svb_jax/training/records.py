"""Data sets that TFDS prepared on disk as ArrayRecord, read without TensorFlow."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from svb_jax._src.regular_files import check_regular
from svb_jax.training.cifar_binary import digest
from svb_jax.training.pixels import load_pixels, save_pixels
from svb_jax.training.provenance import Provenance, read_provenance

_HOW_TO_GET = {
    "cifar10": "`svb data download --name cifar10`, or, without a network, "
    "`svb data import --name cifar10 --from cifar-10-binary.tar.gz`",
    "cifar100": "`svb data download --name cifar100`, or, without a network, "
    "`svb data import --name cifar100 --from cifar-100-binary.tar.gz`",
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
    provenance: Provenance = field(default_factory=Provenance)

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
      OSError: It is damaged.
    """
    if name not in _HOW_TO_GET:
        raise ValueError(f"find_dataset needs one of {', '.join(_HOW_TO_GET)}, got {name!r}.")
    # TFDS's own answer to a missing data set speaks of file formats and conversion: look first.
    versions = stored_versions(name, data_dir)
    if not versions:
        raise FileNotFoundError(f"There is no {name} in {data_dir.resolve()}. Get it by {_HOW_TO_GET[name]}.")
    folder = versions[max(versions)]
    try:
        for path in folder.iterdir():
            if not path.is_dir():
                check_regular(path)
        file_format = json.loads((folder / "dataset_info.json").read_bytes()).get("fileFormat", "tfrecord")
        dataset = _describe(folder) if file_format == "array_record" else None
    except ImportError:
        raise
    # TFDS meets damage with whatever its parsers raise.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise OSError(f"{folder} is damaged ({reason}). Remove it, and get the data set again.") from error
    if dataset is None:
        raise ValueError(f"{name} must be stored as array_record, got {file_format} in {folder}.")
    return replace(dataset, provenance=read_provenance(folder))


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

    Raises:
      OSError: The records are damaged.
    """
    expected = dataset.provenance.digests.get(split)
    kept = load_pixels(dataset.folder, split, expected)
    if kept is not None:
        return kept
    images, labels = _decode_split(dataset, split)
    found = digest(images, labels)
    if expected not in (None, found):
        raise OSError(_damaged(dataset, f"the {split} images have SHA-256 {found}, not {expected}"))
    save_pixels(dataset.folder, split, images, labels)
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


def _decode_split(dataset: StoredDataset, split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray]:
    count = dataset.num_test if split == "test" else dataset.num_train
    try:
        # A damaged description may promise more images than fit into any memory.
        images, labels = np.zeros((count, 32, 32, 3), np.uint8), np.full(count, -1, np.int32)
        for example in dataset.open(split):
            # TFDS shuffles as it writes; the ids (train_00017) remember the order of the official files.
            place = int(example["id"].rpartition(b"_")[2])
            images[place] = np.asarray(decode_image(example["image"]))
            labels[place] = example["label"]
    # TFDS, ArrayRecord and Pillow meet damage with whatever they like.
    except Exception as error:
        raise OSError(_damaged(dataset, str(error).strip().partition("\n")[0][:200])) from error
    if not ((labels >= 0) & (labels < dataset.num_classes)).all():
        raise OSError(_damaged(dataset, f"{split} images are missing, or have impossible labels"))
    return images, labels


def _damaged(dataset: StoredDataset, reason: str) -> str:
    return f"{dataset.folder} is damaged ({reason}). Remove it, and get the data set again."
