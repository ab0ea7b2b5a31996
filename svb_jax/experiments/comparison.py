"""Means, spreads and paired comparisons over a handful of seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Spread(NamedTuple):
    """Several runs of one setting.

    Attributes:
      n: how many runs.
      mean: their mean.
      std: the sample standard deviation; NaN of a single run.
      low: the lower end of the mean's 95 % confidence interval (Student's t); NaN of a single run.
      high: its upper end.
      best: the smallest.
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
      n: how many seeds both have.
      mean: the mean difference.
      low: the lower end of its 95 % confidence interval; NaN of a single seed.
      high: its upper end.
      wins: for how many seeds the setting has the smaller value.
    """

    n: int
    mean: float
    low: float
    high: float
    wins: int


def spread(values: Sequence[float]) -> Spread:
    """Summarise runs that differ in nothing but the seed.

    Example:
      >>> summary = spread([1.0, 2.0, 3.0])
      >>> summary.mean, summary.std, round(summary.low, 2), round(summary.high, 2), summary.best
      (2.0, 1.0, -0.48, 4.48, 1.0)
    """
    array = np.asarray(values, float)
    mean, half = float(array.mean()), _half_width(array)
    std = float(array.std(ddof=1)) if len(array) > 1 else math.nan
    return Spread(len(array), mean, std, mean - half, mean + half, float(array.min()))


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
    return Paired(len(seeds), mean, mean - half, mean + half, int((differences < 0).sum()))


def _half_width(values: np.ndarray) -> float:
    """Half of the 95 % confidence interval of a mean."""
    n = len(values)
    if n < 2:
        return math.nan
    return float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n))
