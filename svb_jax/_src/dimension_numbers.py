"""Which leaves of a parameter tree are weight matrices, and which of their axes are which.

Dimension numbers are a tree of :class:`MatrixAxes` (``None`` where a leaf is no matrix), or a function from
the parameters to such a tree. The default goes by a leaf's name, the module that it belongs to, and its rank:
shape alone cannot decide, since a rank-3 kernel may be a convolution, attention or a stack of layers. What
names do not settle either is not guessed at: it raises.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax

from svb_jax._src.paths import NamedLeaf, is_hidden, map_leaves, named_leaves

KERNEL_NAMES = ("kernel", "w", "weight")
QUERY_NAMES = (
    *("query", "key", "value", "q", "k", "v", "wq", "wk", "wv", "to_q", "to_k", "to_v"),
    *("q_proj", "k_proj", "v_proj", "query_proj", "key_proj", "value_proj"),
)
DENSE_MODULE = re.compile(r"(dense|linear)(_?general)?(_?\d+)?", re.IGNORECASE)
OUT_NAMES = ("out", "o", "wo", "to_out", "o_proj", "out_proj", "output_proj")
EMBEDDING_MODULE = re.compile(r".*embed(ding)?s?(_?(tokens?|positions?|\d+))?|wte|wpe", re.IGNORECASE)

# A tree of MatrixAxes, or a function from the parameters to one.
DimensionNumbers = Any
# Every leaf of a tree by its names, among them what optax.masked left in place of those that it hid.
Tree = Mapping[tuple[str, ...], Any]


class MatrixAxes(NamedTuple):
    """How a leaf is read as matrices: ``reduction`` × ``output``, one for each index of its other axes.

    Attributes:
      reduction: The axis or axes that a layer sums over, merged in this order.
      output: The axis or axes of its outputs, merged in this order.
      groups: How many blocks the merged output falls into, each a matrix of its own (grouped convolution,
        the gates of a recurrent cell).

    Example:
      >>> import svb_jax
      >>> svb_jax.MatrixAxes(reduction=(0, 1, 2), output=3)  # a convolution kernel, HWIO
      MatrixAxes(reduction=(0, 1, 2), output=3, groups=1)
    """

    reduction: int | tuple[int, ...]
    output: int | tuple[int, ...]
    groups: int = 1


def output_last(rank: int) -> MatrixAxes:
    """Return the axes of Flax's dense and convolution kernels: the output last, all else reduction."""
    return MatrixAxes(tuple(range(rank - 1)), rank - 1)


def output_first(rank: int, groups: int = 1) -> MatrixAxes:
    """Return the axes of Equinox's and PyTorch's kernels: the output first, all else reduction."""
    return MatrixAxes(tuple(range(1, rank)), 0, groups)


def is_axes(node: Any) -> bool:
    """Return whether a node of a tree of dimension numbers says how a leaf is read, or that it is not."""
    # By its fields, so that optax.contrib.MuonDimensionNumbers is taken too.
    return node is None or isinstance(node, MatrixAxes) or hasattr(node, "reduction_axis")


def as_matrix_axes(label: str, axes: Any) -> MatrixAxes | None:
    """Return what a tree of dimension numbers says of a leaf in our own type, or raise."""
    if hasattr(axes, "reduction_axis"):
        return MatrixAxes(axes.reduction_axis, axes.output_axis)
    if axes is not None and not isinstance(axes, MatrixAxes):
        raise TypeError(
            f"dimension_numbers for {label!r} must be a svb_jax.MatrixAxes or None, got {axes!r}."
        )
    return axes


def merged_size(shape: tuple[int, ...], axes: int | tuple[int, ...]) -> int:
    """Return how many entries the axes have together."""
    return math.prod(shape[a] for a in ((axes,) if isinstance(axes, int) else axes))


