"""Which leaves of a parameter tree are weight matrices, and which of their axes are which.

Shape alone cannot decide (a rank-3 kernel may be a convolution, attention or a stack of layers), so the
default goes by the leaf's name, and whatever that does not cover is said with dimension numbers: a tree
of :class:`MatrixAxes` (``None`` where a leaf is no matrix), or a callable from the parameters to such a
tree. The callables here cover the common layouts.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

KERNEL_NAMES = ("kernel", "w", "weight")


class MatrixAxes(NamedTuple):
    """How a leaf is read as matrices: ``reduction`` × ``output``, one for each index of its other axes.

    Attributes:
      reduction: the axis or axes that a layer sums over, merged in this order.
      output: the axis or axes of its outputs, merged in this order.
      groups: how many blocks the merged output falls into, each a matrix of its own (grouped convolution).

    Example:
      >>> import svb_jax
      >>> svb_jax.MatrixAxes(reduction=(0, 1, 2), output=3)  # a convolution kernel, HWIO
      MatrixAxes(reduction=(0, 1, 2), output=3, groups=1)
    """

    reduction: int | tuple[int, ...]
    output: int | tuple[int, ...]
    groups: int = 1


Path = tuple[Any, ...]
AxesOfLeaf = Callable[[Path, Any], MatrixAxes | None]


def clean_path(path: Path) -> Path:
    """Drop the attribute that NNX's variables wrap their array in."""
    return path[:-1] if path and path[-1] == GetAttrKey("value") else path


def key_name(key: Any) -> str:
    """Return a path entry as the user wrote it."""
    match key:
        case DictKey(key=name) | GetAttrKey(name=name) | SequenceKey(idx=name):
            return str(name)
    return str(getattr(key, "key", key))


def path_string(path: Path) -> str:
    """Return a leaf's path as ``block/conv/kernel``."""
    return "/".join(key_name(key) for key in clean_path(path))


def leaf_name(path: Path) -> str:
    """Return the last name on a leaf's path."""
    path = clean_path(path)
    return key_name(path[-1]) if path else ""


def output_last(rank: int) -> MatrixAxes:
    """Return the axes of Flax's dense and convolution kernels: the output last, all else reduction."""
    return MatrixAxes(tuple(range(rank - 1)), rank - 1)


def axes_by_name(path: Path, leaf: Any) -> MatrixAxes | None:
    """Return the default reading of one leaf: by its name, with the output on the last axis."""
    if leaf_name(path) not in KERNEL_NAMES or leaf.ndim < 2:
        return None
    # Attributes called weight are Equinox's, whose convolutions put the output first.
    is_output_first = leaf.ndim > 2 and clean_path(path)[-1] == GetAttrKey("weight")
    if leaf.ndim == 3 or is_output_first:
        raise ValueError(
            f"svb_jax cannot tell how {path_string(path)!r} of shape {leaf.shape} is a matrix: the same name "
            "and rank stand for different layers. Pass dimension_numbers=, for example svb_jax.oihw, "
            "svb_jax.attention, svb_jax.scan_stacks(...) or a tree of svb_jax.MatrixAxes."
        )
    return output_last(leaf.ndim)


def by_name(params: Any) -> Any:
    """Return the default dimension numbers: leaves called ``kernel``, ``w`` or ``weight``, output last.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.by_name({"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}})
      {'dense': {'bias': None, 'kernel': MatrixAxes(reduction=(0,), output=1, groups=1)}}
    """
    return _map_leaves(axes_by_name, params)


def every_matrix(params: Any) -> Any:
    """Return dimension numbers for every leaf of rank two and more, whatever its name, output last.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.every_matrix([jnp.ones((3, 4)), jnp.ones(4)])
      [MatrixAxes(reduction=(0,), output=1, groups=1), None]
    """
    return _map_leaves(lambda path, leaf: output_last(leaf.ndim) if leaf.ndim >= 2 else None, params)


def oihw(params: Any) -> Any:
    """Return dimension numbers for kernels that put the output first, as Equinox and PyTorch do.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.oihw({"weight": jnp.ones((8, 4, 3, 3))})
      {'weight': MatrixAxes(reduction=(1, 2, 3), output=0, groups=1)}
    """

    def axes(path: Path, leaf: Any) -> MatrixAxes | None:
        is_kernel = leaf_name(path) in KERNEL_NAMES and leaf.ndim >= 2
        return MatrixAxes(tuple(range(1, leaf.ndim)), 0) if is_kernel else None

    return _map_leaves(axes, params)


