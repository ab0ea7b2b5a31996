"""The paper's optimizer: Nesterov SGD down a log-spaced staircase, bounded by SVB and BBN."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import svb_jax
from svb_jax.training.config import TrainConfig


class Hyperparameters(NamedTuple):
    """The numbers that enter a compiled step as arguments: runs that differ in them share it."""

    seed: jax.Array
    learning_rates: jax.Array
    svb_epsilon: jax.Array | None
    bbn_epsilon: jax.Array | None


@dataclass(frozen=True)
class Span:
    """How long a run is, in steps."""

    steps_per_epoch: int
    total_steps: int

    def every(self, epochs: float) -> int:
        """Return the number of steps in so many epochs, at least one.

        Examples:
          >>> Span(steps_per_epoch=391, total_steps=3910).every(0.5)
          196
        """
        return max(1, round(epochs * self.steps_per_epoch))


def hyperparameters(config: TrainConfig) -> Hyperparameters:
    """Return the run's numbers; bounds that it does not use are None."""
    stages = config.learning_rate_stages
    rate = svb_jax.staircase_schedule(config.learning_rate, config.final_learning_rate, stages, 1)
    return Hyperparameters(
        seed=jnp.asarray(config.seed, jnp.uint32),
        learning_rates=jnp.asarray(rate(jnp.arange(stages)), jnp.float32),
        svb_epsilon=_scalar(config.svb_epsilon),
        bbn_epsilon=_scalar(config.bbn_epsilon),
    )


def learning_rate(hyper: Hyperparameters, count: ArrayLike, span: Span) -> jax.Array:
    """Return the rate of the ``count``-th step, from 0: each stage lasts an equal share of the run."""
    stages = len(hyper.learning_rates)
    ends = np.arange(1, stages) * span.total_steps // stages
    return hyper.learning_rates[jnp.searchsorted(jnp.asarray(ends), count, side="right")]


@dataclass(frozen=True)
class BoundedOptimizer:
    """An optimizer, and the bounds that follow each of its steps.

    The bounds take the parameters, not the updates: so they cost nothing on an accelerator's other steps.
    Its state is the optimizer's, paired with that of each bound in turn.
    """

    inner: optax.GradientTransformation
    bounds: tuple[svb_jax.Bound, ...] = ()

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        state: Any = self.inner.init(params)
        for bound in self.bounds:
            state = state, bound.init(params)
        return state

    def step(self, grads: Any, state: Any, params: Any, batch_stats: Any) -> tuple[Any, Any]:
        """Return the parameters and the state after a step.

        Args:
          grads: The gradients.
          state: The state before.
          params: The parameters before.
          batch_stats: BatchNorm's statistics, as this step updated them.
        """
        bound_states = []
        for _ in self.bounds:
            state, bound_state = state
            bound_states.insert(0, bound_state)
        updates, state = self.inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for bound, bound_state in zip(self.bounds, bound_states, strict=True):
            params, bound_state = bound.apply(params, bound_state, batch_stats=batch_stats)
            state = state, bound_state
        return params, state


def make_optimizer(
    config: TrainConfig, hyper: Hyperparameters, span: Span, **sharing: Any
) -> BoundedOptimizer:
    """Return the run's optimizer.

    Args:
      config: The run.
      hyper: Its numbers, possibly traced.
      span: Its length.
      **sharing: How devices share the projection's work, as :func:`svb_jax.svb` takes it.
    """
    sgd = optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(lambda count: learning_rate(hyper, count, span), config.momentum, nesterov=config.nesterov),
    )
    if config.evaluate == "before":
        # The loop projects between the evaluation and the next epoch.
        return BoundedOptimizer(sgd)
    until = None if config.project_after_last_epoch else span.total_steps - 1
    bounds = make_bounds(config, hyper, span.every(config.project_every_epochs), until, **sharing)
    return BoundedOptimizer(sgd, bounds)


def make_bounds(
    config: TrainConfig, hyper: Hyperparameters, every: int = 1, until: int | None = None, **sharing: Any
) -> tuple[svb_jax.Bound, ...]:
    """Return the bounds that the run uses, SVB before BBN."""
    bounds: list[svb_jax.Bound] = []
    if hyper.svb_epsilon is not None:
        svb = svb_jax.bound_singular_values(
            hyper.svb_epsilon,
            every=every,
            until=until,
            method=config.method,
            # Said outright: none of our networks has depthwise convolutions, however narrow they are.
            dimension_numbers=svb_jax.by_name,
            **sharing,
        )
        bounds.append(svb)
    if hyper.bbn_epsilon is not None:
        kind = config.bbn_kind
        bounds.append(svb_jax.bound_batch_norm_scales(hyper.bbn_epsilon, every=every, until=until, kind=kind))
    return tuple(bounds)


def make_projection(config: TrainConfig) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """Return what projects parameters by the run's bounds, with no step taken, and says what it found.

    Args:
      config: The run.

    Returns:
      A function of parameters and BatchNorm statistics, which returns new parameters and the projection's
      statistics.
    """
    bounds = make_bounds(config, hyperparameters(config))

    @jax.jit
    def project(params: Any, batch_stats: Any) -> tuple[Any, dict[str, jax.Array]]:
        states = []
        for bound in bounds:
            params, state = bound.apply(params, bound.init(params), batch_stats=batch_stats)
            states.append(state)
        return params, svb_jax.projection_stats(states)

    return project


def _scalar(value: float | None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, jnp.float32)
