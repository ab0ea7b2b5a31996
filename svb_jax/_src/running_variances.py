"""Which BatchNorm's running variance belongs to which scale, in the trees of every library."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from svb_jax._src.paths import NamedLeaf, named_leaves
from svb_jax._src.suggestions import nearest

# The path of a scale, and that of its variance in batch_stats or the variance itself.
Pairs = Mapping[str, str | jax.Array] | Iterable[tuple[str, str | jax.Array]]
Names = tuple[str, ...]
Kind = Literal["bbn", "relative"]

HAIKU_AVERAGE = "/~/var_ema"


class ScaleLeaf(NamedTuple):
    """One layer's scale: its position in the flattened parameters, and its running variance."""

    position: int
    path: str
    variance: jax.Array | None


def find_scales(
    caller: str,
    params: Any,
    batch_stats: Any,
    kind: Kind,
    *,
    is_masked: bool,
    pairs: Pairs | None = None,
) -> list[ScaleLeaf]:
    """Return the BatchNorm scales: those that have a running variance, or raise if none has.

    LayerNorm and GroupNorm have a ``scale`` too, but no variance; a BatchNorm without scale has only that.
    A scale of rank 0 is its own mean, and needs no bound.

    Args:
      caller: The function to name in messages.
      params: The parameters.
      batch_stats: The running statistics of Linen, NNX or Haiku, or Equinox's ``State``.
      kind: Which form of BBN. The relative one needs no variances, only to know its layers.
      is_masked: Whether a mask hides other parameters: then the relative form may do without statistics, and
        takes every scale that the mask left.
      pairs: Which scale has which variance, if none of these libraries' names say so.
    """
    leaves = named_leaves(params)
    named = None if pairs is None else dict(pairs)
    if kind == "relative" and batch_stats is None and is_masked:
        variances: dict[int, Any] = {i: None for i, leaf in enumerate(leaves) if _is_scale(leaf)}
    elif batch_stats is None and not _are_arrays(named):
        raise ValueError(
            f"{caller} needs the running variances: pass batch_stats=batch_stats to update. A wrapper that "
            "drops extra arguments, such as optax.MultiSteps inside a chain, cannot hold it. Flax's "
            "TrainState drops them too: svb_jax.linen.TrainState does not. With NNX: optimizer.update(model, "
            "grads, batch_stats=nnx.state(model, nnx.BatchStat))."
        )
    elif named is not None:
        variances = _by_pairs(caller, leaves, batch_stats, named)
    else:
        variances = _by_module(leaves, batch_stats)
    variances = {i: variance for i, variance in variances.items() if leaves[i].rank > 0}
    if not variances:
        _raise_none(caller, leaves, batch_stats)
    for index, variance in variances.items():
        _check_scale(caller, leaves[index], variance)
    return [ScaleLeaf(index, leaves[index].label, variances[index]) for index in sorted(variances)]


def scales_by_module(params: Any) -> dict[str, Any]:
    """Return the scales of all norms, by the path of their module."""
    return {"/".join(leaf.names[:-1]): leaf.value for leaf in named_leaves(params) if _is_scale(leaf)}


def variances_by_module(batch_stats: Any, params: Any = None) -> dict[str, Any]:
    """Return the running variances, by the path of their BatchNorm; in Equinox the parameters know it."""
    if _is_equinox_state(batch_stats):
        norms = {leaf.names[:-1]: leaf.owner for leaf in named_leaves(params) if _is_equinox_scale(leaf)}
        return {"/".join(names): _equinox_variance(norm, batch_stats) for names, norm in norms.items()}
    return {"/".join(names): variance for names, variance in _variances_by_names(batch_stats).items()}


def _variances_by_names(batch_stats: Any) -> dict[Names, Any]:
    found = {}
    for leaf in named_leaves(batch_stats):
        if leaf.name == "var":
            found[leaf.names[:-1]] = leaf.value
        elif leaf.name == "average" and leaf.names[-2:-1] and leaf.names[-2].endswith(HAIKU_AVERAGE):
            found[*leaf.names[:-2], leaf.names[-2].removesuffix(HAIKU_AVERAGE)] = leaf.value
    return found


def _by_module(leaves: list[NamedLeaf], batch_stats: Any) -> dict[int, Any]:
    if _is_equinox_state(batch_stats):
        norms = {i: leaf.owner for i, leaf in enumerate(leaves) if _is_equinox_scale(leaf)}
        return {i: _equinox_variance(norm, batch_stats) for i, norm in norms.items()}
    variances = _variances_by_names(batch_stats)
    scales = {i: leaf.names[:-1] for i, leaf in enumerate(leaves) if leaf.name == "scale"}
    return {i: variances[module] for i, module in scales.items() if module in variances}


def _by_pairs(
    caller: str, leaves: list[NamedLeaf], batch_stats: Any, pairs: Mapping[str, Any]
) -> dict[int, Any]:
    scales = {leaf.label: index for index, leaf in enumerate(leaves)}
    statistics = {leaf.label: leaf.value for leaf in named_leaves(batch_stats)}
    found = {}
    for scale, variance in pairs.items():
        for path, known in ((scale, scales), (variance, statistics)):
            if isinstance(path, str) and path not in known:
                raise ValueError(f"{caller} found no {path!r} of its pairs; {nearest(path, known)}.")
        found[scales[scale]] = statistics[variance] if isinstance(variance, str) else variance
    return found


def _are_arrays(pairs: Mapping[str, Any] | None) -> bool:
    return pairs is not None and not any(isinstance(variance, str) for variance in pairs.values())


def _is_scale(leaf: NamedLeaf) -> bool:
    # Equinox's norms have vectors called weight, where its layers have matrices.
    return leaf.name == "scale" or (leaf.name == "weight" and leaf.owner is not None and leaf.rank == 1)


def _is_equinox_state(batch_stats: Any) -> bool:
    return hasattr(batch_stats, "substate")


def _is_equinox_scale(leaf: NamedLeaf) -> bool:
    return leaf.name == "weight" and hasattr(leaf.owner, "batch_state_index")


def _equinox_variance(norm: Any, state: Any) -> jax.Array:
    """Return the variance with which Equinox's BatchNorm divides at inference."""
    if norm.batch_state_index is None:
        return state.get(norm.ema_state_index)[1]
    counter = state.get(norm.batch_counter)
    weight = jnp.where(counter == 0, 1.0, 1 - norm.momentum**counter)
    return state.get(norm.batch_state_index)[1] / weight[..., None]


def _check_scale(caller: str, scale: NamedLeaf, variance: Any) -> None:
    dtype = jnp.result_type(scale.value)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{caller} needs scales in floating point, of 16 bits or more, got {dtype} at {scale.label!r}."
        )
    if variance is not None and _without_ones(jnp.shape(variance)) != _without_ones(scale.shape):
        raise ValueError(
            f"{caller} needs a running variance for each scale, got shape {jnp.shape(variance)} for "
            f"{scale.label!r} of shape {scale.shape}."
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _raise_none(caller: str, leaves: list[NamedLeaf], batch_stats: Any) -> NoReturn:
    scales = [leaf.label for leaf in leaves if _is_scale(leaf)]
    modules = sorted(variances_by_module(batch_stats))
    raise ValueError(
        f"{caller} found no BatchNorm: a parameter .../scale needs a running variance .../var in "
        f"batch_stats. Scales: {', '.join(scales) or 'none'}; "
        f"layers with variances: {', '.join(modules) or 'none'}. In Haiku batch_stats is the network's "
        "state, in Equinox its eqx.nn.State."
    )
