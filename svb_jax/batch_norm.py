"""Bounded Batch Normalization: keeping a layer's scales near their mean."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from svb_jax.axes import clean_path, key_name, leaf_name, path_string
from svb_jax.cutting import computed_zero, cut
from svb_jax.sharing import replicate, shard_like

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
    """Bound every layer's scales, all at once, and sum up what was seen.

    The last axis is the channels; leading axes, as ``nn.scan`` makes them, are layers of their own. All are
    rows of one array, filled up with zeros: else a program would be compiled for each width.
    """
    layers = [_as_layers(value) for value in values]
    widths = np.concatenate([np.full(len(layer), layer.shape[1]) for layer in layers])
    compute = jnp.result_type(jnp.float32, *layers)
    gamma = _as_rows(layers, compute)
    std = jnp.ones_like(gamma)
    if kind == "bbn":
        variances = [_as_layers(leaf.variance) for leaf in leaves if leaf.variance is not None]
        std = jnp.sqrt(_as_rows(variances, compute) + bn_epsilon)
    bounded, reading = clip_scales(gamma, std, jnp.asarray(widths)[:, None], epsilon)
    zero, stop, cuts = computed_zero(reading.skipped), 0, []
    for value, layer in zip(values, layers, strict=True):
        start, stop = stop, stop + len(layer)
        rows = cut(bounded, start, stop, zero)[:, : layer.shape[1]]
        scales = rows.reshape(value.shape).astype(jnp.promote_types(value.dtype, jnp.float32))
        cuts.append(shard_like(scales, value))
    return cuts, reading


def clip_scales(
    gamma: jax.Array, std: jax.Array, widths: jax.Array, epsilon: ArrayLike
) -> tuple[jax.Array, ScaleReading]:
    r"""Bound each row of scales around its mean.

    With :math:`\varsigma` the standard deviation and :math:`\alpha` the mean of :math:`\gamma/\varsigma`,

    .. math::
      \gamma \leftarrow \alpha\varsigma\operatorname{clip}\left(\frac{\gamma}{\alpha\varsigma},
      \frac{1}{1+\tilde\epsilon}, 1+\tilde\epsilon\right).

    Args:
      gamma: a layer's scales a row, then zeros.
      std: their standard deviations.
      widths: how many scales there are in each row.
      epsilon: the band around the mean.
    """
    ratio = gamma / std
    alpha = jnp.sum(ratio, axis=-1, keepdims=True) / widths
    # Around a mean that is not positive the two bounds would change places and flip every sign.
    is_sound = jnp.isfinite(alpha) & (alpha > 0)
    bound = 1 + jnp.asarray(epsilon, gamma.dtype)
    relative = ratio / jnp.where(is_sound, alpha, 1)
    is_clipped = is_sound & ((relative > bound) | (relative < 1 / bound))
    is_clipped &= jnp.arange(gamma.shape[-1]) < widths
    bounded = jnp.where(is_clipped, alpha * std * jnp.clip(relative, 1 / bound, bound), gamma)
    clipped, skipped = jnp.sum(is_clipped, dtype=jnp.int32), jnp.sum(~is_sound, dtype=jnp.int32)
    return bounded, ScaleReading(clipped, jnp.sum(widths, dtype=jnp.int32), skipped)


def _as_layers(scales: jax.Array) -> jax.Array:
    return replicate(scales).reshape(-1, scales.shape[-1])


def _as_rows(layers: list[jax.Array], compute: DTypeLike) -> jax.Array:
    widest = max(layer.shape[1] for layer in layers)
    filled = [jnp.pad(layer.astype(compute), ((0, 0), (0, widest - layer.shape[1]))) for layer in layers]
    return jnp.concatenate(filled)


def _owner(path: tuple[Any, ...]) -> str:
    return "/".join(key_name(key) for key in clean_path(path)[:-1])
