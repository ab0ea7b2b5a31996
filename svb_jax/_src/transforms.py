"""SVB as an optax transformation."""

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from svb_jax._src.apply_every import ScalarOrSchedule, Targets, Timing, land_updates
from svb_jax._src.bound import Bound
from svb_jax._src.checks import check_bands, check_choice, check_projection
from svb_jax._src.clip import Method
from svb_jax._src.clip.distribute import AxisName
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.leaves import Centre, matrix_leaves, project_leaves, summarise
from svb_jax._src.masks import check_patterns, masked
from svb_jax._src.paths import value_by_path
from svb_jax._src.stats import BoundSingularValuesState, no_projection

# One band for all matrices, or from patterns of their paths to bands.
Epsilon = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]


def bound_singular_values(
    epsilon: Epsilon,
    every: int = 1,
    *,
    until: int | None = None,
    method: Method = "auto",
    centre: Centre = 1.0,
    dimension_numbers: DimensionNumbers = None,
    where: Any = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    shardings: Any = None,
    keep_dtype: bool = False,
    per_layer: bool = False,
    name: str = "svb",
) -> Bound:
    r"""Bound the singular values of every weight matrix in a band around one.

    Every ``every`` steps the update is replaced by the one that lands on the nearest bounded matrix,

    .. math::
      W \leftarrow U \, \operatorname{clip}(\Sigma, \tfrac{1}{1+\epsilon}, 1+\epsilon) V^\top,
      \quad U \Sigma V^\top = W + \Delta W.

    Put it last in a chain: it must see the step exactly as it will be applied.

    Args:
      epsilon: The band is ``[1 / (1 + epsilon), 1 + epsilon]``; 0 makes every matrix orthogonal. A schedule
        is called with the count of steps before this one. A mapping from patterns of paths, as :func:`paths`
        reads them, gives each matrix the band of the first pattern that matches it. Below 0 a schedule counts
        as 0; at steps where it is not finite, matrices are left alone and counted.
      every: Steps between two projections; the first is at step ``every``, counted from 1.
      until: The last step at which to project.
      method: The route of :func:`clip_singular_values`.
      centre: The middle of the band if it is not 1, a number or a function of a matrix's (outputs, inputs).
      dimension_numbers: Which leaves are matrices, and their axes: a tree of :class:`MatrixAxes` or
        ``optax.contrib.MuonDimensionNumbers``, or a function of the parameters that returns one. By default
        leaves called ``kernel``, ``w`` or ``weight``, with their output on the last axis.
      where: Which leaves to bound, the others are left alone: a pattern of paths or a list of them, or a mask
        as ``optax.masked`` takes it.
      axis_name: Distribute the work over this axis of the surrounding ``pmap`` or ``shard_map``.
      mesh: Distribute the work over this mesh, under a plain ``jit``.
      shardings: How the parameters lie on a mesh, a tree of ``NamedSharding`` like theirs, such as
        ``jax.tree.map(lambda leaf: leaf.sharding, params)``: on meshes of automatic axes a traced array does
        not say it, and would be gathered. It implies ``mesh``.
      keep_dtype: Keep the updates of half-precision leaves in their type. By default they become float32,
        so that ``optax.apply_updates`` stores the correctly rounded projection; wrappers that insist on
        the type, such as ``optax.apply_if_finite``, need this, and pay with a looser bound.
      per_layer: Keep statistics of every layer too, not of the network alone.
      name: What :func:`projection_stats` calls this bound.

    Returns:
      A transformation whose ``update`` needs ``params``. Its method :meth:`Bound.apply` takes parameters
      after their step instead.

    Example:
      >>> import jax.numpy as jnp, optax, svb_jax
      >>> params = {"kernel": jnp.diag(jnp.array([3.0, 1.0, 0.1]))}
      >>> tx = optax.chain(optax.sgd(0.1), svb_jax.bound_singular_values(epsilon=0.5, every=1))
      >>> updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
      >>> jnp.diag(optax.apply_updates(params, updates)["kernel"]).round(4)
      Array([1.5   , 1.    , 0.6667], dtype=float32)

    References:
      Jia, `Improving training of deep neural networks via Singular Value Bounding
      <https://arxiv.org/abs/1611.06013>`_, 2016
    """
    caller = "bound_singular_values"
    bands = check_bands(caller, epsilon)
    timing = Timing(every, until)
    timing.check(caller)
    check_choice(caller, "method", method, get_args(Method))
    check_projection(caller, centre, axis_name, mesh, shardings)

    def init_fn(params: optax.Params) -> BoundSingularValuesState:
        leaves = matrix_leaves(params, dimension_numbers)
        if per_layer and not leaves:
            raise ValueError(
                f"{caller} needs the parameters to know its layers: with per_layer=True its state cannot be "
                "mapped by optax.tree_map_params."
            )
        check_patterns(f"{caller}'s epsilon", bands, params)
        names = [name, *(f"{name}/{leaf.label}" for leaf in leaves if per_layer)]
        stats = {each: no_projection() for each in names}
        return BoundSingularValuesState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), stats)

    def update_fn(
        updates: optax.Updates,
        state: BoundSingularValuesState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, BoundSingularValuesState]:
        targets = Targets(caller, updates, params, extra_args)
        leaves = [
            leaf for leaf in matrix_leaves(params, dimension_numbers) if targets.place(leaf.index) is not None
        ]
        band_of: list[Any] = [value_by_path(f"{caller}'s epsilon", bands, leaf.path) for leaf in leaves]

        def bound(stepped: list[jax.Array], count: jax.Array) -> tuple[list[jax.Array], Any]:
            epsilons: list[Any] = [band(count) if callable(band) else band for band in band_of]
            projected, seen = project_leaves(
                leaves,
                stepped,
                epsilons,
                centre=centre,
                method=method,
                axis_name=axis_name,
                mesh=mesh,
                shardings=shardings,
            )
            stats = dict(state.stats) | {name: summarise(seen, [leaf.matrix_shape for leaf in leaves])}
            if per_layer:
                stats |= {
                    f"{name}/{leaf.label}": summarise([each], [leaf.matrix_shape])
                    for leaf, each in zip(leaves, seen, strict=True)
                }
            return projected, stats

        return land_updates(targets, [leaf.index for leaf in leaves], state, timing, bound, keep_dtype)

    return masked(init_fn, update_fn, where)
