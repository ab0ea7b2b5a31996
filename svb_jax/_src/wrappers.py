"""The paper's names: SVB and BBN as wrappers around an optimizer, which cannot be misplaced."""

from typing import Any

import optax
from jax.sharding import Mesh

from svb_jax._src.apply_every import ScalarOrSchedule
from svb_jax._src.batch_norm import bound_batch_norm_scales
from svb_jax._src.checks import check_inner
from svb_jax._src.clip import Method
from svb_jax._src.clip.distribute import AxisName
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.leaves import Centre
from svb_jax._src.running_variances import Kind, Pairs
from svb_jax._src.transforms import Epsilon, bound_singular_values


def svb(
    inner: optax.GradientTransformation,
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
) -> optax.GradientTransformationExtraArgs:
    """Train with Singular Value Bounding: ``inner``, with every weight matrix bounded every ``every`` steps.

    Args:
      inner: The optax optimizer to wrap.
      epsilon: The width of the band ``[1 / (1 + epsilon), 1 + epsilon]``. It may be a number, a schedule, or
        a mapping from path patterns to either.
      every: The number of steps between two projections; the first is at step ``every``, counted from 1.
      until: The last step at which to project. By default projections never end.
      method: The algorithm, as for :func:`clip_singular_values`. ``"auto"`` takes the platform's fastest.
      centre: The middle of the band: a number, or a function of a matrix's ``(outputs, inputs)``.
      dimension_numbers: Which leaves are matrices, and which of their axes are inputs and outputs: a function
        such as :func:`attention`, or a tree of :class:`MatrixAxes`. By default names and shapes decide.
      where: The leaves to bound, as path patterns (see :func:`paths`) or as a mask. By default all matrices.
      axis_name: The axis of the surrounding ``pmap`` or ``shard_map`` to distribute the work over.
      mesh: The mesh to distribute the work over, under a plain ``jit``.
      shardings: How the parameters are sharded over a mesh, as a tree of ``NamedSharding``. Needed where they
        are sharded over automatic axes, since traced arrays do not tell.
      keep_dtype: Whether updates of half-precision leaves stay in their type. By default they become float32,
        so that the projection is rounded only once, when it is stored.
      per_layer: Whether to keep statistics of every layer as well as of the whole network.
      name: The name of this bound in :func:`projection_stats`.

    Returns:
      An optimizer whose ``update`` needs ``params`` and passes extra arguments on to ``inner``.
      :func:`bound_singular_values` is the same bound as a link of a chain, and has the formula.

    Example:
      >>> import jax.numpy as jnp, optax, svb_jax
      >>> tx = svb_jax.svb(optax.sgd(0.1), epsilon=0.5, every=1)
      >>> params = {"kernel": jnp.diag(jnp.array([3.0, 1.0, 0.1]))}
      >>> grads = {"kernel": jnp.zeros((3, 3))}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> jnp.diag(params["kernel"]).round(4)
      Array([1.5   , 1.    , 0.6667], dtype=float32)
    """
    check_inner("svb", inner)
    bound = bound_singular_values(
        epsilon,
        every,
        until=until,
        method=method,
        centre=centre,
        dimension_numbers=dimension_numbers,
        where=where,
        axis_name=axis_name,
        mesh=mesh,
        shardings=shardings,
        keep_dtype=keep_dtype,
        per_layer=per_layer,
        name=name,
    )
    return optax.chain(inner, bound)


def bbn(
    inner: optax.GradientTransformation,
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
) -> optax.GradientTransformationExtraArgs:
    """Train with Bounded Batch Normalization: ``inner``, with scales bounded every ``every`` steps.

    Args:
      inner: The optax optimizer to wrap, for example what :func:`svb` returns.
      epsilon: The width of the band ``[1 / (1 + epsilon), 1 + epsilon]`` around the layer's mean. It may be a
        number or a schedule.
      every: The number of steps between two boundings; the first is at step ``every``, counted from 1.
      until: The last step at which to bound. By default bounding never ends.
      kind: What is bounded: ``"bbn"`` bounds each scale over its running standard deviation, as in the paper.
        ``"relative"`` bounds the scale itself, as the authors' code does by default.
      bn_epsilon: The number that the network's BatchNorm adds to its variance.
      pairs: The variance of each scale where the paths do not tell: a mapping from the path of a scale to the
        path of its variance in ``batch_stats``, or to the variance itself.
      where: The leaves to bound, as path patterns (see :func:`paths`) or as a mask. By default all scales
        that have a running variance.
      keep_dtype: Whether updates of half-precision leaves stay in their type. By default they become float32,
        so that the bounded scale is rounded only once, when it is stored.
      name: The name of this bound in :func:`projection_stats`.

    Returns:
      An optimizer whose ``update`` needs ``params`` and ``batch_stats``, the running statistics as this step
      updated them, and passes extra arguments on to ``inner``. :func:`bound_batch_norm_scales` is the same
      bound as a link of a chain, and has the formula.

    Example:
      >>> import jax.numpy as jnp, optax, svb_jax
      >>> tx = svb_jax.bbn(optax.sgd(0.1), epsilon=1.0, every=1)
      >>> params = {"bn": {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])}}
      >>> grads = {"bn": {"scale": jnp.zeros(4)}}
      >>> batch_stats = {"bn": {"var": jnp.ones(4)}}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(grads, state, params, batch_stats=batch_stats)
      >>> params = optax.apply_updates(params, updates)
      >>> params["bn"]["scale"].round(4)
      Array([6. , 1.5, 1.5, 2. ], dtype=float32)
    """
    check_inner("bbn", inner)
    bound = bound_batch_norm_scales(
        epsilon,
        every,
        until=until,
        kind=kind,
        bn_epsilon=bn_epsilon,
        pairs=pairs,
        where=where,
        keep_dtype=keep_dtype,
        name=name,
    )
    return optax.chain(inner, bound)
