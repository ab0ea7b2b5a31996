"""SVB and BBN as optax transformations: chainable bounds, and wrappers around an optimizer."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax.batch_norm import Kind, ScaleReading, clip_scale_rows, scale_leaves
from svb_jax.checks import check_choice, check_params
from svb_jax.gating import Bounded, ScalarOrSchedule, Timing, Where, masked, replace_updates
from svb_jax.matrices import DimensionNumbers, matrix_leaves
from svb_jax.packing import Packing
from svb_jax.reading import Reading, empty_reading
from svb_jax.routes import Method
from svb_jax.sharing import AxisName
from svb_jax.tree_projection import Scale, check_projection, project_rows


class BoundSingularValuesState(NamedTuple):
    """Steps taken, the last at which matrices were bounded, and what was seen of them before.

    :func:`projection_stats` makes figures of it.
    """

    count: jax.Array
    step: jax.Array
    reading: Reading


class BoundBatchNormScalesState(NamedTuple):
    """Steps taken, the last at which scales were bounded, and what was seen of them before.

    :func:`projection_stats` makes figures of it.
    """

    count: jax.Array
    step: jax.Array
    reading: ScaleReading


def bound_singular_values(
    epsilon: ScalarOrSchedule,
    every: int = 1,
    *,
    until: int | None = None,
    method: Method = "auto",
    scale: Scale = 1.0,
    dimension_numbers: DimensionNumbers = None,
    where: Where | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    keep_dtype: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Bound the singular values of every weight matrix in a band around one.

    Every ``every`` steps the update is replaced by the one that lands on the nearest bounded matrix,

    .. math::
      W \leftarrow U \operatorname{clip}(\Sigma, \tfrac{1}{1+\epsilon}, 1+\epsilon) V^\top,
      \quad U \Sigma V^\top = W + \Delta W.

    Put it last in a chain: it must see the step exactly as it will be applied.

    Args:
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``; 0 makes every matrix orthogonal. A schedule
        is called with the count of steps before this one.
      every: steps between two projections; the first is at step ``every``, counted from 1.
      until: the last step at which to project.
      method: the route of :func:`clip_singular_values`.
      scale: the band's centre, a number or a function of a matrix's (outputs, inputs).
      dimension_numbers: which leaves are matrices, and their axes: a tree of :class:`MatrixAxes` or
        ``optax.contrib.MuonDimensionNumbers``, or a function of the parameters that returns one. By default
        leaves called ``kernel``, ``w`` or ``weight``, with their output on the last axis.
      where: a mask as ``optax.masked`` takes it; leaves outside it are left alone.
      axis_name: share the work over this axis of the surrounding ``pmap`` or ``shard_map``.
      mesh: share the work over this mesh, under a plain ``jit``.
      keep_dtype: keep the updates of half-precision leaves in their type. By default they become float32,
        so that ``optax.apply_updates`` stores the correctly rounded projection; wrappers that insist on
        the type, such as ``optax.apply_if_finite``, need this, and pay with a looser bound.

    Returns:
      A transformation whose ``update`` needs ``params``.

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
    name = "bound_singular_values"
    timing = Timing(epsilon, every, until)
    timing.check(name)
    check_projection(name, method, scale, axis_name, mesh)

    def init_fn(params: optax.Params) -> BoundSingularValuesState:
        matrix_leaves(params, dimension_numbers)
        zero = jnp.zeros((), jnp.int32)
        return BoundSingularValuesState(zero, jnp.copy(zero), empty_reading(zero))

    def update_fn(
        updates: optax.Updates,
        state: BoundSingularValuesState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, BoundSingularValuesState]:
        del extra_args
        check_params(name, params)
        leaves = matrix_leaves(params, dimension_numbers)

        def bound(packing: Packing, rows: list[jax.Array], epsilon: ArrayLike) -> Bounded:
            return project_rows(
                leaves, packing, rows, epsilon, scale=scale, method=method, axis_name=axis_name, mesh=mesh
            )

        indices = [leaf.index for leaf in leaves]
        return replace_updates(updates, state, params, indices, timing, bound, keep_dtype)

    return masked(init_fn, update_fn, where)


def bound_batch_norm_scales(
    epsilon: ScalarOrSchedule,
    every: int = 1,
    *,
    until: int | None = None,
    kind: Kind = "bbn",
    bn_epsilon: float = 1e-5,
    where: Where | None = None,
    keep_dtype: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Bound the scales of every BatchNorm around their mean (BBN).

    Every ``every`` steps the update of :math:`\gamma` is replaced by the one that lands on

    .. math::
      \gamma \leftarrow \alpha\varsigma\operatorname{clip}\left(\frac{\gamma}{\alpha\varsigma},
      \frac{1}{1+\tilde\epsilon}, 1+\tilde\epsilon\right), \quad
      \alpha = \operatorname{mean}(\gamma/\varsigma),

    with :math:`\varsigma` the running standard deviation. The running variances come as the extra argument
    ``batch_stats``: the statistics as this step updated them, in Linen's tree or NNX's state.

    Args:
      epsilon: :math:`\tilde\epsilon`, a number or a schedule.
      every: steps between two boundings; the first is at step ``every``, counted from 1.
      until: the last step at which to bound.
      kind: ``bbn`` is the paper's. ``relative`` bounds :math:`\gamma` around its own mean, as the authors'
        code does by default; it uses no variance, and finds its layers through ``batch_stats`` or, if none
        is given, through ``where``.
      bn_epsilon: what the network's BatchNorm adds to its variance.
      where: a mask as ``optax.masked`` takes it; leaves outside it are left alone.
      keep_dtype: as for :func:`bound_singular_values`.

    Returns:
      A transformation whose ``update`` needs ``params`` and ``batch_stats``.

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
    name = "bound_batch_norm_scales"
    timing = Timing(epsilon, every, until)
    timing.check(name)
    check_choice(name, "kind", kind, get_args(Kind))

    def init_fn(params: optax.Params) -> BoundBatchNormScalesState:
        del params
        zero = jnp.zeros((), jnp.int32)
        return BoundBatchNormScalesState(zero, jnp.copy(zero), ScaleReading(jnp.zeros(3, jnp.int32)))

    def update_fn(
        updates: optax.Updates,
        state: BoundBatchNormScalesState,
        params: optax.Params | None = None,
        *,
        batch_stats: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, BoundBatchNormScalesState]:
        del extra_args
        check_params(name, params)
        leaves = scale_leaves(name, params, batch_stats, kind, is_masked=where is not None)

        def bound(packing: Packing, rows: list[jax.Array], epsilon: ArrayLike) -> Bounded:
            return clip_scale_rows(leaves, packing, rows, epsilon, kind, bn_epsilon)

        indices = [leaf.position for leaf in leaves]
        return replace_updates(updates, state, params, indices, timing, bound, keep_dtype)

    return masked(init_fn, update_fn, where)


def svb(
    inner: optax.GradientTransformation, epsilon: ScalarOrSchedule, every: int = 1, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Train with Singular Value Bounding: ``inner``, with every weight matrix bounded every ``every`` steps.

    Args:
      inner: any optax optimizer.
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``.
      every: steps between two projections.
      **options: those of :func:`bound_singular_values`.

    Returns:
      An optimizer that passes extra arguments on to ``inner``.

    Example:
      >>> import optax, svb_jax
      >>> tx = svb_jax.svb(optax.sgd(0.5, momentum=0.9, nesterov=True), epsilon=0.5, every=391)
    """
    return optax.chain(inner, bound_singular_values(epsilon, every, **options))


