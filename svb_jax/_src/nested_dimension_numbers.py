"""Dimension numbers on top of others: at some paths the reading is said outright, stacked or split in groups.

Each takes ``inner``, the dimension numbers that it starts from, so that they nest in any order.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from svb_jax._src.dimension_numbers import (
    DimensionNumbers,
    MatrixAxes,
    by_name,
    merged_size,
    positive_axes,
    read_axes,
)
from svb_jax._src.masks import check_patterns
from svb_jax._src.paths import NamedLeaf, map_leaves, matches_any, value_by_path


def by_path(readings: Mapping[str, Any], inner: DimensionNumbers = by_name) -> Callable[[Any], Any]:
    """Return dimension numbers that say outright how the leaves at some paths are read.

    Args:
      readings: From patterns, by the rules of :func:`paths`, to a :class:`MatrixAxes`, or None to leave
        leaves alone. The first pattern that matches decides.
      inner: The dimension numbers of all other leaves.

    Returns:
      A function from parameters to dimension numbers.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"conv1d": {"kernel": jnp.ones((5, 2, 4))}, "head": {"kernel": jnp.ones((4, 3))}}
      >>> svb_jax.by_path({"conv1d/kernel": svb_jax.MatrixAxes((0, 1), 2), "head": None})(params)
      {'conv1d': {'kernel': MatrixAxes(reduction=(0, 1), output=2, groups=1)}, 'head': {'kernel': None}}
    """

    def shown(leaf: NamedLeaf) -> Any:
        # Hidden as optax.masked does it: inner might not be able to read what is said here.
        return optax.MaskedNode() if matches_any(readings, leaf.path) else leaf.value

    def dimension_numbers(params: Any) -> Any:
        check_patterns("by_path", readings, params)
        axes = read_axes(map_leaves(shown, params), inner)

        def reading(leaf: NamedLeaf) -> Any:
            is_named = matches_any(readings, leaf.path)
            return value_by_path("by_path", readings, leaf.path) if is_named else axes.get(leaf.names)

        return map_leaves(reading, params)

    return dimension_numbers


def scan_stacks(*modules: str, axis: int = 0, inner: DimensionNumbers = by_name) -> Callable[[Any], Any]:
    """Return dimension numbers for layers that ``nn.scan`` or ``nn.vmap`` stacked, or a mixture's experts.

    Args:
      *modules: Patterns, by the rules of :func:`paths`, of the modules in which every leaf is stacked.
      axis: Where the stacking axis stands.
      inner: The dimension numbers of one layer of the stack, and of everything outside it.

    Returns:
      A function from parameters to dimension numbers.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.scan_stacks("blocks")({"blocks": {"kernel": jnp.ones((12, 3, 4))}})
      {'blocks': {'kernel': MatrixAxes(reduction=(1,), output=2, groups=1)}}
      >>> params = {"blocks": {"query": {"kernel": jnp.ones((12, 32, 4, 8))}}}
      >>> svb_jax.scan_stacks("blocks", inner=svb_jax.attention)(params)
      {'blocks': {'query': {'kernel': MatrixAxes(reduction=(1,), output=(2, 3), groups=1)}}}
    """

    def stack_of(leaf: NamedLeaf) -> int | None:
        is_stacked = matches_any(modules, leaf.path) and -leaf.rank <= axis < leaf.rank
        return axis % leaf.rank if is_stacked else None

    def one_layer(leaf: NamedLeaf) -> Any:
        if (stack := stack_of(leaf)) is None:
            return leaf.value
        return jax.ShapeDtypeStruct(leaf.shape[:stack] + leaf.shape[stack + 1 :], leaf.value.dtype)

    def dimension_numbers(params: Any) -> Any:
        check_patterns("scan_stacks", modules, params)
        try:
            axes = read_axes(map_leaves(one_layer, params), inner)
        except ValueError as error:
            error.add_note(f"scan_stacks took axis {axis} off: say how one layer is read with inner=.")
            raise
        return map_leaves(lambda leaf: _around(leaf, stack_of(leaf), axes.get(leaf.names)), params)

    return dimension_numbers


def grouped_convolutions(
    groups: Mapping[str, int], inner: DimensionNumbers = by_name
) -> Callable[[Any], Any]:
    """Return dimension numbers in which the named kernels are convolutions of so many groups.

    Each group is a matrix of its own. Neither Flax's nor Haiku's kernels tell the number of groups by their
    shape, so it is named here; 1 says that a kernel is an ordinary one.

    Args:
      groups: From patterns, by the rules of :func:`paths`, to the number of groups.
      inner: The dimension numbers of one group, and of all other leaves.

    Returns:
      A function from parameters to dimension numbers.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.grouped_convolutions({"conv": 4})({"conv": {"kernel": jnp.ones((3, 3, 2, 8))}})
      {'conv': {'kernel': MatrixAxes(reduction=(0, 1, 2), output=3, groups=4)}}
    """
    return _with_groups("grouped_convolutions", groups, inner, lambda leaf, outputs, count: count)


def depthwise(*kernels: str, multiplier: int = 1, inner: DimensionNumbers = by_name) -> Callable[[Any], Any]:
    """Return dimension numbers in which the named kernels are depthwise convolutions.

    Every input channel has a matrix of its own, of height · width × ``multiplier``. With a multiplier of one
    that is a vector, and bounding its singular value bounds its norm.

    Args:
      *kernels: Patterns of their paths, by the rules of :func:`paths`.
      multiplier: Outputs a channel.
      inner: The dimension numbers of all other leaves, and the layout of these.

    Returns:
      A function from parameters to dimension numbers.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.depthwise("depthwise")({"depthwise": {"kernel": jnp.ones((3, 3, 1, 8))}})
      {'depthwise': {'kernel': MatrixAxes(reduction=(0, 1, 2), output=3, groups=8)}}
    """

    def channels(leaf: NamedLeaf, outputs: int, multiplier: int) -> int:
        if 1 not in leaf.shape or outputs % multiplier:
            raise ValueError(
                f"depthwise needs kernels with one input channel and a multiple of {multiplier} outputs, got "
                f"{leaf.label!r} of shape {leaf.shape}."
            )
        return outputs // multiplier

    return _with_groups("depthwise", dict.fromkeys(kernels, multiplier), inner, channels)


def _with_groups(
    caller: str,
    numbers: Mapping[str, int],
    inner: DimensionNumbers,
    groups_of: Callable[[NamedLeaf, int, int], int],
) -> Callable[[Any], Any]:
    """Return inner's dimension numbers, with groups from a leaf, its outputs and the number for its path."""

    def dimension_numbers(params: Any) -> Any:
        check_patterns(caller, numbers, params)
        axes = read_axes(params, inner)

        def reading(leaf: NamedLeaf) -> MatrixAxes | None:
            found = axes.get(leaf.names)
            if found is None or not matches_any(numbers, leaf.path):
                return found
            number = value_by_path(caller, numbers, leaf.path)
            return found._replace(groups=groups_of(leaf, merged_size(leaf.shape, found.output), number))

        return map_leaves(reading, params)

    return dimension_numbers


def _around(leaf: NamedLeaf, stack: int | None, axes: MatrixAxes | None) -> MatrixAxes | None:
    """Return one layer's axes as those of the whole leaf, which has the axis ``stack`` among them."""
    if axes is None or stack is None:
        return axes

    def moved(listed: int | tuple[int, ...]) -> int | tuple[int, ...]:
        shifted = tuple(a + (a >= stack) for a in positive_axes(leaf.label, listed, leaf.rank - 1))
        return shifted[0] if isinstance(listed, int) else shifted

    return MatrixAxes(moved(axes.reduction), moved(axes.output), axes.groups)
