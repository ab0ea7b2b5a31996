"""Bounded Batch Normalization: keeping a layer's scales near their mean."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from svb_jax.axes import clean_path, key_name, leaf_name, path_string

Kind = Literal["bbn", "relative"]


class ScaleLeaf(NamedTuple):
    """One layer's scale: where it stands in the flattened parameters, and its running variance."""

    index: int
    path: str
    variance: jax.Array | None


class ScaleReading(NamedTuple):
    """What a bounding of scales saw, summed up over the layers."""

    clipped: jax.Array
    values: jax.Array
    skipped: jax.Array


def check_kind(caller: str, kind: str) -> None:
    """Raise unless ``kind`` names a form of BBN."""
    if kind not in get_args(Kind):
        raise ValueError(f"{caller} needs kind to be one of {get_args(Kind)}, got {kind!r}.")


def scale_leaves(params: Any, batch_stats: Any, *, all_scales: bool = False) -> list[ScaleLeaf]:
    """Return the BatchNorm scales: those whose path has a running variance, or all if asked.

    LayerNorm and GroupNorm have a ``scale`` too, but no variance; a BatchNorm without scale has a
    variance only. Both must be there.
    """
    variances = {
        _owner(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch_stats)[0]
        if leaf_name(path) == "var"
    }
    scales = [
        ScaleLeaf(index, path_string(path), variances.get(_owner(path)))
        for index, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])
        if leaf_name(path) == "scale"
    ]
    found = scales if all_scales else [scale for scale in scales if scale.variance is not None]
    if not found:
        raise ValueError(
            "bound_batch_norm_scales found no BatchNorm: a parameter .../scale needs a running variance "
            f".../var beside it in batch_stats. Scales: {[s.path for s in scales] or 'none'}; "
            f"variances: {sorted(variances) or 'none'}."
        )
    return found


def clip_scales(
    scale: jax.Array, variance: jax.Array | None, epsilon: ArrayLike, kind: Kind, bn_epsilon: float
) -> tuple[jax.Array, ScaleReading]:
    r"""Bound one layer's scales around their mean.

    With :math:`\varsigma` the running standard deviation (one for ``relative``) and
    :math:`\alpha` the mean of :math:`\gamma/\varsigma`,

    .. math::
      \gamma \leftarrow \alpha\varsigma\operatorname{clip}\left(\frac{\gamma}{\alpha\varsigma},
      \frac{1}{1+\tilde\epsilon}, 1+\tilde\epsilon\right).

    The last axis is the channels; leading axes, as ``nn.scan`` makes them, are layers of their own.
    """
    gamma = scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
    use_variance = kind == "bbn" and variance is not None
    std = jnp.sqrt(variance.astype(gamma.dtype) + bn_epsilon) if use_variance else jnp.ones_like(gamma)
    ratio = gamma / std
    alpha = jnp.mean(ratio, axis=-1, keepdims=True)
    # Around a mean that is not positive the two bounds would change places and flip every sign.
    is_sound = jnp.isfinite(alpha) & (alpha > 0)
    bound = 1 + jnp.asarray(epsilon, gamma.dtype)
    relative = ratio / jnp.where(is_sound, alpha, 1)
    is_clipped = is_sound & ((relative > bound) | (relative < 1 / bound))
    bounded = jnp.where(is_clipped, alpha * std * jnp.clip(relative, 1 / bound, bound), gamma)
    reading = ScaleReading(
        jnp.sum(is_clipped, dtype=jnp.int32),
        jnp.asarray(gamma.size, jnp.int32),
        jnp.sum(~is_sound, dtype=jnp.int32),
    )
    return bounded, reading


def _owner(path: tuple[Any, ...]) -> str:
    return "/".join(key_name(key) for key in clean_path(path)[:-1])