def positive_axes(label: str, axes: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return axes counted from the front, or raise where the leaf has no such axis."""
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -rank <= a < rank for a in listed):
        raise ValueError(f"svb_jax got axes {listed} for {label!r}, which has rank {rank}.")
    return tuple(a % rank for a in listed)


class Cell(NamedTuple):
    """The names of a recurrent cell's two weights: of its state and of its input."""

    hidden: tuple[str, ...]
    inputs: tuple[str, ...]
    is_output_first: bool


CELLS = (
    Cell(("weight_hh",), ("weight_ih",), True),  # Equinox
    Cell(("w_h",), ("w_i",), False),  # Haiku
    Cell(("dense_h", "kernel"), ("dense_i", "kernel"), False),  # NNX
)


def by_name(params: Any) -> Any:
    """Return the default dimension numbers: leaves called ``kernel``, ``w`` or ``weight``, output last.

    Embeddings are left alone. Attributes called ``weight`` are Equinox's: output first, a convolution's
    groups as the layer has them. In the recurrent cells of Equinox, Haiku and NNX each gate is a matrix. A
    kernel that could be several things (rank 3, rank 5 and more, rank 4 in attention) raises.

    Args:
      params: The parameters.

    Returns:
      A tree of :class:`MatrixAxes`, with None for leaves that are no matrices.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.by_name({"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}})
      {'dense': {'bias': None, 'kernel': MatrixAxes(reduction=(0,), output=1, groups=1)}}
    """
    tree = leaves_by_names(params)
    return map_leaves(lambda leaf: by_name_or_none(leaf, tree), params)


def axes_by_name(leaf: NamedLeaf, tree: Tree) -> MatrixAxes | str:
    """Return how a leaf is read as matrices or why it is left alone; raise if it could be several things."""
    if (cell := _cell_of(leaf, tree)) is not None:
        return _gates(leaf, cell, tree)
    if leaf.name not in KERNEL_NAMES:
        return f"not called {', '.join(KERNEL_NAMES[:-1])} or {KERNEL_NAMES[-1]}"
    if leaf.rank < 2:
        return "no matrix"
    if is_embedding(leaf):
        return "embedding"
    if is_output_first(leaf):
        return _output_first_by_class(leaf)
    if (doubt := _other_readings(leaf, tree)) is not None:
        raise_ambiguous(leaf, doubt)
    # Haiku's transposed convolutions have their inputs last.
    is_swapped = leaf.rank == 4 and leaf.name == "w" and "transpose" in leaf.module
    return MatrixAxes((0, 1, 3), 2) if is_swapped else output_last(leaf.rank)


def check_input_channels(leaves: Iterable[NamedLeaf]) -> None:
    """Raise where kernels with one input channel could be depthwise convolutions, which read otherwise.

    A network's first layer has one input channel if its images have. A second such kernel, or one whose name
    says so, is most likely depthwise. Equinox's convolutions know their groups.
    """
    single = [leaf for leaf in leaves if _has_single_input(leaf)]
    suspects = [leaf for leaf in single if "depthwise" in leaf.path.lower()] or single * (len(single) > 1)
    if suspects:
        named = ", ".join(f"{leaf.label!r} {leaf.shape}" for leaf in suspects)
        raise ValueError(
            "svb_jax cannot tell whether these kernels with one input channel are depthwise convolutions: "
            f"{named}. Pass dimension_numbers=svb_jax.depthwise('module', ...) to bound each channel by "
            "itself, or svb_jax.by_name if each is an ordinary convolution."
        )


def _has_single_input(leaf: NamedLeaf) -> bool:
    is_kernel = leaf.name in KERNEL_NAMES and leaf.rank == 4 and leaf.owner is None
    return is_kernel and leaf.shape[2] == 1 and leaf.shape[3] > 1 and math.prod(leaf.shape[:2]) > 1


def is_embedding(leaf: NamedLeaf) -> bool:
    """Return whether a leaf called weight is the table of an embedding: by its class, or its module's name.

    Flax and Haiku call the table ``embedding`` and ``embeddings``, which is no kernel's name.
    """
    classes = {base.__name__ for base in type(leaf.owner).__mro__}
    is_table = bool(classes & {"Embed", "Embedding"} or EMBEDDING_MODULE.fullmatch(leaf.module))
    return leaf.name == "weight" and leaf.rank == 2 and is_table


def is_output_first(leaf: NamedLeaf) -> bool:
    """Return whether a leaf is the attribute ``weight`` of an object, as Equinox has it."""
    return leaf.name == "weight" and leaf.owner is not None


def is_in_attention(leaf: NamedLeaf, tree: Tree) -> bool:
    """Return whether a leaf belongs to one of attention's projections, by the names of its modules."""
    if leaf.module in QUERY_NAMES or is_fused(leaf):
        return True
    if any("attention" in name or "attn" in name for name in leaf.path.lower().split("/")):
        return True
    beside = {names[len(leaf.names) - 2] for names in tree if _is_beside(names, leaf)}
    return leaf.module in OUT_NAMES and bool(beside & set(QUERY_NAMES))


def is_fused(leaf: NamedLeaf) -> bool:
    """Return whether a leaf holds query, key and value in one, by its module's name."""
    return "qkv" in leaf.module.lower() or leaf.module == "c_attn"


def raise_ambiguous(leaf: NamedLeaf, because: str) -> NoReturn:
    """Raise, and say what a leaf could be and how to tell."""
    raise ValueError(
        f"svb_jax cannot tell how {leaf.label!r} of shape {leaf.shape} is a matrix: {because}. Say so with "
        "dimension_numbers=, for example svb_jax.attention, svb_jax.scan_stacks('module'), svb_jax.oihw or "
        f"svb_jax.by_path({{{leaf.path!r}: svb_jax.MatrixAxes(...)}}), with None there to leave it alone."
    )


def _other_readings(leaf: NamedLeaf, tree: Tree) -> str | None:
    """Return what a kernel could be besides a dense layer or a convolution over two axes."""
    if leaf.rank == 3:
        return "a convolution over one axis, an attention projection and a stack of dense layers look alike"
    if leaf.rank > 4:
        return "a convolution over three axes and a stack of convolutions look alike"
    if leaf.rank == 4 and is_in_attention(leaf, tree):
        return "in attention, a stack of layers and a fused projection look alike"
    if leaf.rank == 4 and DENSE_MODULE.fullmatch(leaf.module):
        return "a dense layer with several axes of inputs or outputs and a stack of dense layers look alike"
    if leaf.rank == 4 and leaf.name == "weight":
        return "PyTorch's kernels have their outputs first and Flax's have them last"
    return None


def _output_first_by_class(leaf: NamedLeaf) -> MatrixAxes:
    # Equinox's convolutions know their groups, and so we need not ask.
    spatial, groups = getattr(leaf.owner, "num_spatial_dims", 0), getattr(leaf.owner, "groups", 1)
    if leaf.rank != spatial + 2:
        raise_ambiguous(
            leaf, f"a {type(leaf.owner).__name__} has a weight of rank {spatial + 2}, unless stacked"
        )
    return output_first(leaf.rank, groups)


def _is_beside(names: tuple[str, ...], leaf: NamedLeaf) -> bool:
    depth = len(leaf.names) - 2
    return depth >= 0 and len(names) > depth and names[:depth] == leaf.names[:depth]


def _cell_of(leaf: NamedLeaf, tree: Tree) -> Cell | None:
    for cell in CELLS:
        if (parent := _parent(leaf, cell)) is not None:
            # A module called dense_h may stand alone, a weight_hh belongs to a cell for sure.
            is_pair = {(*parent, *cell.hidden), (*parent, *cell.inputs)} <= set(tree)
            return cell if is_pair or len(cell.hidden) == 1 else None
    return None


def _parent(leaf: NamedLeaf, cell: Cell) -> tuple[str, ...] | None:
    depth = len(cell.hidden)
    return leaf.names[:-depth] if leaf.names[-depth:] in (cell.hidden, cell.inputs) else None


def _gates(leaf: NamedLeaf, cell: Cell, tree: Tree) -> MatrixAxes:
    """Return the axes of a recurrent cell's weight, in which the outputs of its gates follow each other."""
    axes = output_first(2) if cell.is_output_first else output_last(2)
    hidden = tree.get((*(_parent(leaf, cell) or ()), *cell.hidden))
    shape = getattr(hidden, "shape", (0, 0))
    state = getattr(leaf.owner, "hidden_size", None) or merged_size(shape, axes.reduction)
    outputs = merged_size(leaf.shape, axes.output)
    if leaf.rank != 2 or not state or outputs % state:
        raise_ambiguous(
            leaf, f"the size of the state, which {'/'.join(cell.hidden)!r} shows, gives its gates"
        )
    return axes._replace(groups=outputs // state)


def read_axes(params: Any, dimension_numbers: DimensionNumbers) -> dict[tuple[str, ...], MatrixAxes | None]:
    """Return what the dimension numbers say of each leaf, by its names."""
    # A tree may be callable too: an Equinox module with axes for leaves.
    is_function = callable(dimension_numbers) and jax.tree_util.all_leaves([dimension_numbers])
    tree = dimension_numbers(params) if is_function else dimension_numbers
    return {
        leaf.names: as_matrix_axes(leaf.label, leaf.value) for leaf in named_leaves(tree, is_leaf=is_axes)
    }


def leaves_by_names(params: Any) -> Tree:
    """Return the leaves of a tree by their names, with what is hidden by a mask."""
    return {leaf.names: leaf.value for leaf in named_leaves(params, is_leaf=is_hidden)}


def by_name_or_none(leaf: NamedLeaf, tree: Tree) -> MatrixAxes | None:
    """Return how a leaf is read by default, or None if it is left alone."""
    found = axes_by_name(leaf, tree)
    return None if isinstance(found, str) else found
