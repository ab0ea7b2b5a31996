"""Data sets that do not fit into memory, decoded and augmented by Grain's worker processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np
from absl import flags
from PIL import Image

from svb_jax.training.crops import central_box, cut, random_box
from svb_jax.training.records import StoredDataset, decode_image, find_dataset
from svb_jax.training.sampling import example_at, steps_per_epoch

Batch = dict[str, np.ndarray]
Example = dict[str, np.ndarray | np.generic]

# The training stream has no end; this many positions outlast any run.
_ENDLESS = 2**62
_OPENING = threading.Lock()


def make_stream(
    name: str,
    data_dir: Path,
    *,
    split: Literal["train", "test"],
    batch_size: int,
    accumulate: int = 1,
    seed: int = 0,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int = 0,
    image_size: int = 299,
    augment: bool = True,
    first: int | None = None,
) -> Generator[Batch]:
    """Stream this host's share of the batches.

    Training examples come in the endless order of ``sampling.batch_indices``, under a random resized crop
    and mirrored half of the time. The order and every crop are functions of the seed and the step alone:
    not of the workers, nor of where the stream started, nor of how many hosts share a batch. Test examples
    come once each, in stored order, cut to the central 87.5 %; the last batch is filled up with zeros.

    Args:
      name: A data set that ``records.find_dataset`` finds, such as ``imagenet2012``.
      data_dir: The folder that holds it.
      split: ``train``, or ``test`` for one pass over the test images.
      batch_size: Examples a step, over all hosts.
      accumulate: Micro-batches in a batch, one after another; the hosts share each of them alike.
      seed: Names the order and the crops.
      start_step: The first batch, from 0: a resumed run passes the steps that it has done.
      process_index: This host's number.
      process_count: How many hosts there are.
      num_workers: Worker processes; 0 decodes in this one.
      image_size: The images' width and height.
      augment: Whether training images get the random crop, or the central one.
      first: Use only so many training examples, the first as stored.

    Returns:
      An iterator over dicts of ``image`` (uint8, batch_size / process_count images) and ``label`` (int32);
      for the test split also ``mask``, false for the filling. Its ``close`` ends the workers.

    Raises:
      FileNotFoundError: The data set is not in ``data_dir``; the message says how to get it.
    """
    if batch_size % (process_count * accumulate) or not 0 <= process_index < process_count:
        raise ValueError(
            "make_stream needs a batch_size that accumulate times process_count divides, and a process_index "
            f"below process_count, got {batch_size}, {accumulate}, {process_count} and {process_index}."
        )
    dataset = find_dataset(name, data_dir)
    share = batch_size // process_count
    place = _Place(batch_size // accumulate, share // accumulate, process_index)
    if split == "train":
        count = _training_count(dataset, first)
        example: Callable[[int], Example] = _TrainExample(dataset, place, seed, count, image_size, augment)
        end = _ENDLESS
    else:
        example = _TestExample(dataset, place, image_size)
        end = steps_per_epoch(dataset.num_test, batch_size) * share
    # Whole batches are dealt to the workers, who would otherwise each fill batches of their own.
    batches = grain.MapDataset.range(start_step * share, end).map(example).batch(share)
    stream = batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    return _copies(iter(_with_workers(stream, num_workers) if num_workers else stream))


def _copies(batches: grain.DatasetIterator[Batch]) -> Generator[Batch]:
    try:
        # Workers hand over shared memory, which must not outlive them: the copy costs far less than a JPEG.
        for batch in batches:
            yield {name: np.array(values, subok=False) for name, values in batch.items()}
    finally:
        batches.close()


@dataclass(frozen=True)
class _Place:
    """Where this host's share lies within the global micro-batches."""

    size: int
    share: int
    host: int

    def position(self, index: int) -> int:
        """Return where the ``index``-th example of this host stands in the global stream."""
        number, within = divmod(index, self.share)
        return number * self.size + self.host * self.share + within


@dataclass(frozen=True)
class _TrainExample:
    dataset: StoredDataset
    place: _Place
    seed: int
    count: int
    image_size: int
    augment: bool

    def __call__(self, index: int) -> Example:
        position = self.place.position(index)
        image, label = _read(self.dataset, "train", example_at(self.seed, position, self.count))
        if not self.augment:
            return {"image": cut(image, central_box(*image.size), self.image_size), "label": label}
        # A spawn key never meets the seeds of the permutations.
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(position,)))
        box = random_box(*image.size, rng)
        return {"image": cut(image, box, self.image_size, mirror=rng.random() < 0.5), "label": label}


@dataclass(frozen=True)
class _TestExample:
    dataset: StoredDataset
    place: _Place
    image_size: int

    def __call__(self, index: int) -> Example:
        position = self.place.position(index)
        if position >= self.dataset.num_test:
            filling = np.zeros((self.image_size, self.image_size, 3), np.uint8)
            return {"image": filling, "label": np.int32(0), "mask": np.False_}
        image, label = _read(self.dataset, "test", position)
        pixels = cut(image, central_box(*image.size), self.image_size)
        return {"image": pixels, "label": label, "mask": np.True_}


def _training_count(dataset: StoredDataset, first: int | None) -> int:
    if first is not None and not 1 <= first <= dataset.num_train:
        raise ValueError(
            f"make_stream needs first between 1 and the {dataset.num_train} training images, got {first}."
        )
    return first or dataset.num_train


def _read(
    dataset: StoredDataset, split: Literal["train", "test"], index: int
) -> tuple[Image.Image, np.int32]:
    example = _source(dataset, split)[index]
    try:
        return decode_image(example["image"]), np.int32(example["label"])
    except OSError as error:
        raise ValueError(
            f"Example {index} of {split} in {dataset.folder} is not an image: {error}"
        ) from error


def _source(dataset: StoredDataset, split: Literal["train", "test"]) -> Any:
    # TFDS imports its parts on first use, and two threads that do so at once wait for each other for good.
    with _OPENING:
        return _open(dataset, split)


# One a process: each worker opens the files itself, and keeps them open.
@lru_cache(maxsize=4)
def _open(dataset: StoredDataset, split: Literal["train", "test"]) -> Any:
    return dataset.open(split)


def _with_workers(stream: grain.IterDataset[Batch], num_workers: int) -> grain.IterDataset[Batch]:
    # Grain asks an absl flag, and absl refuses to answer in a program that is not an absl.app
    # (google/grain#1355).
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    return stream.mp_prefetch(options, worker_init_fn=_follow_parent)


def _follow_parent(worker_index: int, worker_count: int) -> None:
    """Leave it to the parent to end this worker, and end with it: after a kill nobody else would say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
