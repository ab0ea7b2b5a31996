"""SVB and BBN without an optimizer: parameters and matrices in, bounded ones out."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax._src.batch_norm import bound_scales
from svb_jax._src.checks import (
    check_band,
    check_bands,
    check_choice,
    check_epsilon,
    check_not_negative,
    check_projection,
)
from svb_jax._src.clip import Method, clip_batches
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.distribute import AxisName
from svb_jax._src.clip.matrix_functions import compute_dtype, replicate, shard_like
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.leaves import Centre, matrix_leaves, project_leaves
from svb_jax._src.masks import check_patterns, hide
from svb_jax._src.paths import value_by_path
from svb_jax._src.running_variances import Kind, Pairs, find_scales


def project(
    params: Any,
    epsilon: ArrayLike | Mapping[str, ArrayLike],
    *,
    method: Method = "auto",
    centre: Centre = 1.0,
    dimension_numbers: DimensionNumbers = None,
    where: Any = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    shardings: Any = None,
) -> Any:
    """Return the parameters with every weight matrix's singular values in the band.

    Args:
      params: Any tree of parameters.
      epsilon: The band is ``[1 / (1 + epsilon), 1 + epsilon]``; 0 makes every matrix orthogonal. A mapping
        from patterns of paths gives each matrix the band of the first pattern that matches it.
      method: The route of :func:`clip_singular_values`.
      centre: The middle of the band, as for :func:`bound_singular_values`.
      dimension_numbers: Which leaves are matrices, as for :func:`bound_singular_values`.
      where: Which leaves to bound, as for :func:`bound_singular_values`.
      axis_name: Distribute the work over this axis of the surrounding ``pmap`` or ``shard_map``.
      mesh: Distribute the work over this mesh, under a plain ``jit``.
      shardings: How the parameters lie on a mesh, as for :func:`bound_singular_values`.

    Returns:
      The parameters; leaves that are not bounded are the same arrays.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.project({"kernel": jnp.diag(jnp.array([3.0, 0.1]))}, epsilon=0.0)["kernel"].round(4)
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    bands = check_bands("project", epsilon)
    check_choice("project", "method", method, get_args(Method))
    check_projection("project", centre, axis_name, mesh, shardings)

    def bound(params: Any) -> Any:
        leaves = matrix_leaves(params, dimension_numbers)
        check_patterns("project's epsilon", bands, params)
        epsilons = [value_by_path("project's epsilon", bands, leaf.path) for leaf in leaves]

        def project_all(values: list[jax.Array]) -> list[jax.Array]:
            projected, _ = project_leaves(
                leaves,
                values,
                epsilons,
                centre=centre,
                method=method,
                axis_name=axis_name,
                mesh=mesh,
                shardings=shardings,
            )
            return projected

        return _replace_leaves(params, [leaf.index for leaf in leaves], project_all)

    return _apply_where(bound, params, where)


def project_batch_norm(
    params: Any,
    batch_stats: Any,
    epsilon: ArrayLike,
    *,
    kind: Kind = "bbn",
    bn_epsilon: float = 1e-5,
    pairs: Pairs | None = None,
    where: Any = None,
) -> Any:
    """Return the parameters with every BatchNorm's scales bounded around their mean.

    Args:
      params: Any tree of parameters.
      batch_stats: The tree of running statistics beside it; may be None for ``relative`` with ``where``.
      epsilon: The band around the mean.
      kind: ``bbn`` or ``relative``, as for :func:`bound_batch_norm_scales`.
      bn_epsilon: What the network's BatchNorm adds to its variance.
      pairs: Which scale has which variance, if the paths do not tell: the path of a scale, and that of its
        variance in ``batch_stats`` or the variance itself.
      where: Which leaves to bound, as for :func:`bound_singular_values`.

    Returns:
      The parameters; leaves that are not bounded are the same arrays.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params, batch_stats = {"bn": {"scale": jnp.array([1.0, 1.0, 7.0])}}, {"bn": {"var": jnp.ones(3)}}
      >>> svb_jax.project_batch_norm(params, batch_stats, epsilon=1.0)["bn"]["scale"].round(4)
      Array([1.5, 1.5, 6. ], dtype=float32)
    """
    check_choice("project_batch_norm", "kind", kind, get_args(Kind))
    check_epsilon("project_batch_norm", epsilon)
    check_not_negative("project_batch_norm", "bn_epsilon", bn_epsilon)

    def bound(params: Any) -> Any:
        is_masked = where is not None
        scales = find_scales(
            "project_batch_norm", params, batch_stats, kind, pairs=pairs, is_masked=is_masked
        )

        def bound_all(values: list[jax.Array]) -> list[jax.Array]:
            return bound_scales(scales, values, epsilon, kind, bn_epsilon)[0]

        return _replace_leaves(params, [scale.position for scale in scales], bound_all)

    return _apply_where(bound, params, where)


