"""SVB and BBN without an optimizer: from parameters to bounded parameters."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax._src.batch_norm import bound_scales
from svb_jax._src.checks import (
    check_bands,
    check_choice,
    check_epsilon,
    check_not_negative,
    check_projection,
)
from svb_jax._src.clip import Method
from svb_jax._src.clip.distribute import AxisName
from svb_jax._src.clip.matrix_functions import compute_dtype
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.leaves import Centre, matrix_leaves, project_leaves
from svb_jax._src.masks import as_mask, check_patterns
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
      params: any tree of parameters.
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``; 0 makes every matrix orthogonal. A mapping
        from patterns of paths gives each matrix the band of the first pattern that matches it.
      method: the route of :func:`clip_singular_values`.
      centre: the middle of the band, as for :func:`bound_singular_values`.
      dimension_numbers: which leaves are matrices, as for :func:`bound_singular_values`.
      where: which leaves to bound, as for :func:`bound_singular_values`.
      axis_name: share the work over this axis of the surrounding ``pmap`` or ``shard_map``.
      mesh: share the work over this mesh, under a plain ``jit``.
      shardings: how the parameters lie on a mesh, as for :func:`bound_singular_values`.

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
      params: any tree of parameters.
      batch_stats: the tree of running statistics beside it; may be None for ``relative`` with ``where``.
      epsilon: the band around the mean.
      kind: ``bbn`` or ``relative``, as for :func:`bound_batch_norm_scales`.
      bn_epsilon: what the network's BatchNorm adds to its variance.
      pairs: which scale has which variance, if the paths do not tell: the path of a scale, and that of its
        variance in ``batch_stats`` or the variance itself.
      where: which leaves to bound, as for :func:`bound_singular_values`.

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
    where = as_mask(where)
    if where is None:
        return bound(params)
    mask = where(params) if callable(where) else where
    hidden = jax.tree.map(lambda m, part: part if m else optax.MaskedNode(), mask, params)
    return jax.tree.map(
        lambda new, old: old if isinstance(new, optax.MaskedNode) else new,
        bound(hidden),
        params,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
