"""The decoded images of a split, kept beside its records; used only if they are still what was decoded."""

import contextlib
import hashlib
from pathlib import Path

import numpy as np

from svb_jax._src.npz import load_npz
from svb_jax.training.cifar_binary import digest
from svb_jax.training.durable import writing_whole
from svb_jax.training.lock import FolderInUse, locked


def load_pixels(
    folder: Path, split: str, expected: str | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the images and labels that ``save_pixels`` has kept.

    Args:
      folder: Of the data set's version.
      split: ``train`` or ``test``.
      expected: The digest that they must have, if it is known from elsewhere.

    Returns:
      uint8 images (count, 32, 32, 3) and int32 labels (count,); None if there are none, or if they are
      damaged, of other shapes or types, or from other records than those in the folder.
    """
    try:
        kept = load_npz(_file(folder, split))
        images, labels = kept["images"], kept["labels"]
        saved = str(kept["source"]), str(kept["digest"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    is_right = images.dtype == np.uint8 and labels.dtype == np.int32
    is_right = is_right and images.shape == (*labels.shape, 32, 32, 3) and labels.ndim == 1
    found = digest(images, labels)
    if not is_right or saved != (_source(folder), found) or expected not in (None, found):
        return None
    return images, labels


def save_pixels(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Keep the images and labels; a read-only or a full disk costs time at the next start, nothing else."""
    # Who finds another process at it leaves it to that one.
    with contextlib.suppress(OSError, FolderInUse), locked(folder):
        source = _source(folder)
        with writing_whole(_file(folder, split)) as output:
            np.savez(output, images=images, labels=labels, source=source, digest=digest(images, labels))


def _file(folder: Path, split: str) -> Path:
    return folder / f"decoded_{split}.npz"


def _source(folder: Path) -> str:
    """Return what tells one set of records from another, without reading them."""
    files = sorted(path for path in folder.iterdir() if "array_record" in path.name)
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
