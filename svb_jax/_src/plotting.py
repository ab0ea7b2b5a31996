"""Pictures of a network's spectrum: layer by layer, and over a training run. Needs ``[plot]``."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from svb_jax._src.checks import check_epsilon
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.extras import needs_extra
from svb_jax._src.spectrum import singular_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_spectrum(
    params: Any,
    epsilon: float = 0.5,
    *,
    before: Any = None,
    kind: Literal["quantiles", "histogram"] = "quantiles",
    dimension_numbers: DimensionNumbers = None,
) -> "Figure":
    """Draw the singular values of every weight matrix, one line per layer, over the band.

    Needs matplotlib: ``pip install 'svb_jax[plot]'``.

    Args:
      params: A parameter tree, on the host or on devices.
      epsilon: The band [1 / (1 + epsilon), 1 + epsilon] to draw.
      before: The parameters at an earlier time, drawn behind in grey.
      kind: ``"quantiles"`` draws the range, the middle 80 % and the median of each layer; ``"histogram"``
        draws a histogram of each, scaled to its largest bin.
      dimension_numbers: How leaves are read as matrices; by name if not given.

    Returns:
      The figure. A notebook shows it; ``savefig`` saves it.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"Dense_0": {"kernel": jnp.diag(jnp.array([0.5, 3.0, 1.0]))}}
      >>> figure = svb_jax.plot_spectrum(svb_jax.project(params, 0.5), epsilon=0.5, before=params)
      >>> figure.axes[0].get_xlabel()
      'singular value'
    """
    check_epsilon("plot_spectrum", epsilon)
    if kind not in ("quantiles", "histogram"):
        raise ValueError(f"plot_spectrum needs kind='quantiles' or kind='histogram', got {kind!r}.")
    now = _finite("plot_spectrum", singular_values(params, dimension_numbers=dimension_numbers))
    then = {} if before is None else singular_values(before, dimension_numbers=dimension_numbers)
    if before is not None and set(then) != set(now):
        odd = sorted(set(then) ^ set(now))[:3]
        raise ValueError(f"plot_spectrum needs the same matrices before and now, got {odd} in one of them.")
    with needs_extra("svb_jax.plot_spectrum", "plot"):
        from svb_jax._src import drawing
    return drawing.layers(now, _finite("plot_spectrum", then), (1 / (1 + epsilon), 1 + epsilon), kind)


def plot_projections(history: Iterable[Mapping[str, Any]], epsilon: float | None = None) -> "Figure":
    """Draw what the projections of a training run found: the range before each, and the share they clipped.

    Needs matplotlib: ``pip install 'svb_jax[plot]'``.

    Args:
      history: What :func:`projection_stats` returned from time to time, or the lines of a run's
        ``metrics.jsonl``. Bounds of weight matrices are drawn, each under its prefix.
      epsilon: The band [1 / (1 + epsilon), 1 + epsilon] to draw; none if not given.

    Returns:
      The figure.

    Example:
      >>> import svb_jax
      >>> history = [
      ...     {"svb/step": 10, "svb/sigma_min": 0.5, "svb/sigma_max": 3.0, "svb/share_clipped": 0.4},
      ...     {"svb/step": 20, "svb/sigma_min": 0.6, "svb/sigma_max": 1.7, "svb/share_clipped": 0.1},
      ... ]
      >>> [axes.get_ylabel() for axes in svb_jax.plot_projections(history, epsilon=0.5).axes]
      ['singular values before', 'share clipped']
    """
    if epsilon is not None:
        check_epsilon("plot_projections", epsilon)
    if isinstance(history, Mapping):
        raise TypeError(
            "plot_projections needs a list of what projection_stats returned from time to time, got just one."
        )
    bounds = _projections(history)
    if not any(points for points in bounds.values()):
        raise ValueError(
            "plot_projections needs statistics of at least one projection (step, sigma_min, sigma_max and "
            "share_clipped of a bound), got none: has a projection been due yet?"
        )
    with needs_extra("svb_jax.plot_projections", "plot"):
        from svb_jax._src import drawing
    return drawing.over_time(bounds, None if epsilon is None else (1 / (1 + epsilon), 1 + epsilon))


def _finite(caller: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    flat = {path: np.ravel(_without_rounding(spectrum)) for path, spectrum in values.items()}
    spoilt = [path for path, spectrum in flat.items() if not np.isfinite(spectrum).all()]
    if spoilt:
        raise ValueError(f"{caller} needs finite weights, got NaN or infinity in {', '.join(spoilt[:3])}.")
    return flat


def _without_rounding(spectrum: np.ndarray) -> np.ndarray:
    """Return zeros as zeros: what rounding leaves of them, 1e-17 or 1e-200, would fill a logarithmic axis."""
    floor = spectrum.max(axis=-1, keepdims=True) * np.finfo(np.float64).eps * spectrum.shape[-1]
    return np.where(spectrum <= floor, 0.0, spectrum)


def _projections(history: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Return (smallest, largest, share clipped) by bound and step; each projection counts once."""
    bounds: dict[str, dict[int, tuple[float, float, float]]] = {}
    for line in history:
        for name in [key.removesuffix("/sigma_min") for key in line if key.endswith("/sigma_min")]:
            numbers = [line.get(f"{name}/{what}") for what in ("sigma_min", "sigma_max", "share_clipped")]
            low, high, share = (float("nan") if number is None else float(number) for number in numbers)
            points = bounds.setdefault(name, {})
            # Before the first projection a run's lines hold null, and the statistics step 0.
            step = line.get(f"{name}/step")
            if step and np.isfinite([low, high, share]).all():
                points[int(step)] = (low, high, share)
    return bounds
