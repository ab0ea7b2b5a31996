"""What would be bounded, and how it is read, before a step is taken."""

from typing import Any, NamedTuple

from svb_jax._src.checks import check_bands
from svb_jax._src.dimension_numbers import DimensionNumbers, Tree, axes_by_name, leaves_by_names
from svb_jax._src.leaves import Centre, MatrixLeaf, matrix_leaves
from svb_jax._src.masks import check_patterns, hide
from svb_jax._src.paths import NamedLeaf, named_leaves, value_by_path
from svb_jax._src.tables import html_table, text_table
from svb_jax._src.transforms import Epsilon

HEADER = ("leaf", "shape", "matrices", "out x in", "band", "axes, or why it is left alone")
LEFT = (0, 1, 4, 5)
"""The columns of words, which are set to the left."""


class LeafDescription(NamedTuple):
    """One row of :func:`describe`.

    Attributes:
      path: The leaf's path.
      shape: The leaf's shape.
      num_matrices: How many matrices it holds; 0 if it is left alone, and the fields below are empty.
      matrix_shape: (out, in) of each.
      axes: Which axes of the leaf are read as what.
      band: The smallest and the largest singular value that is allowed; a schedule's at its start.
      left_alone: Why nothing is done, or empty.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> bias, kernel = svb_jax.describe({"bias": jnp.ones(4), "kernel": jnp.ones((3, 4))}, epsilon=1.0).rows
      >>> kernel.matrix_shape, kernel.band, kernel.left_alone
      ((4, 3), (0.5, 2.0), '')
      >>> bias.num_matrices, bias.left_alone
      (0, 'not called kernel, w or weight')
    """

    path: str
    shape: tuple[int, ...]
    num_matrices: int = 0
    matrix_shape: tuple[int, ...] = ()
    axes: str = ""
    band: tuple[float, ...] = ()
    left_alone: str = ""


class Description(NamedTuple):
    """What :func:`describe` returns: ``rows`` to compute with, a table when printed or shown in a notebook.

    Attributes:
      rows: One :class:`LeafDescription` a leaf, in the tree's order.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> description = svb_jax.describe({"bias": jnp.ones(4), "kernel": jnp.ones((3, 4))})
      >>> [row.path for row in description.rows if row.left_alone]
      ['bias']
    """

    rows: tuple[LeafDescription, ...]

    def __str__(self) -> str:
        return text_table(self._title, HEADER, [_printed(row) for row in self.rows], left=LEFT)

    def _repr_html_(self) -> str:
        return html_table(self._title, HEADER, [_printed(row) for row in self.rows], left=LEFT)

    @property
    def _title(self) -> str:
        bounded = sum(row.num_matrices > 0 for row in self.rows)
        matrices = sum(row.num_matrices for row in self.rows)
        return f"{matrices} matrices in {bounded} of {len(self.rows)} leaves would be bounded"


def describe(
    params: Any,
    epsilon: Epsilon = 0.5,
    *,
    centre: Centre = 1.0,
    dimension_numbers: DimensionNumbers = None,
    where: Any = None,
) -> Description:
    """Return a table of what would be bounded, read how, into which band, and of what is left alone and why.

    It takes the arguments with which :func:`bound_singular_values` chooses, raises where that would raise,
    and computes nothing: shapes are enough, such as ``jax.eval_shape`` gives.

    Args:
      params: A parameter tree, or its shapes.
      epsilon: The band ``[1 / (1 + epsilon), 1 + epsilon]``: a number, a schedule, or a mapping from
        patterns of paths to these.
      centre: The middle of the band if it is not 1, a number or a function of a matrix's (outputs, inputs).
      dimension_numbers: How leaves are read as matrices; by name if not given.
      where: Which leaves to bound: a pattern of paths or several, or a mask as ``optax.masked`` takes it.

    Returns:
      A :class:`Description`, which prints as a table.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> conv = {"kernel": jnp.ones((3, 3, 2, 4)), "bias": jnp.ones(4)}
      >>> params = {"conv": conv, "head": {"kernel": jnp.ones((4, 10))}}
      >>> print(svb_jax.describe(params, {"head": 0.1, "*": 0.5}))
      2 matrices in 2 of 3 leaves would be bounded
      leaf         shape         matrices  out x in  band           axes, or why it is left alone
      conv/bias    (4,)                                             not called kernel, w or weight
      conv/kernel  (3, 3, 2, 4)         1    4 x 18  [0.6667, 1.5]  in 0, 1, 2; out 3
      head/kernel  (4, 10)              1    10 x 4  [0.9091, 1.1]  in 0; out 1
    """
    bands = check_bands("describe", epsilon)
    check_patterns("describe's epsilon", bands, params)
    shown = hide(params, where)
    visible, tree = named_leaves(shown), leaves_by_names(shown)
    matrices = {visible[leaf.index].names: leaf for leaf in matrix_leaves(shown, dimension_numbers)}
    chosen = {leaf.names for leaf in visible}

    def row(leaf: NamedLeaf) -> LeafDescription:
        if (matrix := matrices.get(leaf.names)) is not None:
            return _bounded_row(leaf, matrix, value_by_path("describe's epsilon", bands, leaf.path), centre)
        reason = _reason(leaf, tree) if leaf.names in chosen else "outside where"
        return LeafDescription(leaf.label, leaf.shape, left_alone=reason)

    return Description(tuple(row(leaf) for leaf in named_leaves(params)))


def _bounded_row(leaf: NamedLeaf, matrix: MatrixLeaf, epsilon: Any, centre: Centre) -> LeafDescription:
    inputs, outputs = matrix.matrix_shape
    middle = centre(outputs, inputs) if callable(centre) else centre
    start: Any = epsilon(0) if callable(epsilon) else epsilon
    factor = 1 + max(float(start), 0)
    return LeafDescription(
        path=leaf.label,
        shape=leaf.shape,
        num_matrices=matrix.count,
        matrix_shape=(outputs, inputs),
        axes=_printed_axes(matrix),
        band=(float(middle / factor), float(middle * factor)),
    )


def _printed_axes(matrix: MatrixLeaf) -> str:
    named = {"in": matrix.reduction, "out": matrix.output, "each of": matrix.batch}
    parts = [f"{name} {', '.join(map(str, axes))}" for name, axes in named.items() if axes]
    return "; ".join(parts + [f"{matrix.groups} groups"] * (matrix.groups > 1))


def _reason(leaf: NamedLeaf, tree: Tree) -> str:
    if 0 in leaf.shape:
        return "has no entries"
    try:
        found = axes_by_name(leaf, tree)
    except ValueError:
        found = None
    return found if isinstance(found, str) else "left out by dimension_numbers"


def _printed(row: LeafDescription) -> tuple[str, ...]:
    shape = str(row.shape)
    if not row.num_matrices:
        return (row.path, shape, "", "", "", row.left_alone)
    lower, upper = row.band
    size = " x ".join(map(str, row.matrix_shape))
    return (row.path, shape, str(row.num_matrices), size, f"[{lower:.4g}, {upper:.4g}]", row.axes)
