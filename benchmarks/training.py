"""What all training steps of the benchmarks share: the loss of a network for images, and the optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import svb_jax

EVERY = 391
"""Steps between projections in the compiled step; its count of steps decides whether a call projects."""
SVB_EPSILON, BBN_EPSILON = 0.5, 1.0


def make_loss(model: nn.Module) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
    """Return the loss of a batch of images and labels, with the new statistics beside it."""

    def loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), updated["batch_stats"]

    return loss


def make_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformationExtraArgs,
    bounds: Sequence[svb_jax.Bound] = (),
) -> Callable[..., Any]:
    """Return a training step, from parameters, statistics and states to new ones and the loss.

    Args:
      loss: Of parameters, statistics and a batch.
      tx: The optimizer, whose state is the third.
      bounds: What follows each of its steps, each with a state of its own.
    """

    def step(state: Any, batch: Any) -> Any:
        params, batch_stats, opt_state, *bound_states = state
        (value, batch_stats), grads = jax.value_and_grad(loss, has_aux=True)(params, batch_stats, batch)
        updates, opt_state = tx.update(grads, opt_state, params, batch_stats=batch_stats)
        params = optax.apply_updates(params, updates)
        for index, bound in enumerate(bounds):
            params, bound_states[index] = bound.apply(params, bound_states[index], batch_stats=batch_stats)
        return (params, batch_stats, opt_state, *bound_states), value

    return step


def sgd() -> optax.GradientTransformationExtraArgs:
    """Return the paper's SGD."""
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True))
    return optax.with_extra_args_support(tx)


def make_bounds(has_batch_norm: bool = True, **options: Any) -> list[svb_jax.Bound]:
    """Return SVB, with the options of ``svb_jax.svb``, and BBN where there is BatchNorm."""
    bounds = [svb_jax.bound_singular_values(SVB_EPSILON, every=EVERY, **options)]
    return bounds + [svb_jax.bound_batch_norm_scales(BBN_EPSILON, every=EVERY)] * has_batch_norm


def bounded(has_batch_norm: bool = True, **options: Any) -> optax.GradientTransformationExtraArgs:
    """Return SGD and the bounds, as links of a chain."""
    return optax.chain(sgd(), *make_bounds(has_batch_norm, **options))
