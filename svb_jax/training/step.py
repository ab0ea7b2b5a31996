"""A training step in two halves, gradients and update, and what one device does in an evaluation step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import svb_jax
from svb_jax.training.augment import augment, prepare
from svb_jax.training.config import TrainConfig
from svb_jax.training.metrics import Totals, count_errors, zero_totals
from svb_jax.training.optimizer import Hyperparameters, Span, learning_rate, make_optimizer
from svb_jax.training.parallel import AXIS
from svb_jax.training.state import TrainState


class Batch(NamedTuple):
    """A device's share of a batch."""

    images: Any
    """uint8 or float, (micro-batches, examples, height, width, channels); no first axis in evaluation."""
    labels: Any
    """Integers, (micro-batches, examples); no first axis in evaluation."""
    mask: Any = None
    """Booleans like the labels: false for what only fills up the batch. In evaluation only."""
    stop: Any = None
    """Whether this host was asked to stop. In training only."""


class Report(NamedTuple):
    """What the host may read of a step, when it has time."""

    pulse: jax.Array
    """This step's loss, and how many of the devices' hosts were asked to stop."""
    details: dict[str, jax.Array]
    """The epoch's loss and errors so far, the learning rate, the statistics of the last projection."""


class Measured(NamedTuple):
    """What all devices together found out about a batch; equal on all of them."""

    grads: Any
    batch_stats: Any
    totals: Totals
    num_stopping: jax.Array
    """How many of the devices' hosts were asked to stop."""


Measure = Callable[[TrainState, Hyperparameters, Batch], Measured]
Advance = Callable[[TrainState, Hyperparameters, Measured], tuple[TrainState, Report]]


def make_measure(config: TrainConfig, model: nn.Module, *, augments: bool, mirror: bool) -> Measure:
    """Return the first half of a step, that of one device among those of the axis: the gradients.

    Args:
      config: The run.
      model: Its network, whose BatchNorm averages over the axis.
      augments: Whether the step augments its images; streamed ones come augmented.
      mirror: Whether augmentation may mirror.

    Returns:
      A function of the state, the run's numbers and the device's batch.
    """

    def inputs(images: jax.Array, key: jax.Array, micro: jax.Array) -> jax.Array:
        if augments:
            # Numbered over all devices: an example's crop does not depend on where it is computed.
            device = micro * lax.axis_size(AXIS) + lax.axis_index(AXIS)
            images = augment(images, key, device * len(images) + jnp.arange(len(images)), mirror=mirror)
        return prepare(images)

    def loss(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        totals = count_errors(logits, labels)
        return totals.loss / totals.count, (updated.get("batch_stats", {}), totals)

    def gradients(state: TrainState, batch: Batch, key: jax.Array) -> tuple[Any, Any, Totals]:
        def accumulate(carry: tuple[Any, Any, Totals], piece: Any) -> tuple[tuple[Any, Any, Totals], None]:
            grads, batch_stats, totals = carry
            images, labels, micro = piece
            new, (batch_stats, more) = jax.grad(loss, has_aux=True)(
                state.params, batch_stats, inputs(images, key, micro), labels
            )
            return (jax.tree.map(jnp.add, grads, new), batch_stats, totals + more), None

        start = jax.tree.map(jnp.zeros_like, state.params), state.batch_stats, zero_totals()
        pieces = batch.images, batch.labels, jnp.arange(config.accumulate)
        (grads, batch_stats, totals), _ = lax.scan(accumulate, start, pieces)
        grads = lax.pmean(jax.tree.map(lambda leaf: leaf / config.accumulate, grads), AXIS)
        return grads, batch_stats, lax.psum(totals, AXIS)

    def measure(state: TrainState, hyper: Hyperparameters, batch: Batch) -> Measured:
        key = jax.random.fold_in(jax.random.key(hyper.seed), state.step)
        return Measured(*gradients(state, batch, key), lax.psum(batch.stop, AXIS))

    return measure


def make_advance(config: TrainConfig, span: Span, **sharing: Any) -> Advance:
    """Return the second half of a step: the update by the gradients of all devices.

    Args:
      config: The run.
      span: Its length.
      **sharing: How devices share the projection: ``axis_name``, or ``mesh`` and ``shardings``.

    Returns:
      A function of the state, the run's numbers and what was measured.
    """

    def advance(state: TrainState, hyper: Hyperparameters, measured: Measured) -> tuple[TrainState, Report]:
        grads, batch_stats, totals, num_stopping = measured
        optimizer = make_optimizer(config, hyper, span, **sharing)
        params, opt_state = optimizer.step(grads, state.opt_state, state.params, batch_stats)
        is_new_epoch = state.step % span.steps_per_epoch == 0
        so_far = jax.tree.map(lambda total: jnp.where(is_new_epoch, 0, total), state.totals) + totals
        details = {f"train_{name}": mean for name, mean in so_far.means().items()}
        details |= {"learning_rate": learning_rate(hyper, state.step, span)}
        details |= svb_jax.projection_stats(opt_state)
        pulse = jnp.stack([totals.means()["loss"], num_stopping])
        return TrainState(state.step + 1, params, batch_stats, opt_state, so_far), Report(pulse, details)

    return advance


def make_train_step(
    config: TrainConfig, model: nn.Module, span: Span, *, augments: bool, mirror: bool
) -> Callable[[TrainState, Hyperparameters, Batch], tuple[TrainState, Report]]:
    """Return the whole step of one device among those of the axis; arguments as of its two halves."""
    measure = make_measure(config, model, augments=augments, mirror=mirror)
    advance = make_advance(config, span, axis_name=AXIS)

    def step(state: TrainState, hyper: Hyperparameters, batch: Batch) -> tuple[TrainState, Report]:
        return advance(state, hyper, measure(state, hyper, batch))

    return step


def make_eval_step(model: nn.Module) -> Callable[[Totals, Any, Any, Batch], Totals]:
    """Return the evaluation step of one device: it adds the errors of a batch over all devices."""

    def step(totals: Totals, params: Any, batch_stats: Any, batch: Batch) -> Totals:
        variables = {"params": params, "batch_stats": batch_stats}
        logits: Any = model.apply(variables, prepare(batch.images), train=False)
        return totals + lax.psum(count_errors(logits, batch.labels, batch.mask), AXIS)

    return step
