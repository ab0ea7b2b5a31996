"""The data sets that live in memory: digits, CIFAR-10 and CIFAR-100, and a synthetic one."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from svb_jax._src.suggestions import did_you_mean
from svb_jax.training.cifar_binary import Origin, digest
from svb_jax.training.records import find_dataset, read_split


@dataclass(frozen=True)
class Split:
    """Images and their labels."""

    images: np.ndarray
    """uint8, (count, height, width, channels)."""
    labels: np.ndarray
    """int32, (count,)."""

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """Return the SHA-256 of all pixels, image by image, and then of all labels, four bytes each."""
        return digest(self.images, self.labels)


@dataclass(frozen=True)
class Dataset:
    """A data set, whole and in memory."""

    name: str
    train: Split
    test: Split
    num_classes: int
    mirror: bool = True
    """Whether an image may be mirrored left to right and keep its label."""
    origin: Origin = "official"
    """Whether it is what its authors published."""

    def digest(self) -> str:
        """Return the SHA-256 of both splits' own."""
        return hashlib.sha256((self.train.digest() + self.test.digest()).encode()).hexdigest()


def load(
    name: str,
    data_dir: Path = Path("data"),
    *,
    first: int | None = None,
    holdout: int | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Load a data set into memory.

    ``digits`` are scikit-learn's 1,797 handwritten digits, 8 x 8, their 17 grey levels spread over 0 to
    255, each pixel repeated 4 x 4 and over three channels: 32 x 32 x 3, or exactly the native image at
    ``image_size=8``. The first 1,437 are for training, the last 360 for testing. ``synthetic`` is 640
    noisy pictures of ten coloured patterns, always the same. ``cifar10`` and ``cifar100`` are read from
    ``data_dir``, in the order of their official files.

    Args:
      name: ``digits``, ``synthetic``, ``cifar10`` or ``cifar100``.
      data_dir: Holds the data sets that do not come with this package.
      first: Keep only so many training images.
      holdout: Test on the last so many training images, which are not trained on, instead of the test set:
        what is chosen by these errors was not chosen on the test set.
      image_size: Average the images down to this size, which must divide their own. ``synthetic`` is
        made at any size.

    Returns:
      The data set.

    Raises:
      FileNotFoundError: The data set is not in ``data_dir``; the message says how to get it.

    Examples:
      >>> digits = load("digits", first=100, image_size=8)
      >>> digits.train.images.shape, len(digits.test), digits.num_classes
      ((100, 8, 8, 3), 360, 10)
    """
    if name == "synthetic":
        dataset = _synthetic(image_size or 32)
    elif name in _LOADERS:
        dataset = _LOADERS[name](Path(data_dir))
    else:
        known = [*_LOADERS, "synthetic"]
        raise ValueError(
            f"svb_jax.training needs one of {', '.join(known)} (or, to train on as a stream, imagenet2012), "
            f"got {name!r}.{did_you_mean(name, known)}"
        )
    if holdout is not None:
        dataset = _hold_out(dataset, holdout)
    if first is not None:
        dataset = replace(dataset, train=_first(dataset.train, first))
    if image_size is None:
        return dataset
    return replace(
        dataset,
        train=replace(dataset.train, images=average_down(dataset.train.images, image_size)),
        test=replace(dataset.test, images=average_down(dataset.test.images, image_size)),
    )


def average_down(images: np.ndarray, image_size: int) -> np.ndarray:
    """Shrink square images by averaging blocks of pixels.

    Args:
      images: Uint8, (count, size, size, channels).
      image_size: The new size, which must divide the old.

    Returns:
      uint8 images of the new size, rounded to the nearest level (a half to the even one).

    Examples:
      >>> average_down(np.array([0, 10, 20, 30], np.uint8).reshape(1, 2, 2, 1), 1).item()
      15
    """
    count, size, _, channels = images.shape
    if image_size < 1 or size % image_size:
        raise ValueError(f"average_down needs a size that divides {size}, got {image_size}.")
    factor = size // image_size
    blocks = images.reshape(count, image_size, factor, image_size, factor, channels)
    # Sums first, in a small integer type: a float copy of CIFAR's blocks would take a gigabyte.
    means = blocks.sum(axis=(2, 4), dtype=np.uint32) / factor**2
    return np.rint(means).astype(np.uint8)


def _hold_out(dataset: Dataset, count: int) -> Dataset:
    train = dataset.train
    if not 1 <= count < len(train):
        raise ValueError(
            f"load needs holdout of at least 1 and below the {len(train)} training images, got {count}."
        )
    held = Split(train.images[-count:], train.labels[-count:])
    return replace(dataset, train=Split(train.images[:-count], train.labels[:-count]), test=held)


def _first(split: Split, count: int) -> Split:
    if not 1 <= count <= len(split):
        raise ValueError(f"load needs first between 1 and the {len(split)} training images, got {count}.")
    return Split(split.images[:count], split.labels[:count])


def _digits(_: Path) -> Dataset:
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    grey = np.rint(np.reshape(pixels, (-1, 8, 8)) * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey.repeat(4, axis=1).repeat(4, axis=2)[..., None], 3, axis=-1)
    labels = np.asarray(target, np.int32)
    train, test = Split(images[:1437], labels[:1437]), Split(images[1437:], labels[1437:])
    return Dataset("digits", train, test, num_classes=10, mirror=False)


def _synthetic(image_size: int) -> Dataset:
    """Ten patterns of 4 x 4 coloured fields, each picture one of them under noise."""
    rng = np.random.default_rng(0)
    fields = rng.integers(64, 192, (10, 4, 4, 3))
    nearest = np.arange(image_size) * 4 // image_size
    patterns = fields[:, nearest][:, :, nearest]
    labels = rng.permutation(np.arange(640, dtype=np.int32) % 10)
    noise = rng.integers(-48, 49, (640, image_size, image_size, 3))
    images = (patterns[labels] + noise).astype(np.uint8)
    return Dataset("synthetic", Split(images[:512], labels[:512]), Split(images[512:], labels[512:]), 10)


def _cifar(name: str, data_dir: Path) -> Dataset:
    stored = find_dataset(name, data_dir)
    train, test = Split(*read_split(stored, "train")), Split(*read_split(stored, "test"))
    return Dataset(name, train, test, stored.num_classes, origin=stored.provenance.origin)


_LOADERS: dict[str, Callable[[Path], Dataset]] = {
    "digits": _digits,
    "cifar10": lambda data_dir: _cifar("cifar10", data_dir),
    "cifar100": lambda data_dir: _cifar("cifar100", data_dir),
}
