"""Batches for this host's devices: gathered from memory, or streamed from disk."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Literal, Protocol

import jax
import numpy as np

from svb_jax.training import data
from svb_jax.training.cifar_binary import Origin
from svb_jax.training.config import TrainConfig
from svb_jax.training.parallel import Engine, split_rows
from svb_jax.training.records import find_dataset
from svb_jax.training.sampling import batch_indices
from svb_jax.training.step import Batch
from svb_jax.training.streaming import make_stream

STREAMED = {"imagenet2012": 299}
"""The data sets that do not fit into memory, and the size that their images are cut to."""


class Feed(Protocol):
    """Where a run's batches come from."""

    num_train: int
    num_classes: int
    image_shape: tuple[int, ...]
    augments_in_step: bool
    """Whether augmentation is left to the training step."""
    mirror: bool
    """Whether it may mirror."""
    origin: Origin
    """Whether the data set is what its authors published."""
    digest: str | None
    """SHA-256 of all images and labels; None where they are too many to be read at every start."""

    def train(self, start_step: int) -> Generator[Batch]:
        """Yield this host's share of every batch from a step on, without end."""
        ...

    def test(self) -> Iterator[Batch]:
        """Yield this host's share of the test set, the last batch filled up and masked."""
        ...


def open_feed(config: TrainConfig, engine: Engine) -> Feed:
    """Return the feed of a run's data set.

    Args:
      config: The run.
      engine: Its devices, which must divide its batches.

    Returns:
      The feed.
    """
    # Raises before anything is read, if the devices do not divide a batch.
    split_rows(np.arange(config.batch_size), config.accumulate, engine)
    return (_Streamed if config.dataset in STREAMED else _InMemory)(config, engine)


class _InMemory:
    """A data set small enough to be held whole by every host; its batches are gathered as they are used."""

    def __init__(self, config: TrainConfig, engine: Engine):
        self._config, self._engine = config, engine
        self._dataset = data.load(
            config.dataset,
            config.data_dir,
            first=config.first,
            holdout=config.holdout,
            image_size=config.image_size,
        )
        self.num_train = len(self._dataset.train)
        self.num_classes = self._dataset.num_classes
        self.image_shape = self._dataset.train.images.shape[1:]
        self.augments_in_step = config.augment
        self.mirror = self._dataset.mirror
        self.origin: Origin = self._dataset.origin
        self.digest: str | None = self._dataset.digest()

    def train(self, start_step: int) -> Generator[Batch]:
        split, config, step = self._dataset.train, self._config, start_step
        while True:
            indices = batch_indices(config.seed, step, config.batch_size, self.num_train)
            rows = split_rows(indices, config.accumulate, self._engine)
            yield Batch(split.images[rows], split.labels[rows])
            step += 1

    def test(self) -> Iterator[Batch]:
        split, size = self._dataset.test, self._config.batch_size
        for start in range(0, len(split), size):
            rows = split_rows(np.arange(start, start + size), 1, self._engine)[:, 0]
            held = np.minimum(rows, len(split) - 1)
            yield Batch(split.images[held], split.labels[held], rows < len(split))


class _Streamed:
    """A data set that is read, cut and augmented by worker processes, each host its share."""

    mirror = False
    augments_in_step = False
    digest: str | None = None

    def __init__(self, config: TrainConfig, engine: Engine):
        if config.holdout is not None:
            raise ValueError(
                f"holdout needs a data set that is held in memory, got {config.holdout} images of "
                f"{config.dataset}, which is streamed."
            )
        self._config, self._engine = config, engine
        stored = find_dataset(config.dataset, config.data_dir)
        self._size = config.image_size or STREAMED[config.dataset]
        self.num_train = config.first or stored.num_train
        self.num_classes = stored.num_classes
        self.origin: Origin = stored.provenance.origin
        self.image_shape = (self._size, self._size, 3)

    def train(self, start_step: int) -> Generator[Batch]:
        accumulate = self._config.accumulate
        for images in self._stream("train", accumulate, start_step):
            yield Batch(*(self._rows(images[name], accumulate) for name in ("image", "label")))

    def test(self) -> Iterator[Batch]:
        for images in self._stream("test"):
            yield Batch(*(self._rows(images[name], 1)[:, 0] for name in ("image", "label", "mask")))

    def _stream(
        self, split: Literal["train", "test"], accumulate: int = 1, start_step: int = 0
    ) -> Iterator[dict[str, np.ndarray]]:
        config = self._config
        stream = make_stream(
            config.dataset,
            config.data_dir,
            split=split,
            batch_size=config.batch_size,
            accumulate=accumulate,
            seed=config.seed,
            start_step=start_step,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            num_workers=config.workers,
            image_size=self._size,
            augment=config.augment,
            first=config.first,
        )
        # Closing ends the workers, also when the run ends in the middle of the endless stream.
        with contextlib.closing(stream):
            yield from stream

    def _rows(self, examples: np.ndarray, accumulate: int) -> np.ndarray:
        shape = (accumulate, self._engine.num_local, -1, *examples.shape[1:])
        return examples.reshape(shape).swapaxes(0, 1)
