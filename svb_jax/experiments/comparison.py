"""Means, spreads and paired comparisons over a handful of seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

FEWEST_SEEDS = 3
"""With fewer, an interval is too wide and its standard deviation too rough to conclude anything."""


NORMAL = 1.959
"""Just below the normal distribution's bound of 95 %."""
MANY_SEEDS = 1_000_000


class Spread(NamedTuple):
    """Several runs of one setting.

    Attributes:
      n: How many runs.
      mean: Their mean.
      std: The sample standard deviation; NaN of a single run.
      low: The lower end of the mean's 95 % confidence interval (Student's t); NaN of a single run.
      high: Its upper end.
      best: The smallest.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    best: float


class Paired(NamedTuple):
    """A setting against another, seed by seed; negative differences are improvements.

    Attributes:
      n: How many seeds both have.
      mean: The mean difference.
      std: The sample standard deviation of the differences; NaN of a single seed.
      low: The lower end of the mean's 95 % confidence interval; NaN of a single seed.
      high: Its upper end.
      wins: For how many seeds the setting has the smaller value.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    wins: int

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes zero, which that of a single seed never does."""
        return self.high < 0 or self.low > 0


def spread(values: Sequence[float]) -> Spread:
    """Summarise runs that differ in nothing but the seed.

    Example:
      >>> summary = spread([1.0, 2.0, 3.0])
      >>> summary.mean, summary.std, round(summary.low, 2), round(summary.high, 2), summary.best
      (2.0, 1.0, -0.48, 4.48, 1.0)
    """
    array = np.asarray(values, float)
    mean, half = float(array.mean()), _half_width(array)
    return Spread(len(array), mean, _std(array), mean - half, mean + half, float(array.min()))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Compare two settings by the seeds that both were run with; None if there is no such seed.

    Example:
      >>> paired({0: 5.0, 1: 6.0, 2: 1.0}, {0: 7.0, 1: 7.0})[:2]
      (2, -1.5)
    """
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = np.array([values[seed] - baseline[seed] for seed in seeds])
    mean, half = float(differences.mean()), _half_width(differences)
    wins = int((differences < 0).sum())
    return Paired(len(seeds), mean, _std(differences), mean - half, mean + half, wins)


def seeds_needed(std: float, half_width: float) -> int:
    """How many seeds bring the 95 % interval of a mean down to plus or minus ``half_width``.

    Args:
      std: The standard deviation of what is averaged.
      half_width: Half of the interval that would do; positive.

    Example:
      >>> seeds_needed(0.5, half_width=0.5)
      7
    """
    # Student's t is always above the normal distribution, which has a closed form, and soon as good as equal.
    start = max(2, math.ceil((NORMAL * std / half_width) ** 2))
    if start > MANY_SEEDS:
        return start
    return next(n for n in itertools.count(start) if _factor(n) * std <= half_width)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _half_width(values: np.ndarray) -> float:
    """Half of the 95 % confidence interval of a mean."""
    return _factor(len(values)) * _std(values) if len(values) > 1 else math.nan


def _factor(n: int) -> float:
    """Half of the 95 % interval of the mean of ``n`` values, in standard deviations (Student's t)."""
    return float(stats.t.ppf(0.975, n - 1)) / math.sqrt(n)
