"""Which examples a step sees: an endless stream of permutations, a pure function of seed and step."""

from functools import lru_cache

import numpy as np


def batch_indices(seed: int, step: int, batch_size: int, num_examples: int) -> np.ndarray:
    """Return the examples of one global batch.

    Epoch after epoch, each a fresh permutation, the examples form one endless stream; batch ``step`` is
    its ``step``-th piece of ``batch_size``. Batches are always full: an epoch's end may fall inside one.

    Args:
      seed: Names the stream.
      step: Which batch, from 0.
      batch_size: Examples a batch, over all devices and hosts.
      num_examples: Examples an epoch.

    Returns:
      int64 indices below ``num_examples``, of shape (batch_size,).

    Examples:
      >>> first, second, third = (batch_indices(0, step, 4, num_examples=6) for step in range(3))
      >>> sorted(np.concatenate([first, second[:2]]).tolist())  # one epoch
      [0, 1, 2, 3, 4, 5]
      >>> sorted(np.concatenate([second[2:], third]).tolist())  # the next
      [0, 1, 2, 3, 4, 5]
    """
    if batch_size < 1 or num_examples < 1 or step < 0:
        raise ValueError(
            "batch_indices needs batch_size >= 1, num_examples >= 1 and step >= 0, "
            f"got {batch_size}, {num_examples} and {step}."
        )
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, offsets = np.divmod(positions, num_examples)
    pieces = [
        _permutation(seed, int(epoch), num_examples)[offsets[epochs == epoch]] for epoch in np.unique(epochs)
    ]
    return np.concatenate(pieces)


def example_at(seed: int, position: int, num_examples: int) -> int:
    """Return the example at one position of the stream that ``batch_indices`` cuts into batches.

    Examples:
      >>> [example_at(0, position, 6) for position in range(4, 8)] == batch_indices(0, 1, 4, 6).tolist()
      True
    """
    epoch, offset = divmod(position, num_examples)
    return int(_permutation(seed, epoch, num_examples)[offset])


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Return how many full batches it takes to see every example.

    Examples:
      >>> steps_per_epoch(50_000, 128)
      391
    """
    return -(-num_examples // batch_size)


# A batch touches one epoch or two; ImageNet's permutation is 10 MB, so no more are kept than are in use.
@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    permutation = np.random.default_rng([seed, epoch]).permutation(num_examples)
    permutation.setflags(write=False)
    return permutation
