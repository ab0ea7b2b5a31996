"""What Flax Linen needs besides the library: a ``TrainState`` that passes ``batch_stats`` to the optimizer.

NNX needs nothing: ``nnx.Optimizer.update`` passes extra arguments on.
"""

from functools import partial
from typing import Any, Self

import optax

from svb_jax._src.extras import needs_extra

with needs_extra("svb_jax.linen", "train"):
    from flax.training import train_state

__all__ = ["TrainState"]


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` with BatchNorm's running statistics, which it also passes to the optimizer.

    Flax's own drops ``batch_stats``, and :func:`svb_jax.bbn` needs them.

    Attributes:
      batch_stats: The collection of that name, as the last step left it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, svb_jax
      >>> from flax import linen as nn
      >>> from svb_jax.linen import TrainState
      >>> model = nn.BatchNorm(use_running_average=False)
      >>> variables = model.init(jax.random.key(0), jnp.ones((4, 3)))
      >>> tx = svb_jax.bbn(optax.sgd(0.1), epsilon=0.5)
      >>> state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
      >>> grads = {"scale": jnp.array([10.0, 0.0, 0.0]), "bias": jnp.zeros(3)}
      >>> state = state.apply_gradients(grads=grads, batch_stats=state.batch_stats)
      >>> print(state.params["scale"])  # 0, 1 and 1, moved into [1/1.5, 1.5] times their mean
      [0.4444... 1. 1. ]
    """

    batch_stats: Any

    def apply_gradients(self, *, grads: Any, batch_stats: Any, **kwargs: Any) -> Self:
        """Take a step.

        Args:
          grads: The gradients of ``params``.
          batch_stats: The statistics as this step's forward pass left them; the new state keeps them.
          **kwargs: Further fields to replace.

        Returns:
          The next state.
        """
        tx = optax.with_extra_args_support(self.tx)
        told = optax.GradientTransformation(tx.init, partial(tx.update, batch_stats=batch_stats))
        step = super(TrainState, self.replace(tx=told)).apply_gradients
        return step(grads=grads, batch_stats=batch_stats, **kwargs).replace(tx=self.tx)
