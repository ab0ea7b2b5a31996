"""Bounded Batch Normalization: keeping a layer's scales near their mean."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from svb_jax.axes import clean_path, key_name, leaf_name, path_string

Kind = Literal["bbn", "relative"]


class ScaleLeaf(NamedTuple):
    """One layer's scale: its position in the flattened parameters, and its running variance."""

    position: int
    path: str
    variance: jax.Array | None


class ScaleReading(NamedTuple):
    """What a bounding of scales saw, summed up over the layers."""

    clipped: jax.Array
    values: jax.Array
    skipped: jax.Array


def scale_leaves(
    caller: str, params: Any, batch_stats: Any, kind: Kind, *, is_masked: bool
) -> list[ScaleLeaf]:
    """Return the BatchNorm scales: those with a running variance at the same path, or raise if none has.

    LayerNorm and GroupNorm have a ``scale`` too, but no variance; a BatchNorm without scale has a variance
    only. Without ``batch_stats`` the relative form takes every scale that a mask left in the tree.
    """
    by_mask = kind == "relative" and batch_stats is None and is_masked
    if batch_stats is None and not by_mask:
        raise ValueError(
            f"{caller} needs the running variances: pass batch_stats=batch_stats to update. A wrapper that "
            "drops extra arguments, such as optax.MultiSteps inside a chain, cannot hold it."
        )
    variances = {
        _owner(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch_stats)[0]
        if leaf_name(path) == "var"
    }
    scales = [
        ScaleLeaf(position, path_string(path), variances.get(_owner(path)))
        for position, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])
        if leaf_name(path) == "scale"
    ]
    found = [scale for scale in scales if by_mask or scale.variance is not None]
    if not found:
        raise ValueError(
            f"{caller} found no BatchNorm: a parameter .../scale needs a running variance .../var in "
            f"batch_stats. Scales: {', '.join(s.path for s in scales) or 'none'}; "
            f"layers with variances: {', '.join(sorted(variances)) or 'none'}."
        )
    return found


def clip_scale_leaves(
    leaves: list[ScaleLeaf], values: list[jax.Array], epsilon: ArrayLike, kind: Kind, bn_epsilon: float
) -> tuple[list[jax.Array], ScaleReading]:
    """Bound every layer's scales, and sum up what was seen."""
    bounded, readings = [], []
    for leaf, value in zip(leaves, values, strict=True):
        variance = leaf.variance if kind == "bbn" else None
        scale, reading = clip_scales(value, variance, epsilon, bn_epsilon)
        bounded.append(scale)
        readings.append(reading)
    return bounded, jax.tree.map(lambda *parts: jnp.sum(jnp.stack(parts), dtype=jnp.int32), *readings)


# Traced once for equal layers, of which a network has many.
@jax.jit
def clip_scales(
    scale: jax.Array, variance: jax.Array | None, epsilon: ArrayLike, bn_epsilon: float
) -> tuple[jax.Array, ScaleReading]:
    r"""Bound a layer's scales around their mean.

    With :math:`\varsigma` the running standard deviation (one without variances) and
    :math:`\alpha` the mean of :math:`\gamma/\varsigma`,

    .. math::
      \gamma \leftarrow \alpha\varsigma\operatorname{clip}\left(\frac{\gamma}{\alpha\varsigma},
      \frac{1}{1+\tilde\epsilon}, 1+\tilde\epsilon\right).

    The last axis is the channels; leading axes, as ``nn.scan`` makes them, are layers of their own.
    """
    gamma = scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
    std = jnp.ones_like(gamma) if variance is None else jnp.sqrt(variance.astype(gamma.dtype) + bn_epsilon)
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
