"""Which device clips which matrices, and where they stand in what the devices exchange."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Assignment(NamedTuple):
    """The matrices of several kinds, dealt out to owners; each kind's go in consecutive runs.

    Attributes:
      counts: (kinds, owners), how many each owns.
      starts: (kinds, owners), where its run begins among the matrices of its kind.
      offsets: (kinds, owners), where its run begins in the owner's chunk of a flat buffer.
      chunk: The length of a chunk, the longest owner's.
    """

    counts: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    chunk: int

    @property
    def is_even(self) -> bool:
        """Whether there is one kind, of which every owner has as many."""
        return len(self.counts) == 1 and self.counts.min() == self.counts.max()


def assign(shapes: Sequence[tuple[int, ...]], num_owners: int) -> np.ndarray:
    """Return how many matrices of each batch (b, m, n) every device owns, (batches, owners).

    The dearest matrix goes first, each to the device with the least to do so far; clipping one costs about
    max(m, n) · min(m, n)².
    """
    costs = [max(m, n) * min(m, n) ** 2 for _, m, n in shapes]
    load = np.zeros(num_owners)
    counts = np.zeros((len(shapes), num_owners), np.int32)
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        for _ in range(shapes[index][0]):
            owner = int(np.argmin(load))
            counts[index, owner] += 1
            load[owner] += costs[index]
    return counts


def lay_out(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], num_owners: int) -> Assignment:
    """Assign the matrices of batches, each of which has ``sizes`` entries on a device."""
    counts = assign(shapes, num_owners)
    lengths = counts * np.asarray(sizes)[:, None]
    starts, offsets = (np.cumsum(each, axis) - each for each, axis in ((counts, 1), (lengths, 0)))
    return Assignment(counts, starts, offsets, int(lengths.sum(axis=0).max()))
