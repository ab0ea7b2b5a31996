"""How often the loops of a projection by products run, which depends on the data by its bounds alone."""

import statistics
from collections.abc import Mapping

import jax.numpy as jnp

from svb_jax._src.clip.matrix_functions import is_at_one, nearest_to_one, sign_units
from svb_jax._src.clip.products import ROOT_CONDITION_NUMBER

# Of the spectra that the benchmarks prescribe: a condition number of 3.4, a third of the values outside of
# the band of epsilon 0.5.
LARGEST_VALUE = 1.84
# What the route knows of the largest value is a bound, up to this factor above it.
SLACK = 1.1


def well_conditioned(epsilon: float, largest: float = LARGEST_VALUE) -> Mapping[str, float]:
    """Return what to expect of each named loop and conditional where every matrix is well-conditioned.

    Args:
      epsilon: The band's.
      largest: The largest singular value of all.

    Returns:
      From a scope's name to a loop's trips, or to the branch that a conditional takes.

    Example:
      >>> well_conditioned(0.5)["passes"]
      1
    """
    *_, first, second = sign_units(*jnp.float32([1 / (1 + epsilon), 1 + epsilon, SLACK * largest]))
    return {
        "passes": 1,
        # The first step is taken outside of the loop.
        "inverse_root": _num_steps(1 / ROOT_CONDITION_NUMBER) - 1,
        # In the mean of the two signs, which one loop takes.
        "orthogonal_factor": statistics.mean(_num_steps(float(least)) for least in (first, second)),
        "approach": 0,
        "renewal": 0,
    }


def _num_steps(low: float) -> int:
    """Return how many steps take values from ``low`` to 1 to 1, in float32."""
    count, ends = 0, (jnp.float32(low), jnp.float32(1))
    while not is_at_one(ends[0]):
        count, ends = count + 1, nearest_to_one(*ends)[2:]
    return count
