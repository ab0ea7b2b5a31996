"""Bounded Batch Normalization: keeping a layer's scales near their mean, as a transformation."""

from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from svb_jax._src.apply_every import ScalarOrSchedule, Targets, Timing, land_updates
from svb_jax._src.bound import Bound
from svb_jax._src.checks import check_choice, check_epsilon, check_not_negative
from svb_jax._src.masks import masked
from svb_jax._src.running_variances import Kind, Pairs, ScaleLeaf, find_scales
from svb_jax._src.stats import BoundBatchNormScalesState, ScaleStats, no_scales


def bound_batch_norm_scales(
    epsilon: ScalarOrSchedule,
    every: int = 1,
    *,
    until: int | None = None,
    kind: Kind = "bbn",
    bn_epsilon: float = 1e-5,
    pairs: Pairs | None = None,
    where: Any = None,
    keep_dtype: bool = False,
    name: str = "bbn",
) -> Bound:
    r"""Bound the scales of every BatchNorm around their mean (BBN).

    Every ``every`` steps the update of :math:`\gamma` is replaced by the one that lands on

    .. math::
      \gamma \leftarrow \alpha\varsigma\operatorname{clip}\left(\frac{\gamma}{\alpha\varsigma},
      \frac{1}{1+\tilde\epsilon}, 1+\tilde\epsilon\right), \quad
      \alpha = \operatorname{mean}(\gamma/\varsigma),

    with :math:`\varsigma` the running standard deviation. The running variances come as the extra argument
    ``batch_stats``: the statistics as this step updated them, in Linen's tree, NNX's state, Haiku's or
    Equinox's.

    Args:
      epsilon: :math:`\tilde\epsilon`, a number or a schedule.
      every: Steps between two boundings; the first is at step ``every``, counted from 1.
      until: The last step at which to bound.
      kind: ``bbn`` is the paper's. ``relative`` bounds :math:`\gamma` around its own mean, as the authors'
        code does by default; it uses no variance, and finds its layers through ``batch_stats`` or, if none
        is given, through ``where``.
      bn_epsilon: What the network's BatchNorm adds to its variance.
      pairs: Which scale has which variance, if the paths do not tell: the path of a scale, and that of its
        variance in ``batch_stats`` or the variance itself.
      where: As for :func:`bound_singular_values`.
      keep_dtype: As for :func:`bound_singular_values`.
      name: What :func:`projection_stats` calls this bound.

    Returns:
      A transformation whose ``update`` needs ``params`` and ``batch_stats``. Its method :meth:`Bound.apply`
      takes parameters after their step instead.

    Example:
      >>> import jax, jax.numpy as jnp, optax, svb_jax
      >>> params = {"bn": {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])}}
      >>> batch_stats = {"bn": {"var": jnp.ones(4)}}
      >>> tx = svb_jax.bound_batch_norm_scales(epsilon=1.0)
      >>> zeros = jax.tree.map(jnp.zeros_like, params)
      >>> updates, _ = tx.update(zeros, tx.init(params), params, batch_stats=batch_stats)
      >>> optax.apply_updates(params, updates)["bn"]["scale"].round(4)
      Array([6. , 1.5, 1.5, 2. ], dtype=float32)

    References:
      Jia, `Improving training of deep neural networks via Singular Value Bounding
      <https://arxiv.org/abs/1611.06013>`_, 2016
    """
    caller = "bound_batch_norm_scales"
    if not callable(epsilon):
        check_epsilon(caller, epsilon)
    timing = Timing(every, until)
    timing.check(caller)
    check_choice(caller, "kind", kind, get_args(Kind))
    check_not_negative(caller, "bn_epsilon", bn_epsilon)

    def init_fn(params: optax.Params) -> BoundBatchNormScalesState:
        del params
        count, step = (jnp.zeros((), jnp.int32) for _ in range(2))
        return BoundBatchNormScalesState(count, step, {name: no_scales()})

    def update_fn(
        updates: optax.Updates,
        state: BoundBatchNormScalesState,
        params: optax.Params | None = None,
        *,
        batch_stats: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, BoundBatchNormScalesState]:
        targets = Targets(caller, updates, params, extra_args)
        scales = find_scales(caller, params, batch_stats, kind, pairs=pairs, is_masked=where is not None)
        scales = [scale for scale in scales if targets.place(scale.position) is not None]

        def bound(stepped: list[jax.Array], count: jax.Array) -> tuple[list[jax.Array], Any]:
            width = epsilon(count) if callable(epsilon) else epsilon
            bounded, stats = bound_scales(scales, stepped, width, kind, bn_epsilon)
            return bounded, {name: stats}

        return land_updates(targets, [scale.position for scale in scales], state, timing, bound, keep_dtype)

    return masked(init_fn, update_fn, where)


def bound_scales(
    scales: Sequence[ScaleLeaf],
    values: Sequence[jax.Array],
    epsilon: ArrayLike,
    kind: Kind,
    bn_epsilon: float,
) -> tuple[list[jax.Array], ScaleStats]:
    """Return every layer's scales, bounded, and what was seen of all.

    Args:
      scales: The layers, each with its running ``variance``.
      values: Their scales, in float32 or better.
      epsilon: The band around the mean.
      kind: Which of the two forms.
      bn_epsilon: What BatchNorm adds to its variance.
    """
    bounded, seen = [], []
    for scale, gamma in zip(scales, values, strict=True):
        std = jnp.ones_like(gamma)
        if kind == "bbn":
            std = jnp.sqrt(jnp.asarray(scale.variance, gamma.dtype).reshape(gamma.shape) + bn_epsilon)
        clipped, stats = clip_scales(gamma, std, epsilon)
        bounded.append(clipped)
        seen.append(stats)
    return bounded, ScaleStats(*(jnp.sum(jnp.stack(counts)) for counts in zip(*seen, strict=True)))


# Traced once for all layers of a size.
@jax.jit
def clip_scales(gamma: jax.Array, std: jax.Array, epsilon: ArrayLike) -> tuple[jax.Array, ScaleStats]:
    r"""Bound each layer's scales around their mean.

    With :math:`\varsigma` the standard deviation and :math:`\alpha` the mean of :math:`\gamma/\varsigma`,

    .. math::
      \gamma \leftarrow \operatorname{clip}\left(\gamma,
      \frac{\alpha\varsigma}{1+\tilde\epsilon}, (1+\tilde\epsilon)\,\alpha\varsigma\right).

    Args:
      gamma: (..., channels), one layer for each index of the leading axes.
      std: Their standard deviations.
      epsilon: The band around the mean.
    """
    epsilon = jnp.asarray(epsilon, gamma.dtype)
    is_band = jnp.isfinite(epsilon)
    factor = 1 + jnp.where(is_band, jnp.maximum(epsilon, 0), 0)
    alpha = jnp.mean(gamma / std, axis=-1, keepdims=True)
    # A negative mean would exchange the two ends and flip every sign.
    is_sound = is_band & jnp.isfinite(alpha) & (alpha > 0)
    lower, upper = std * (alpha / factor), std * (alpha * factor)
    is_clipped = is_sound & ((gamma < lower) | (gamma > upper))
    stats = ScaleStats(
        num_values=jnp.full_like(is_clipped, gamma.size, jnp.int32, shape=()),
        num_clipped=jnp.sum(is_clipped, dtype=jnp.int32),
        num_skipped=jnp.sum(~is_sound, dtype=jnp.int32),
    )
    return jnp.where(is_clipped, jnp.clip(gamma, lower, upper), gamma), stats
