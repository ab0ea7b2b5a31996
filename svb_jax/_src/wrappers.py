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
      inner: any optax optimizer.
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``.
      every: steps between two projections.
      until: as for :func:`bound_singular_values`, and so are all that follow.
      method: the route.
      centre: the middle of the band.
      dimension_numbers: which leaves are matrices, and their axes.
      where: which leaves to bound.
      axis_name: the axis to share the work over.
      mesh: the mesh to share the work over.
      shardings: how the parameters lie on a mesh.
      keep_dtype: keep the updates of half-precision leaves in their type.
      per_layer: keep statistics of every layer too.
      name: what :func:`projection_stats` calls this bound.

    Returns:
      An optimizer that passes extra arguments on to ``inner``.

    Example:
      >>> import optax, svb_jax
      >>> tx = svb_jax.svb(optax.sgd(0.5, momentum=0.9, nesterov=True), epsilon=0.5, every=391)
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
      inner: any optax optimizer, such as :func:`svb`'s.
      epsilon: the band around the mean.
      every: steps between two boundings.
      until: as for :func:`bound_batch_norm_scales`, and so are all that follow.
      kind: ``bbn`` or ``relative``.
      bn_epsilon: what the network's BatchNorm adds to its variance.
      pairs: which scale has which variance, if the paths do not tell: the path of a scale, and that of its
        variance in ``batch_stats`` or the variance itself.
      where: which leaves to bound.
      keep_dtype: keep the updates of half-precision leaves in their type.
      name: what :func:`projection_stats` calls this bound.

    Returns:
      An optimizer whose ``update`` needs ``batch_stats`` and passes extra arguments on to ``inner``.

    Example:
      >>> import optax, svb_jax
      >>> tx = svb_jax.bbn(svb_jax.svb(optax.sgd(0.5), epsilon=0.5, every=391), epsilon=1.0, every=391)
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
