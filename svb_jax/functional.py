"""SVB and BBN without an optimizer: from parameters to bounded parameters."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax.batch_norm import Kind, ScaleReading, clip_scale_rows, scale_leaves
from svb_jax.checks import check_choice, check_epsilon
from svb_jax.cutting import computed_zero
from svb_jax.gating import Where, exact_dtype
from svb_jax.matrices import DimensionNumbers, matrix_leaves
from svb_jax.packing import Packing, pack_small
from svb_jax.reading import Reading
from svb_jax.routes import Method
from svb_jax.sharing import AxisName
from svb_jax.tree_projection import Scale, check_projection, project_rows


def project(
    params: Any,
    epsilon: ArrayLike,
    *,
    method: Method = "auto",
    scale: Scale = 1.0,
    dimension_numbers: DimensionNumbers = None,
    where: Where | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Return the parameters with every weight matrix's singular values in the band.

    Args:
      params: any tree of parameters.
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``; 0 makes every matrix orthogonal.
      method: the route of :func:`clip_singular_values`.
      scale: the band's centre, as for :func:`bound_singular_values`.
      dimension_numbers: which leaves are matrices, as for :func:`bound_singular_values`.
      where: a mask as ``optax.masked`` takes it; leaves outside it are left alone.
      axis_name: share the work over this axis of the surrounding ``pmap`` or ``shard_map``.
      mesh: share the work over this mesh, under a plain ``jit``.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.project({"kernel": jnp.diag(jnp.array([3.0, 0.1]))}, epsilon=0.0)["kernel"].round(4)
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    check_epsilon("project", epsilon)
    check_projection("project", method, scale, axis_name, mesh)

    def bound(params: Any) -> Any:
        leaves = matrix_leaves(params, dimension_numbers)

        def project_all(packing: Packing, rows: list[jax.Array]) -> tuple[list[jax.Array], Reading]:
            return project_rows(
                leaves, packing, rows, epsilon, scale=scale, method=method, axis_name=axis_name, mesh=mesh
            )

        return _replace_leaves(params, [leaf.index for leaf in leaves], project_all)

    return _apply_where(bound, params, where)


def project_batch_norm(
    params: Any,
    batch_stats: Any,
    epsilon: ArrayLike,
    *,
    kind: Kind = "bbn",
    bn_epsilon: float = 1e-5,
    where: Where | None = None,
) -> Any:
    """Return the parameters with every BatchNorm's scales bounded around their mean.

    Args:
      params: any tree of parameters.
      batch_stats: the tree of running statistics beside it; may be None for ``relative`` with ``where``.
      epsilon: the band around the mean.
      kind: ``bbn`` or ``relative``, as for :func:`bound_batch_norm_scales`.
      bn_epsilon: what the network's BatchNorm adds to its variance.
      where: a mask as ``optax.masked`` takes it; leaves outside it are left alone.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params, batch_stats = {"bn": {"scale": jnp.array([1.0, 1.0, 7.0])}}, {"bn": {"var": jnp.ones(3)}}
      >>> svb_jax.project_batch_norm(params, batch_stats, epsilon=1.0)["bn"]["scale"].round(4)
      Array([1.5, 1.5, 6. ], dtype=float32)
    """
    check_choice("project_batch_norm", "kind", kind, get_args(Kind))
    check_epsilon("project_batch_norm", epsilon)

    def bound(params: Any) -> Any:
        leaves = scale_leaves("project_batch_norm", params, batch_stats, kind, is_masked=where is not None)

        def clip_all(packing: Packing, rows: list[jax.Array]) -> tuple[list[jax.Array], ScaleReading]:
            return clip_scale_rows(leaves, packing, rows, epsilon, kind, bn_epsilon)

        return _replace_leaves(params, [leaf.position for leaf in leaves], clip_all)

    return _apply_where(bound, params, where)


def _replace_leaves(
    params: Any,
    positions: list[int],
    bound: Callable[[Packing, list[jax.Array]], tuple[list[jax.Array], Reading | ScaleReading]],
) -> Any:
    """Return the parameters with the leaves at ``positions`` bounded, each in its own type."""
    values, treedef = jax.tree.flatten(params)
    old = [jnp.asarray(values[position]) for position in positions]
    packing = pack_small(old)
    rows = packing.pack(old)
    bounded, reading = bound(packing, [row.astype(exact_dtype(row)) for row in rows])
    bounded = [new.astype(row.dtype) for new, row in zip(bounded, rows, strict=True)]
    new = packing.unpack(bounded, like=old, zero=computed_zero(reading.skipped))
    for position, value in zip(positions, new, strict=True):
        values[position] = value
    return jax.tree.unflatten(treedef, values)


def _apply_where(bound: Callable[[Any], Any], params: Any, where: Where | None) -> Any:
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
