"""What a projection saw: of each matrix in a batch, of each layer, of the whole network."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Clipped(NamedTuple):
    """A batch of ``b`` matrices with clipped singular values, and what was seen of each.

    Attributes:
      matrices: (b, m, n).
      smallest: (b,), the smallest singular value before.
      largest: (b,), the largest singular value before.
      num_clipped: (b,), how many singular values were outside the band.
      is_exact: (b,), whether the matrix took the slower, exact path.
      is_missed: (b,), whether a check of the result says that it is still outside the band.
      is_skipped: (b,), whether the matrix was left alone because it, or its band, was not finite.
    """

    matrices: jax.Array
    smallest: jax.Array
    largest: jax.Array
    num_clipped: jax.Array
    is_exact: jax.Array
    is_missed: jax.Array
    is_skipped: jax.Array


class ProjectionStats(NamedTuple):
    """What the last projection saw of a network's matrices, or of one layer's.

    All are 0 before the first projection; a projection that skipped every matrix has no values.

    Attributes:
      sigma_min: The smallest singular value before the projection.
      sigma_max: The largest singular value before the projection.
      num_values: How many singular values there were.
      num_clipped: How many of them were outside the band.
      num_exact: How many matrices took the exact path, because they were ill-conditioned.
      num_missed: How many are still outside the band, by the route's own check.
      num_skipped: How many were left alone, because an entry or the band was not finite.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> bound = svb_jax.bound_singular_values(epsilon=0.5)
      >>> params = {"kernel": jnp.diag(jnp.array([3.0, 1.0, 0.5]))}
      >>> _, state = bound.apply(params, bound.init(params))
      >>> stats = state.stats["svb"]
      >>> print(stats.sigma_max, stats.num_clipped, stats.num_values)
      3.0 2 3
    """

    sigma_min: jax.Array
    sigma_max: jax.Array
    num_values: jax.Array
    num_clipped: jax.Array
    num_exact: jax.Array
    num_missed: jax.Array
    num_skipped: jax.Array


class ScaleStats(NamedTuple):
    """What the last bounding saw of BatchNorm's scales.

    Attributes:
      num_values: How many scales there were.
      num_clipped: How many of them were outside the band.
      num_skipped: How many layers were left alone, because their mean was not positive and finite or the
        band was not finite.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> bound = svb_jax.bound_batch_norm_scales(epsilon=1.0)
      >>> params = {"bn": {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])}}
      >>> batch_stats = {"bn": {"var": jnp.ones(4)}}
      >>> _, state = bound.apply(params, bound.init(params), batch_stats=batch_stats)
      >>> stats = state.stats["bbn"]
      >>> print(stats.num_clipped, stats.num_values)
      3 4
    """

    num_values: jax.Array
    num_clipped: jax.Array
    num_skipped: jax.Array


class BoundSingularValuesState(NamedTuple):
    """Steps taken, the last at which matrices were bounded, and what was seen of them before.

    Attributes:
      count: How many steps were taken.
      step: The last step at which matrices were bounded, 0 before the first.
      stats: What was seen then, by the bound's name; also by ``name/path`` of every layer, if asked for.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> bound = svb_jax.bound_singular_values(epsilon=0.5, every=2, per_layer=True)
      >>> params = {"kernel": jnp.eye(3)}
      >>> state = bound.init(params)
      >>> for _ in range(3):
      ...     params, state = bound.apply(params, state)
      >>> print(state.count, state.step, sorted(state.stats))
      3 2 ['svb', 'svb/kernel']
    """

    count: jax.Array
    step: jax.Array
    stats: dict[str, ProjectionStats]


class BoundBatchNormScalesState(NamedTuple):
    """Steps taken, the last at which scales were bounded, and what was seen of them before.

    Attributes:
      count: How many steps were taken.
      step: The last step at which scales were bounded, 0 before the first.
      stats: What was seen then, by the bound's name.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> bound = svb_jax.bound_batch_norm_scales(epsilon=1.0, every=2, name="scales")
      >>> state = bound.init({"bn": {"scale": jnp.ones(4)}})
      >>> print(state.count, state.step, sorted(state.stats))
      0 0 ['scales']
    """

    count: jax.Array
    step: jax.Array
    stats: dict[str, ScaleStats]


def no_projection() -> ProjectionStats:
    """Return the statistics before the first projection: each a buffer of its own, as donation needs."""
    extremes = [jnp.zeros((), jnp.float32) for _ in range(2)]
    return ProjectionStats(*extremes, *(jnp.zeros((), jnp.int32) for _ in range(5)))


def no_scales() -> ScaleStats:
    """Return the statistics before the first bounding of scales."""
    return ScaleStats(*(jnp.zeros((), jnp.int32) for _ in range(3)))


def projection_stats(opt_state: Any) -> dict[str, jax.Array]:
    """Return what the last projections saw, out of any nested optax state, as a flat dict.

    Keys are ``svb/step``, ``svb/sigma_min`` and ``svb/sigma_max`` (before the projection),
    ``svb/share_clipped``, ``svb/exact`` (matrices that took the exact path), ``svb/missed`` (matrices still
    outside the band, by the route's own check), ``svb/skipped`` (matrices, or a band, that were not finite),
    and ``bbn/step``, ``bbn/share_clipped``, ``bbn/skipped``. A bound with ``per_layer=True`` adds the same
    for each layer:
    ``svb/block/kernel/sigma_min``. Bounds are called by their ``name=``; several of one name are
    ``svb.0/...``, ``svb.1/...``, in the state's order. The values stay on the device; before the first
    projection all are 0.

    Args:
      opt_state: A state of the bounds, or any state that has them in it.

    Returns:
      From each key to a number.

    Example:
      >>> import jax.numpy as jnp, optax, svb_jax
      >>> tx = svb_jax.svb(optax.adam(1e-3), epsilon=0.5, every=100)
      >>> sorted(svb_jax.projection_stats(tx.init({"kernel": jnp.eye(3)})))
      ['svb/exact', 'svb/missed', 'svb/share_clipped', 'svb/sigma_max', 'svb/sigma_min', 'svb/skipped',
       'svb/step']
    """
    kinds = (BoundSingularValuesState, BoundBatchNormScalesState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    states = [node for node in nodes if isinstance(node, kinds)]
    names = [next(iter(state.stats)) for state in states]
    figures = {}
    for position, (name, state) in enumerate(zip(names, states, strict=True)):
        unique = f"{name}.{names[:position].count(name)}" if names.count(name) > 1 else name
        figures[f"{unique}/step"] = _unwrap(state.step)
        for layer, stats in state.stats.items():
            prefix, stats = unique + layer.removeprefix(name), type(stats)(*map(_unwrap, stats))
            figures |= {f"{prefix}/{key}": value for key, value in _figures(stats).items()}
    return figures


def _unwrap(figure: Any) -> jax.Array:
    """Return an array out of what NNX's optimizer wraps around every leaf of its state."""
    [array] = jax.tree.leaves(figure)
    return array[...]


def _figures(stats: ProjectionStats | ScaleStats) -> dict[str, jax.Array]:
    share = (stats.num_clipped / jnp.maximum(stats.num_values, 1)).astype(jnp.float32)
    figures = {"share_clipped": share, "skipped": stats.num_skipped}
    if isinstance(stats, ProjectionStats):
        figures |= {"sigma_min": stats.sigma_min, "sigma_max": stats.sigma_max}
        figures |= {"exact": stats.num_exact, "missed": stats.num_missed}
    return figures
