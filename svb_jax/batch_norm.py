"""Bounded Batch Normalization: keeping a layer's scales near their mean."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from svb_jax.axes import clean_path, key_name, leaf_name, path_string
from svb_jax.layout import replicate, shard_like
from svb_jax.packing import Packing, join
from svb_jax.routes import matmul

Kind = Literal["bbn", "relative"]


class ScaleLeaf(NamedTuple):
    """One layer's scale: its position in the flattened parameters, and its running variance."""

    position: int
    path: str
    variance: jax.Array | None


class ScaleReading(NamedTuple):
    """What a bounding of scales saw, summed up over the layers.

    Attributes:
      counts: of scales clipped, of all, of layers left alone; one array, which is compiled at once.
    """

    counts: jax.Array

    @property
    def clipped(self) -> jax.Array:
        """Return how many scales were outside their band."""
        return self.counts[0]

    @property
    def values(self) -> jax.Array:
        """Return how many scales there were."""
        return self.counts[1]

    @property
    def skipped(self) -> jax.Array:
        """Return how many layers were left alone, because their mean is not positive and finite."""
        return self.counts[2]


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


def clip_scale_rows(
    leaves: list[ScaleLeaf],
    packing: Packing,
    rows: list[jax.Array],
    epsilon: ArrayLike,
    kind: Kind,
    bn_epsilon: float,
) -> tuple[list[jax.Array], ScaleReading]:
    """Bound every layer's scales, all of a row at once, and sum up what was seen.

    Args:
      leaves: the layers.
      packing: of their scales.
      rows: the packed scales, in float32 or better.
      epsilon: the band around the mean.
      kind: which of the two forms.
      bn_epsilon: what BatchNorm adds to its variance.
    """
    bounded, counts = [], []
    for positions, row in zip(packing.rows, rows, strict=True):
        layers = Layers(tuple(packing.shapes[position] for position in positions))
        gamma = replicate(row).reshape(-1)
        std = jnp.ones_like(gamma)
        if kind == "bbn":
            variances = [leaves[position].variance for position in positions]
            variance = join([jnp.asarray(each, row.dtype) for each in variances])
            std = jnp.sqrt(replicate(variance).reshape(-1) + bn_epsilon)
        clipped, reading = clip_scales(gamma, std, layers, epsilon)
        bounded.append(shard_like(clipped.reshape(row.shape), row))
        counts.append(reading.counts)
    return bounded, ScaleReading(functools.reduce(jnp.add, counts))


@dataclass(frozen=True)
class Layers:
    """The layers whose scales make up a row of numbers.

    The last axis of a parameter is the channels; leading axes, as ``nn.scan`` makes them, are layers of
    their own.

    Attributes:
      shapes: of the parameters.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def widths(self) -> np.ndarray:
        """Return each layer's number of channels."""
        return np.concatenate([np.full(math.prod(shape[:-1]), shape[-1]) for shape in self.shapes])

    @property
    def starts(self) -> np.ndarray:
        """Return where each layer begins."""
        return np.cumsum(self.widths) - self.widths

    def mean(self, row: jax.Array) -> jax.Array:
        """Return the mean of each layer's numbers."""
        # As one array, filled up with zeros: else a program would be compiled for each width.
        channel = jnp.arange(self.widths.max())
        numbers = row.at[jnp.asarray(self.starts)[:, None] + channel].get(mode="clip")
        numbers = jnp.where(channel < jnp.asarray(self.widths)[:, None], numbers, 0)
        # Sums are products here: XLA hands those to a library on CPU, while it compiles sums.
        return matmul(numbers, jnp.ones(channel.size, row.dtype)) / jnp.asarray(self.widths, row.dtype)

    def spread(self, values: jax.Array) -> jax.Array:
        """Return a row in which each number is its layer's value."""
        owner = np.repeat(np.arange(self.widths.size), self.widths)
        return values.at[jnp.asarray(owner)].get(mode="promise_in_bounds")


def clip_scales(
    gamma: jax.Array, std: jax.Array, layers: Layers, epsilon: ArrayLike
) -> tuple[jax.Array, ScaleReading]:
    r"""Bound each layer's scales around their mean.

    With :math:`\varsigma` the standard deviation and :math:`\alpha` the mean of :math:`\gamma/\varsigma`,

    .. math::
      \gamma \leftarrow \varsigma\operatorname{clip}\left(\frac{\gamma}{\varsigma},
      \frac{\alpha}{1+\tilde\epsilon}, (1+\tilde\epsilon)\,\alpha\right).

    Args:
      gamma: the scales of all layers in a row.
      std: their standard deviations.
      layers: which scale is whose.
      epsilon: the band around the mean.
    """
    ratio = gamma / std
    alpha = layers.spread(layers.mean(ratio))
    # Around a mean that is not positive the two bounds would change places and flip every sign.
    is_sound = jnp.isfinite(alpha) & (alpha > 0)
    bound = 1 + jnp.asarray(epsilon, gamma.dtype)
    lower, upper = alpha / bound, alpha * bound
    is_clipped = is_sound & ((ratio < lower) | (ratio > upper))
    bounded = jnp.where(is_clipped, jnp.clip(ratio, lower, upper) * std, gamma)
    of_each, of_first = np.ones(gamma.size), np.isin(np.arange(gamma.size), layers.starts)
    seen = jnp.stack([is_clipped, ~is_sound]).astype(jnp.float32)
    counts = matmul(seen, jnp.asarray(np.stack([of_each, of_first], axis=1), seen.dtype)).astype(jnp.int32)
    num_values = jnp.full_like(counts[0, 0], gamma.size)
    return bounded, ScaleReading(jnp.stack([counts[0, 0], num_values, counts[1, 1]]))


def _owner(path: tuple[Any, ...]) -> str:
    return "/".join(key_name(key) for key in clean_path(path)[:-1])
