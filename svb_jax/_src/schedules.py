"""The paper's learning rate: a staircase whose steps are evenly spaced on a logarithmic scale."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from svb_jax._src.checks import check_count, check_positive


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
      start: The first stage's value, positive.
      end: The last stage's value, positive; larger than ``start`` climbs.
      num_stages: How many values there are. A single stage stays at ``start``.
      steps_per_stage: How many steps each value is held.

    Returns:
      A function from the 0-based step count to the value.

    Example:
      >>> import svb_jax
      >>> schedule = svb_jax.staircase_schedule(1.0, 0.01, num_stages=3, steps_per_stage=2)
      >>> [round(float(schedule(count)), 4) for count in range(8)]
      [1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    """
    for name, value in (("start", start), ("end", end)):
        check_positive("staircase_schedule", name, value)
    for name, count in (("num_stages", num_stages), ("steps_per_stage", steps_per_stage)):
        check_count("staircase_schedule", name, count)

    def schedule(count: ArrayLike) -> jax.Array:
        stage = jnp.clip(jnp.asarray(count) // steps_per_stage, 0, num_stages - 1)
        fraction = stage / max(num_stages - 1, 1)
        # Powers of both ends, because powers of their ratio would miss the last value by a rounding.
        return jnp.power(start, 1 - fraction) * jnp.power(end, fraction)

    return schedule