def bbn(
    inner: optax.GradientTransformation, epsilon: ScalarOrSchedule, every: int = 1, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Train with Bounded Batch Normalization: ``inner``, with scales bounded every ``every`` steps.

    Args:
      inner: any optax optimizer, such as :func:`svb`'s.
      epsilon: the band around the mean.
      every: steps between two boundings.
      **options: those of :func:`bound_batch_norm_scales`.

    Returns:
      An optimizer whose ``update`` needs ``batch_stats`` and passes extra arguments on to ``inner``.

    Example:
      >>> import optax, svb_jax
      >>> tx = svb_jax.bbn(svb_jax.svb(optax.sgd(0.5), epsilon=0.5, every=391), epsilon=1.0, every=391)
    """
    return optax.chain(inner, bound_batch_norm_scales(epsilon, every, **options))


def projection_stats(opt_state: Any) -> dict[str, jax.Array]:
    """Return what the last projections saw, out of any nested optax state, as a flat dict.

    Keys are ``svb/step``, ``svb/sigma_min``, ``svb/sigma_max`` (before the projection; NaN by the route
    ``polar``, which never knows them), ``svb/share_clipped``, ``svb/exact`` (matrices that took the exact
    route), ``svb/skipped`` (matrices with non-finite entries), and ``bbn/step``, ``bbn/share_clipped``,
    ``bbn/skipped``. Several bounds of a kind are ``svb.0/...``, ``svb.1/...``, in the state's order. The
    values stay on the device; before the first projection the step is 0.

    Example:
      >>> import jax.numpy as jnp, optax, svb_jax
      >>> tx = svb_jax.svb(optax.adam(1e-3), epsilon=0.5, every=100)
      >>> sorted(svb_jax.projection_stats(tx.init({"kernel": jnp.eye(3)})))
      ['svb/exact', 'svb/share_clipped', 'svb/sigma_max', 'svb/sigma_min', 'svb/skipped', 'svb/step']
    """
    figures = {
        "svb": (BoundSingularValuesState, _figures),
        "bbn": (BoundBatchNormScalesState, _scale_figures),
    }
    kinds = tuple(kind for kind, _ in figures.values())
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    stats = {}
    for name, (kind, read_out) in figures.items():
        states = [node for node in nodes if isinstance(node, kind)]
        for position, state in enumerate(states):
            prefix = name if len(states) == 1 else f"{name}.{position}"
            # Arrays may be wrapped, as NNX's optimizer wraps every leaf of its state.
            _, step, *reading = (leaf[...] for leaf in jax.tree.leaves(state))
            stats |= {f"{prefix}/{key}": value for key, value in {"step": step, **read_out(*reading)}.items()}
    return stats


def _figures(extremes: jax.Array, counts: jax.Array) -> dict[str, jax.Array]:
    reading = Reading(extremes, counts)
    return {
        "sigma_min": _if_any(reading, reading.smallest),
        "sigma_max": _if_any(reading, reading.largest),
        "share_clipped": _share_clipped(reading),
        "exact": reading.exact,
        "skipped": reading.skipped,
    }


def _scale_figures(counts: jax.Array) -> dict[str, jax.Array]:
    reading = ScaleReading(counts)
    return {"share_clipped": _share_clipped(reading), "skipped": reading.skipped}


def _share_clipped(reading: Reading | ScaleReading) -> jax.Array:
    return _if_any(reading, reading.clipped / jnp.maximum(reading.values, 1))


def _if_any(reading: Reading | ScaleReading, figure: jax.Array) -> jax.Array:
    """Return a figure in float32, or NaN where nothing was bounded yet or all was skipped."""
    return jnp.where(reading.values > 0, figure, jnp.nan).astype(jnp.float32)
