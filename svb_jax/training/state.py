"""Everything that a training step changes, and nothing else: what a checkpoint must hold."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from svb_jax.training.metrics import Totals, zero_totals
from svb_jax.training.optimizer import BoundedOptimizer


class TrainState(NamedTuple):
    """The state between two steps.

    The order of the data and all randomness follow from the seed and ``step``: they need no state.
    """

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    totals: Totals
    """Sums over the current epoch, which may be half done."""


def create_state(
    model: nn.Module, optimizer: BoundedOptimizer, seed: int, image_shape: tuple[int, ...]
) -> TrainState:
    """Return the state before the first step.

    Args:
      model: Called on images and ``train``.
      optimizer: The optimizer.
      seed: Decides the initial parameters.
      image_shape: Height, width and channels.

    Returns:
      The state, on one device.
    """

    def create(key: jax.Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, *image_shape)), train=False)
        params = variables["params"]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            batch_stats=variables.get("batch_stats", {}),
            opt_state=optimizer.init(params),
            totals=zero_totals(),
        )

    return jax.jit(create)(jax.random.key(seed))