def attention(params: Any) -> Any:
    """Return dimension numbers that know Flax's attention kernels; other leaves go by name.

    ``query``, ``key`` and ``value`` kernels (features, heads, head size) map features to all heads
    together; ``out`` kernels (heads, head size, features) map all heads together to features.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> query, out = jnp.ones((8, 2, 4)), jnp.ones((2, 4, 8))
      >>> svb_jax.attention({"query": {"kernel": query}, "out": {"kernel": out}})
      {'out': {'kernel': MatrixAxes(reduction=(0, 1), output=2, groups=1)},
       'query': {'kernel': MatrixAxes(reduction=(0,), output=(1, 2), groups=1)}}
    """

    def axes(path: Path, leaf: Any) -> MatrixAxes | None:
        owner = key_name(clean_path(path)[-2]) if len(clean_path(path)) > 1 else ""
        if leaf_name(path) == "kernel" and leaf.ndim == 3:
            if owner in ("query", "key", "value"):
                return MatrixAxes((0,), (1, 2))
            if owner == "out":
                return MatrixAxes((0, 1), 2)
        return axes_by_name(path, leaf)

    return _map_leaves(axes, params)


def scan_stacks(*modules: str, axis: int = 0) -> Callable[[Any], Any]:
    """Return dimension numbers for layers that ``nn.scan`` or ``nn.vmap`` stacked along ``axis``.

    Args:
      *modules: names on the path under which every kernel carries the stacking axis. Elsewhere, and for
        the axes that remain, kernels go by name.
      axis: where the stacking axis stands.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.scan_stacks("blocks")({"blocks": {"kernel": jnp.ones((12, 3, 4))}})
      {'blocks': {'kernel': MatrixAxes(reduction=(1,), output=2, groups=1)}}
    """

    def axes(path: Path, leaf: Any) -> MatrixAxes | None:
        if not any(key_name(key) in modules for key in path):
            return axes_by_name(path, leaf)
        if leaf_name(path) not in KERNEL_NAMES or leaf.ndim < 3:
            return None
        rest = [a for a in range(leaf.ndim) if a != axis % leaf.ndim]
        return MatrixAxes(tuple(rest[:-1]), rest[-1])

    def dimension_numbers(params: Any) -> Any:
        _check_named("scan_stacks", modules, lambda path: map(key_name, path), params)
        return _map_leaves(axes, params)

    return dimension_numbers


def grouped_convolutions(groups: Mapping[str, int]) -> Callable[[Any], Any]:
    """Return dimension numbers in which the named kernels are convolutions of so many groups.

    Each group is a matrix of its own; a depthwise kernel is one vector a channel. The shape does not tell
    the number of groups, so it is named.

    Args:
      groups: from a kernel's path to its number of groups. Other leaves go by name.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.grouped_convolutions({"conv/kernel": 4})({"conv": {"kernel": jnp.ones((3, 3, 2, 8))}})
      {'conv': {'kernel': MatrixAxes(reduction=(0, 1, 2), output=3, groups=4)}}
    """

    def axes(path: Path, leaf: Any) -> MatrixAxes | None:
        count = groups.get(path_string(path))
        return axes_by_name(path, leaf) if count is None else output_last(leaf.ndim)._replace(groups=count)

    def dimension_numbers(params: Any) -> Any:
        _check_named("grouped_convolutions", groups, lambda path: [path_string(path)], params)
        return _map_leaves(axes, params)

    return dimension_numbers


def _check_named(
    caller: str, names: Iterable[str], known: Callable[[Path], Iterable[str]], params: Any
) -> None:
    """Raise where a name is on no leaf's path, unless optax.masked or optax.partition may have hidden it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_hidden)
    found = {name for path, _ in leaves for name in known(path)}
    missing = sorted(set(names) - found)
    if missing and not any(_is_hidden(leaf) for _, leaf in leaves):
        raise ValueError(f"{caller} names {missing}, but the parameters have only {sorted(found)}.")


def _is_hidden(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _map_leaves(axes_of: AxesOfLeaf, params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(axes_of, params)
