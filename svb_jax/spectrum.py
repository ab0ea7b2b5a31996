"""Readings of a network's spectrum: of its weights, of its convolutions, of its layers with BatchNorm.

All of it runs on the host, in float64, one decomposition after the other: call it outside ``jit``. Nothing
is compiled, an array replicated over devices is decomposed once, and NumPy's LAPACK knows nothing of the
threads that XLA would run several decompositions on at once.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from svb_jax.axes import path_string
from svb_jax.checks import check_epsilon
from svb_jax.matrices import DimensionNumbers, matrices_by_path

# What float32 leaves of a value that was clipped to the band's edge.
BAND_TOLERANCE = 5e-6


def singular_values(params: Any, *, dimension_numbers: DimensionNumbers = None) -> dict[str, np.ndarray]:
    """Return the singular values of every weight matrix, by path.

    Args:
      params: a parameter tree, on the host or on devices.
      dimension_numbers: how leaves are read as matrices; by name if not given.

    Returns:
      From each matrix's path to its singular values in descending order, a vector. A leaf that holds several
      matrices (a grouped convolution, scanned layers) has one row for each. A matrix that is not finite
      has NaN for values.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"Dense_0": {"kernel": jnp.diag(jnp.array([0.5, 3.0, 1.0])), "bias": jnp.zeros(3)}}
      >>> svb_jax.singular_values(params)
      {'Dense_0/kernel': array([3. , 1. , 0.5])}
    """
    stacks = matrices_by_path(params, dimension_numbers)
    return {path: _one_row_flat(_spectra(stack)) for path, stack in stacks.items()}


class MatrixSummary(NamedTuple):
    """One row of :func:`spectrum_summary`: a leaf that holds a matrix, or several of one shape.

    Attributes:
      path: the leaf's path.
      num_matrices: how many the leaf holds.
      shape: (out, in) of each: of a convolution kernel, (out, in·height·width).
      sigma_min: the smallest singular value of all.
      sigma_max: the largest singular value of all.
      condition_number: largest over smallest singular value, of the worst matrix.
      share_in_band: the share of singular values in the band, to 5e-6 of its edges.
      orthogonality_distance: the Frobenius norm of W Wᵀ - I with W's short side first, of the worst matrix.
    """

    path: str
    num_matrices: int
    shape: tuple[int, int]
    sigma_min: float
    sigma_max: float
    condition_number: float
    share_in_band: float
    orthogonality_distance: float


class SpectrumSummary(NamedTuple):
    """What :func:`spectrum_summary` returns: ``rows`` to compute with, a text table when printed.

    Attributes:
      rows: one :class:`MatrixSummary` a leaf, in the tree's order.
      band: the lower and the upper bound that ``share_in_band`` counts.
    """

    rows: tuple[MatrixSummary, ...]
    band: tuple[float, float]

    def __str__(self) -> str:
        lower, upper = self.band
        header = ("matrix", "count", "out x in", "min", "max", "condition", "in band", "|WW'-I|")
        table = [header, *map(_printed_row, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([f"singular values, band [{lower:.4g}, {upper:.4g}]", *lines])


def spectrum_summary(
    params: Any, epsilon: float = 0.5, *, dimension_numbers: DimensionNumbers = None
) -> SpectrumSummary:
    """Return a table of every weight matrix's spectrum.

    Args:
      params: a parameter tree, on the host or on devices.
      epsilon: the band [1 / (1 + epsilon), 1 + epsilon] of which the table says how much lies inside; the
        paper's usual one if not given.
      dimension_numbers: how leaves are read as matrices; by name if not given.

    Returns:
      A :class:`SpectrumSummary`, which prints as a table.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> hidden, out = jnp.diag(jnp.array([0.5, 3.0, 1.0])), jnp.eye(3, 2)
      >>> params = {"Dense_0": {"kernel": hidden}, "out": {"kernel": out}}
      >>> print(svb_jax.spectrum_summary(params, epsilon=0.5))
      singular values, band [0.6667, 1.5]
      matrix          count  out x in     min     max  condition  in band  |WW'-I|
      Dense_0/kernel      1     3 x 3  0.5000  3.0000       6.00    33.3%   8.0351
      out/kernel          1     2 x 3  1.0000  1.0000       1.00   100.0%   0.0000
    """
    check_epsilon("spectrum_summary", epsilon)
    band = (1 / (1 + epsilon), 1 + epsilon)
    stacks = matrices_by_path(params, dimension_numbers)
    return SpectrumSummary(tuple(_summary_row(path, stack, band) for path, stack in stacks.items()), band)


def conv_operator_singular_values(
    kernel: ArrayLike,
    input_shape: tuple[int, int],
    *,
    strides: int | tuple[int, int] = 1,
    groups: int = 1,
) -> np.ndarray:
    r"""Return all singular values of a convolution as the linear map from images to images that it is.

    SVB bounds the kernel reshaped to out × (in·height·width), and that is not the map's spectrum: a value of
    the map can be up to :math:`\sqrt{h w}` times the reshaped kernel's largest (strides lower the factor to
    :math:`\sqrt{\lceil h/s_h \rceil \lceil w/s_w \rceil}`), and may vanish however large the reshaped
    kernel's smallest is.

    The convolution is taken as circular (Flax's ``padding="CIRCULAR"``), and there the result is exact: the
    Fourier transform splits the map into one small matrix for each frequency of the output. Zero padding only
    cuts rows and columns out of a circular map on a larger image.

    Args:
      kernel: of shape (height, width, in / groups, out), as Flax keeps it. Larger than the image, it
        wraps.
      input_shape: the image's height and width.
      strides: the step or the (vertical, horizontal) steps; they must divide the image's sides.
      groups: ``feature_group_count``.

    Returns:
      The singular values in descending order, as many as the map's smaller side.

    Example:
      A mean over three neighbours keeps a constant image and wipes out a wave of three pixels:

      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.conv_operator_singular_values(jnp.ones((1, 3, 1, 1)) / 3, (1, 3)).round(6)
      array([1., 0., 0.])

    References:
      Sedghi, Gupta and Long, `The Singular Values of Convolutional Layers
      <https://arxiv.org/abs/1805.10408>`_, 2019.
    """
    kernel = np.asarray(kernel, np.float64)
    strides = (strides, strides) if isinstance(strides, int) else strides
    _check_convolution(kernel, input_shape, strides, groups)
    blocks = _frequency_blocks(kernel, input_shape, strides, groups)
    # A real kernel's blocks at opposite frequencies are conjugate: half of them have all the values.
    width = blocks.shape[1]
    values = _spectra(blocks[:, : width // 2 + 1])
    mirrored = values[:, 1 : (width + 1) // 2]
    return np.sort(np.concatenate([values, mirrored], axis=None))[::-1]


def folded_singular_values(
    params: Any,
    batch_stats: Any,
    pairs: Iterable[tuple[str, str]],
    *,
    bn_epsilon: float = 1e-5,
    dimension_numbers: DimensionNumbers = None,
) -> dict[str, np.ndarray]:
    r"""Return the singular values of the layers that weights and the BatchNorm after them make together.

    At inference BatchNorm multiplies each output by a number, so the layer's matrix is
    :math:`\Gamma \Sigma W` with the diagonal :math:`\gamma_i / \sqrt{\text{var}_i + \text{bn\_epsilon}}`:
    weights with all singular values in the band say nothing of it, unless BBN bounds the diagonal too.

    Args:
      params: a parameter tree, with ``kernel`` and ``scale`` leaves.
      batch_stats: the running statistics, with ``var`` leaves.
      pairs: which BatchNorm follows which kernel: the kernel's path, then the BatchNorm's. A BatchNorm
        without ``scale`` counts as one whose scales are 1.
      bn_epsilon: what BatchNorm adds to the variance.
      dimension_numbers: how leaves are read as matrices; by name if not given.

    Returns:
      From each paired kernel's path to the singular values, as in :func:`singular_values`.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"Dense_0": {"kernel": jnp.eye(2)}, "BatchNorm_0": {"scale": jnp.array([1.0, 3.0])}}
      >>> batch_stats = {"BatchNorm_0": {"mean": jnp.zeros(2), "var": jnp.array([1.0, 0.25])}}
      >>> pairs = [("Dense_0/kernel", "BatchNorm_0")]
      >>> svb_jax.folded_singular_values(params, batch_stats, pairs, bn_epsilon=0.0)
      {'Dense_0/kernel': array([6., 1.])}
    """
    stacks = matrices_by_path(params, dimension_numbers)
    scales, variances = _leaves_by_owner(params, "scale"), _leaves_by_owner(batch_stats, "var")
    folded = {}
    for kernel, norm in pairs:
        stack = np.asarray(_named(kernel, stacks, "the path of a weight matrix"), np.float64)
        variance = np.asarray(_named(norm, variances, "the path of a BatchNorm in batch_stats"), np.float64)
        gains = np.asarray(scales.get(norm, 1.0), np.float64) / np.sqrt(variance + bn_epsilon)
        if kernel in folded:
            raise ValueError(f"folded_singular_values needs one BatchNorm a kernel, got two for {kernel!r}.")
        folded[kernel] = _one_row_flat(_spectra(stack * _gain_of_each_output(gains, stack, kernel, norm)))
    return folded


def _spectra(matrices: Any) -> np.ndarray:
    """Return the singular values of matrices (..., m, n), NaN where a matrix is not finite."""
    matrices = np.asarray(matrices)
    precise = matrices.astype(np.result_type(matrices, np.float64), copy=False)
    values = np.full((*precise.shape[:-2], min(precise.shape[-2:])), np.nan)
    # LAPACK on the others only: NumPy raises for the whole stack if one does not converge.
    finite = np.isfinite(precise).all((-2, -1))
    values[finite] = np.linalg.svd(precise[finite], compute_uv=False)
    return values


def _one_row_flat(values: np.ndarray) -> np.ndarray:
    return values[0] if len(values) == 1 else values


def _summary_row(path: str, stack: jax.Array, band: tuple[float, float]) -> MatrixSummary:
    values = _spectra(stack)
    lower, upper = band[0] * (1 - BAND_TOLERANCE), band[1] * (1 + BAND_TOLERANCE)
    largest, smallest = values[:, 0], values[:, -1]
    conditions = np.divide(largest, smallest, out=np.full_like(largest, np.inf), where=smallest != 0)
    distances = np.linalg.norm(values**2 - 1, axis=1)
    return MatrixSummary(
        path=path,
        num_matrices=stack.shape[0],
        shape=(stack.shape[2], stack.shape[1]),
        sigma_min=float(values.min()),
        sigma_max=float(values.max()),
        condition_number=float(conditions.max()),
        share_in_band=float(np.mean((lower <= values) & (values <= upper))),
        orthogonality_distance=float(distances.max()),
    )


def _printed_row(row: MatrixSummary) -> tuple[str, ...]:
    out, reduction = row.shape
    return (
        row.path,
        str(row.num_matrices),
        f"{out} x {reduction}",
        f"{row.sigma_min:.4f}",
        f"{row.sigma_max:.4f}",
        f"{row.condition_number:.2f}",
        f"{row.share_in_band:.1%}",
        f"{row.orthogonality_distance:.4f}",
    )


def _check_convolution(
    kernel: np.ndarray, input_shape: tuple[int, int], strides: tuple[int, int], groups: int
) -> None:
    name = "conv_operator_singular_values"
    if kernel.ndim != 4:
        raise ValueError(f"{name} needs a kernel (height, width, in, out), got shape {kernel.shape}.")
    if len(input_shape) != 2 or min(input_shape) < 1:
        raise ValueError(f"{name} needs the image's height and width as input_shape, got {input_shape}.")
    if len(strides) != 2 or min(strides) < 1 or any(n % s for n, s in zip(input_shape, strides, strict=True)):
        raise ValueError(f"{name} needs strides that divide input_shape {input_shape}, got {strides}.")
    if groups < 1 or kernel.shape[3] % groups:
        raise ValueError(f"{name} needs groups that divide the {kernel.shape[3]} outputs, got {groups}.")


def _frequency_blocks(
    kernel: np.ndarray, input_shape: tuple[int, int], strides: tuple[int, int], groups: int
) -> np.ndarray:
    """Return the map's diagonal blocks: (output frequencies, groups, aliased inputs, outputs a group)."""
    height, width, inputs, outputs = kernel.shape
    (rows, columns), (down, across) = input_shape, strides
    wrapped = np.zeros((rows, columns, inputs, outputs))
    np.add.at(wrapped, np.ix_(np.arange(height) % rows, np.arange(width) % columns), kernel)
    # Keeping every s-th output adds up the s frequencies that look alike on the coarser grid; the root
    # is what the shorter transform's normalisation differs by.
    responses = np.fft.fft2(wrapped, axes=(0, 1)) / math.sqrt(down * across)
    aliased = responses.reshape(
        down, rows // down, across, columns // across, inputs, groups, outputs // groups
    )
    ordered = aliased.transpose(1, 3, 5, 0, 2, 4, 6)
    return ordered.reshape(*ordered.shape[:3], down * across * inputs, outputs // groups)


def _leaves_by_owner(tree: Any, name: str) -> dict[str, Any]:
    """Return the leaves called ``name``, by the path of the module that owns them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [(path_string(path).rpartition("/"), leaf) for path, leaf in leaves]
    return {owner: leaf for (owner, _, last), leaf in paths if last == name}


def _named(path: str, known: Mapping[str, Any], what: str) -> Any:
    if path not in known:
        nearest = difflib.get_close_matches(path, known, n=1, cutoff=0)
        hint = f"the nearest is {nearest[0]!r}" if nearest else "there is none"
        raise ValueError(f"folded_singular_values needs {what} in pairs, got {path!r}; {hint}.")
    return known[path]


def _gain_of_each_output(gains: np.ndarray, stack: np.ndarray, kernel: str, norm: str) -> np.ndarray:
    count, _, outputs = stack.shape
    if gains.size != count * outputs:
        raise ValueError(
            f"folded_singular_values needs a BatchNorm with one channel for each output, got {norm!r} of "
            f"{gains.size} channels after {kernel!r} of {count * outputs} outputs."
        )
    return gains.reshape(count, 1, outputs)
