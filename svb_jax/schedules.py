"""The paper's learning rate: a staircase whose steps are evenly spaced on a logarithmic scale."""

import math

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike


def staircase_schedule(
    start: float | jax.Array, end: float | jax.Array, num_stages: int, steps_per_stage: int
) -> optax.Schedule:
    r"""Return a schedule that goes from ``start`` to ``end`` in log-spaced stages.

    Stage :math:`k = 0, \dots, n-1` of :math:`n` holds the value

    .. math::
      \text{start}^{1 - k/(n-1)} \cdot \text{end}^{k/(n-1)}

    for ``steps_per_stage`` steps, so that the first is ``start`` and the last is ``end``, which stays for
    good. The paper decays the learning rate from 0.5 to 0.001 in 80 stages of two epochs. It may as well
    be a band: ``epsilon`` takes schedules.

    Args:
      start: the first stage's value, positive.
      end: the last stage's value, positive; larger than ``start`` climbs.
      num_stages: how many values there are. A single stage stays at ``start``.
      steps_per_stage: how many steps each value is held.

    Returns:
      A function from the 0-based step count to the value.

    Example:
      >>> schedule = staircase_schedule(1.0, 0.01, num_stages=3, steps_per_stage=2)
      >>> [round(float(schedule(count)), 4) for count in range(8)]
      [1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    """
    _check_positive("start", start)
    _check_positive("end", end)
    _check_count("num_stages", num_stages)
    _check_count("steps_per_stage", steps_per_stage)

    def schedule(count: ArrayLike) -> jax.Array:
        stage = jnp.clip(jnp.asarray(count) // steps_per_stage, 0, num_stages - 1)
        fraction = stage / max(num_stages - 1, 1)
        # Powers of both ends, because powers of their ratio would miss the last value by a rounding.
        return jnp.power(start, 1 - fraction) * jnp.power(end, fraction)

    return schedule


def _check_positive(name: str, value: float | jax.Array) -> None:
    if isinstance(value, Tracer):
        return
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"staircase_schedule needs a positive finite {name}, got {value!r}.")


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"staircase_schedule needs {name} of at least 1, got {value!r}.")