def clip_singular_values(
    matrices: ArrayLike, lower: ArrayLike, upper: ArrayLike, *, method: Method = "auto"
) -> jax.Array:
    r"""Clip the singular values of every matrix to ``[lower, upper]``.

    .. math::
      U \Sigma V^\top \mapsto U \, \operatorname{clip}(\Sigma, \text{lower}, \text{upper}) V^\top,

    the nearest such matrix in the Frobenius norm. Half types are projected in float32 and rounded once.
    A matrix with non-finite entries comes back as it is, and so does one whose band is none: a traced end
    that is not finite, or out of order.

    The function can be differentiated in both modes, with respect to all three arguments. At an end of the
    band, where the clip has a kink, the derivative is the one from inside.

    Args:
      matrices: Shape ``(..., m, n)``, either side the longer.
      lower: The band's lower end, not negative.
      upper: The band's upper end, no less than ``lower``.
      method: ``svd`` is exact for every matrix. ``gram`` decomposes the Gram matrix of the short side, which
        is faster and as exact up to a condition number of about 10; it leaves vanished directions alone.
        ``products`` uses matrix products only and is exact for every matrix. ``auto`` is the platform's best:
        ``products`` on accelerators; on CPU ``gram`` where its own eigenvalues show that it is good, and
        ``svd`` elsewhere.

    Returns:
      The projected matrices, in the shape and type of ``matrices``.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.clip_singular_values(jnp.diag(jnp.array([3.0, 1.0, 0.1])), 0.5, 2.0).round(4)
      Array([[2. , 0. , 0. ],
             [0. , 1. , 0. ],
             [0. , 0. , 0.5]], dtype=float32)
    """
    matrices = jnp.asarray(matrices)
    is_float = jnp.issubdtype(matrices.dtype, jnp.floating) and matrices.dtype.itemsize >= 2
    if matrices.ndim < 2 or not is_float:
        raise ValueError(
            "clip_singular_values needs real floating-point matrices of 16 bits or more and of shape "
            f"(..., m, n), got {matrices.dtype} of shape {matrices.shape}."
        )
    check_choice("clip_singular_values", "method", method, get_args(Method))
    check_band("clip_singular_values", lower, upper)
    dtype = compute_dtype(matrices.dtype)
    count = math.prod(matrices.shape[:-2])
    lower, upper = (jnp.broadcast_to(jnp.asarray(end, dtype), (count,)) for end in (lower, upper))
    batch = replicate(matrices).astype(dtype).reshape(count, *matrices.shape[-2:])
    [clipped] = clip_batches([Batch(batch, lower, upper, jnp.ones(count, bool))], method)
    return shard_like(clipped.matrices.reshape(matrices.shape).astype(matrices.dtype), matrices)


def _replace_leaves(
    params: Any, indices: list[int], bound: Callable[[list[jax.Array]], list[jax.Array]]
) -> Any:
    """Return the parameters with the leaves at ``indices`` bounded, each in its own type."""
    values, treedef = jax.tree.flatten(params)
    old = [jnp.asarray(values[index]) for index in indices]
    new = bound([value.astype(compute_dtype(value.dtype)) for value in old])
    for index, before, after in zip(indices, old, new, strict=True):
        values[index] = after.astype(before.dtype)
    return jax.tree.unflatten(treedef, values)


def _apply_where(bound: Callable[[Any], Any], params: Any, where: Any) -> Any:
    if where is None:
        return bound(params)
    return jax.tree.map(
        lambda new, old: old if isinstance(new, optax.MaskedNode) else new,
        bound(hide(params, where)),
        params,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
