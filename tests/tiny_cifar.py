"""CIFAR's official binary files with a few images each, written by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from svb_jax.training.cifar_binary import CIFAR10, CIFAR100, Layout

# The digests were computed once from what is written here, by hashlib alone.
TINY10 = replace(
    CIFAR10,
    files={"train": {f"data_batch_{i}.bin": 4 for i in range(1, 6)}, "test": {"test_batch.bin": 10}},
    digests={
        "train": "371af2140769b1d95c90dc30d5b75705e67c0e2e2e8437b8c814a208ca2e7a0c",
        "test": "56e95485b40fe3d3c1b1d13f22e83b845668f6b1653f686a057364c4fb215863",
    },
    names={"label": tuple(f"b_class_{i}" for i in range(10))},
)
TINY100 = replace(CIFAR100, files={"train": {"train.bin": 200}, "test": {"test.bin": 100}})
# How many values each has, as the data sets' home page orders them: coarse before fine.
LEADING_BYTES = {"cifar10": (10,), "cifar100": (20, 100)}


def write_tiny_cifar(layout: Layout, folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write the folder, and return each split's images and fine labels."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for split, files in layout.files.items():
        count = sum(files.values())
        images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
        kinds = [np.arange(count) % classes for classes in LEADING_BYTES[layout.name]]
        records = [
            bytes([int(kind[i]) for kind in kinds]) + b"".join(images[i, :, :, c].tobytes() for c in range(3))
            for i in range(count)
        ]
        start = 0
        for name, length in files.items():
            (folder / name).write_bytes(b"".join(records[start : start + length]))
            start += length
        written[split] = images, kinds[-1]
    for file, classes in layout.labels.values():
        (folder / file).write_text("".join(f"{file[0]}_class_{i}\n" for i in range(classes)) + "\n")
    return written
