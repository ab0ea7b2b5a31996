"""Ready-made dimension numbers for the common layouts."""

from typing import Any

from svb_jax._src.dimension_numbers import (
    KERNEL_NAMES,
    OUT_NAMES,
    QUERY_NAMES,
    MatrixAxes,
    Tree,
    by_name_or_none,
    is_embedding,
    is_fused,
    leaves_by_names,
    merged_size,
    output_first,
    output_last,
    raise_ambiguous,
)
from svb_jax._src.paths import NamedLeaf, map_leaves


def every_matrix(params: Any) -> Any:
    """Return dimension numbers for every leaf of rank two and more, whatever its name, output last.

    Args:
      params: The parameters.

    Returns:
      A tree of :class:`MatrixAxes`, with None for leaves that are no matrices.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.every_matrix([jnp.ones((3, 4)), jnp.ones(4)])
      [MatrixAxes(reduction=(0,), output=1, groups=1), None]
    """
    return map_leaves(lambda leaf: output_last(leaf.rank) if leaf.rank >= 2 else None, params)


def oihw(params: Any) -> Any:
    """Return dimension numbers for kernels that put the output first, as PyTorch and Equinox do.

    Embeddings are left alone. Equinox's modules need this only where they are stacked or kept in dicts: by
    default they are read by their class.

    Args:
      params: The parameters.

    Returns:
      A tree of :class:`MatrixAxes`, with None for leaves that are no matrices.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.oihw({"weight": jnp.ones((8, 4, 3, 3))})
      {'weight': MatrixAxes(reduction=(1, 2, 3), output=0, groups=1)}
    """
    tree = leaves_by_names(params)

    def axes(leaf: NamedLeaf) -> MatrixAxes | None:
        if leaf.name not in KERNEL_NAMES:
            return by_name_or_none(leaf, tree)
        if leaf.rank < 2 or is_embedding(leaf):
            return None
        return output_first(leaf.rank, getattr(leaf.owner, "groups", 1))

    return map_leaves(axes, params)


def attention(params: Any, *, per_head: bool = False) -> Any:
    """Return dimension numbers that know attention's kernels; other leaves go by name.

    - ``query``, ``key`` and ``value`` (features, heads, head size) map features to all heads together, and
      ``out`` (heads, head size, features) maps all heads together to features. ``q_proj``, ``o_proj`` and the
      like do so too.
    - Fused kernels, in modules with ``qkv`` in their name, are three matrices: of shape (features, 3, heads,
      head size), or (features, 3 · features) with queries, keys and values one after the other.

    A kernel of rank 4 that is not fused raises: it is a stack, for ``scan_stacks(..., inner=attention)``.

    Args:
      params: The parameters.
      per_head: Read each head as a matrix of its own. Set it by
        ``functools.partial(svb_jax.attention, per_head=True)``.

    Returns:
      A tree of :class:`MatrixAxes`, with None for leaves that are no matrices.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> query, out = jnp.ones((8, 2, 4)), jnp.ones((2, 4, 8))
      >>> svb_jax.attention({"query": {"kernel": query}, "out": {"kernel": out}})
      {'out': {'kernel': MatrixAxes(reduction=(0, 1), output=2, groups=1)},
       'query': {'kernel': MatrixAxes(reduction=(0,), output=(1, 2), groups=1)}}
    """
    tree = leaves_by_names(params)

    def axes(leaf: NamedLeaf) -> MatrixAxes | None:
        is_kernel = leaf.name in KERNEL_NAMES and leaf.rank >= 2
        if is_kernel and is_fused(leaf):
            return _fused_axes(leaf, tree, per_head)
        if not is_kernel or leaf.module not in QUERY_NAMES + OUT_NAMES:
            return by_name_or_none(leaf, tree)
        if leaf.rank == 3 and leaf.module in QUERY_NAMES:
            return MatrixAxes((0,), (2,) if per_head else (1, 2))
        if leaf.rank == 3:
            return MatrixAxes((1,) if per_head else (0, 1), 2)
        if per_head:
            raise_ambiguous(leaf, "its shape does not tell the number of heads")
        return by_name_or_none(leaf, tree)

    return map_leaves(axes, params)


def _fused_axes(leaf: NamedLeaf, tree: Tree, per_head: bool) -> MatrixAxes:
    if leaf.rank == 4 and leaf.shape[1] == 3:
        return MatrixAxes((0,), (3,) if per_head else (2, 3))
    axes = by_name_or_none(leaf, tree) if leaf.rank == 2 and not per_head else None
    if axes and merged_size(leaf.shape, axes.output) == 3 * merged_size(leaf.shape, axes.reduction):
        return axes._replace(groups=3)
    needs = "(features, 3, heads, head size)" + ("" if per_head else " or (features, 3 · features)")
    raise_ambiguous(leaf, f"queries, keys and values in one kernel have the shape {needs}")
