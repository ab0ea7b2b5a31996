"""A run's devices, data and compiled functions: what stays while the state changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from svb_jax import models
from svb_jax.models.convolution import step_conv
from svb_jax.training.config import TrainConfig
from svb_jax.training.evaluate import evaluate
from svb_jax.training.feed import open_feed
from svb_jax.training.optimizer import Span, hyperparameters, make_optimizer, make_projection
from svb_jax.training.parallel import AXIS, Engine, fetch
from svb_jax.training.sampling import steps_per_epoch
from svb_jax.training.state import TrainState, create_state
from svb_jax.training.step import Batch, Report, make_advance, make_eval_step, make_measure, make_train_step


class Session:
    """Everything that a configuration says, ready to run.

    Args:
      config: The run.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.engine = Engine(config.engine, config.devices, fsdp=config.fsdp)
        self.feed = open_feed(config, self.engine)
        per_epoch = steps_per_epoch(self.feed.num_train, config.batch_size)
        self.span = Span(per_epoch, config.epochs * per_epoch)
        dtype = jnp.dtype(config.dtype)
        self._model = models.make(
            config.model,
            num_classes=self.feed.num_classes,
            width=config.width,
            depth=config.depth,
            dtype=dtype,
            axis_name=AXIS,
            conv=step_conv(dtype),
        )
        hyper = hyperparameters(config)
        self._optimizer = make_optimizer(config, hyper, self.span)
        self._projection = make_projection(config)
        self._hyper = self.engine.replicate(hyper)
        self._train_step = self._compile_train_step()
        self._eval_step = self.engine.compile(make_eval_step(self._model), num_replicated=3)

    def _compile_train_step(self) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Report]]:
        config, inputs = self.config, {"augments": self.feed.augments_in_step, "mirror": self.feed.mirror}
        if config.engine != "jit":
            step = make_train_step(config, self._model, self.span, **inputs)
            return self.engine.compile(step, num_replicated=2)
        shardings = self.engine.shardings(jax.eval_shape(self.initial_state))
        measure = make_measure(config, self._model, **inputs)
        advance = make_advance(config, self.span, mesh=self.engine.mesh, shardings=shardings.params)
        return self.engine.compile_halves(measure, advance, shardings)

    def initial_state(self) -> TrainState:
        """Return the state before the first step, on one device."""
        return create_state(self._model, self._optimizer, self.config.seed, self.feed.image_shape)

    def step(self, state: TrainState, batch: Batch, stop: bool) -> tuple[TrainState, Report]:
        """Take a step; the old state's memory is gone after it.

        Args:
          state: On the devices.
          batch: This host's share.
          stop: Whether this host was asked to stop: a step tells all hosts.

        Returns:
          The new state and its report, both possibly still being computed.
        """
        told = batch._replace(stop=np.full(self.engine.num_local, stop, np.float32))
        return self._train_step(state, self._hyper, self.engine.shard(told))

    def evaluate(self, params: Any, batch_stats: Any) -> dict[str, float]:
        """Return the test errors of parameters that are on the devices."""
        return evaluate(self._eval_step, self.engine, params, batch_stats, self.feed.test())

    def project(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Return the state after one more projection by the run's own bounds, and what that found."""
        params, found = self._projection(fetch(state.params), fetch(state.batch_stats))
        return state._replace(params=self.engine.place(params)), fetch(found)

    def num_parameters(self, state: TrainState) -> int:
        """Return how many numbers the network learns."""
        return sum(leaf.size for leaf in jax.tree.leaves(state.params))
