"""A network's spectrum: of its weights, and of its layers with BatchNorm.

All of it runs on the host, in float64: call it outside ``jit``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from svb_jax._src.checks import check_epsilon
from svb_jax._src.clip.matrix_functions import compute_dtype
from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.host_spectra import host_matrices, host_spectra
from svb_jax._src.leaves import MatrixLeaf
from svb_jax._src.running_variances import scales_by_module, variances_by_module
from svb_jax._src.suggestions import nearest
from svb_jax._src.tables import html_table, text_table

# The relative error of a singular value at the band's edge after clipping in a type.
BAND_TOLERANCE = {np.dtype(np.float32): 5e-6, np.dtype(np.float64): 1e-12}
HEADER = ("matrix", "count", "out x in", "min", "max", "condition", "in band", "|WW'-I|")


def singular_values(params: Any, *, dimension_numbers: DimensionNumbers = None) -> dict[str, np.ndarray]:
    """Return the singular values of every weight matrix, by path.

    Args:
      params: A parameter tree, on the host or on devices.
      dimension_numbers: How leaves are read as matrices; by name if not given.

    Returns:
      A dict from each matrix's path to its singular values, in descending order. A leaf that holds several
      matrices (a grouped convolution, scanned layers) has one row for each. A matrix that is not finite
      has NaN for values.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"Dense_0": {"kernel": jnp.diag(jnp.array([0.5, 3.0, 1.0])), "bias": jnp.zeros(3)}}
      >>> svb_jax.singular_values(params)
      {'Dense_0/kernel': array([3. , 1. , 0.5])}
    """
    batches = host_matrices(params, dimension_numbers)
    return {leaf.label: _one_row_flat(host_spectra(matrices)) for leaf, matrices in batches}


class MatrixSummary(NamedTuple):
    """One row of :func:`spectrum_summary`: a leaf that holds a matrix, or several of one shape.

    Attributes:
      path: The leaf's path.
      num_matrices: How many the leaf holds.
      shape: (out, in) of each: of a convolution kernel, (out, in·height·width).
      sigma_min: The smallest singular value of all.
      sigma_max: The largest singular value of all.
      condition_number: Largest over smallest singular value, of the worst matrix; infinite where float64
        cannot tell the smallest from zero.
      share_in_band: The share of singular values in the band, to what the leaf's type can hold: 5e-6 of its
        edges in float32, and for half types one unit in the last place of the upper edge besides.
      orthogonality_distance: The Frobenius norm of W Wᵀ - I with W's short side first, of the worst matrix.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> [row] = svb_jax.spectrum_summary({"kernel": jnp.diag(jnp.array([0.5, 3.0, 1.0]))}).rows
      >>> row.path, row.shape, row.sigma_min, row.condition_number
      ('kernel', (3, 3), 0.5, 6.0)
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
      rows: One :class:`MatrixSummary` per leaf, in the tree's order.
      band: The lower and the upper bound that ``share_in_band`` counts.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> params = {"first": {"kernel": jnp.eye(3)}, "second": {"kernel": 2 * jnp.eye(2)}}
      >>> summary = svb_jax.spectrum_summary(params, epsilon=1.0)
      >>> summary.band, max(row.sigma_max for row in summary.rows)
      ((0.5, 2.0), 2.0)
    """

    rows: tuple[MatrixSummary, ...]
    band: tuple[float, float]

    def __str__(self) -> str:
        return text_table(self._title, HEADER, [_printed_row(row) for row in self.rows])

    def _repr_html_(self) -> str:
        return html_table(self._title, HEADER, [_printed_row(row) for row in self.rows])

    @property
    def _title(self) -> str:
        lower, upper = self.band
        return f"singular values, band [{lower:.4g}, {upper:.4g}]"


def spectrum_summary(
    params: Any, epsilon: float = 0.5, *, dimension_numbers: DimensionNumbers = None
) -> SpectrumSummary:
    """Return a table of every weight matrix's spectrum.

    Args:
      params: A parameter tree, on the host or on devices.
      epsilon: The band [1 / (1 + epsilon), 1 + epsilon]; the table has the share of values inside it. The
        paper's usual one if not given.
      dimension_numbers: How leaves are read as matrices; by name if not given.

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
    batches = host_matrices(params, dimension_numbers)
    return SpectrumSummary(tuple(_summary_row(leaf, matrices, band) for leaf, matrices in batches), band)


def folded_singular_values(
    params: Any,
    batch_stats: Any,
    pairs: Iterable[tuple[str, str]],
    *,
    bn_epsilon: float = 1e-5,
    dimension_numbers: DimensionNumbers = None,
) -> dict[str, np.ndarray]:
    r"""Return the singular values of layers with the BatchNorm that follows them folded in.

    At inference BatchNorm multiplies each output by a number, so the layer's matrix is
    :math:`\Gamma \Sigma W` with the diagonal :math:`\gamma_i / \sqrt{\text{var}_i + \text{bn\_epsilon}}`:
    a band on the weights says nothing about it, unless BBN bounds the diagonal too.

    Args:
      params: A parameter tree, with the weights and the BatchNorms' scales.
      batch_stats: The running statistics of Linen, NNX or Haiku, or Equinox's ``State``.
      pairs: Which BatchNorm follows which kernel: the kernel's path, then the BatchNorm's. A BatchNorm
        without ``scale`` counts as one whose scales are 1.
      bn_epsilon: What BatchNorm adds to the variance.
      dimension_numbers: How leaves are read as matrices; by name if not given.

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
    batches = {leaf.label: matrices for leaf, matrices in host_matrices(params, dimension_numbers)}
    scales, variances = scales_by_module(params), variances_by_module(batch_stats, params)
    folded = {}
    for kernel, norm in pairs:
        matrices = _named(kernel, batches, "the path of a weight matrix")
        variance = np.asarray(_named(norm, variances, "the path of a BatchNorm in batch_stats"), np.float64)
        gains = np.asarray(scales.get(norm, 1.0), np.float64) / np.sqrt(variance + bn_epsilon)
        if kernel in folded:
            raise ValueError(f"folded_singular_values needs one BatchNorm a kernel, got two for {kernel!r}.")
        gains = _gain_of_each_output(gains, matrices, kernel, norm)
        folded[kernel] = _one_row_flat(host_spectra(matrices * gains))
    return folded


def _one_row_flat(values: np.ndarray) -> np.ndarray:
    return values[0] if len(values) == 1 else values


def _summary_row(leaf: MatrixLeaf, matrices: np.ndarray, band: tuple[float, float]) -> MatrixSummary:
    values = host_spectra(matrices)
    largest, smallest = values[:, 0], values[:, -1]
    # Below this a singular value is what rounding leaves of zero.
    floor = largest * np.finfo(np.float64).eps * max(matrices.shape[1:])
    conditions = np.divide(largest, smallest, out=np.full_like(largest, np.inf), where=~(smallest <= floor))
    distances = np.linalg.norm(values**2 - 1, axis=1)
    inputs, outputs = leaf.matrix_shape
    return MatrixSummary(
        path=leaf.label,
        num_matrices=leaf.count,
        shape=(outputs, inputs),
        sigma_min=float(values.min()),
        sigma_max=float(values.max()),
        condition_number=float(conditions.max()),
        share_in_band=float(np.mean(_is_in_band(values, band, leaf))),
        orthogonality_distance=float(distances.max()),
    )


def _is_in_band(values: np.ndarray, band: tuple[float, float], leaf: MatrixLeaf) -> np.ndarray:
    lower, upper = band
    dtype = compute_dtype(leaf.dtype)
    computing = BAND_TOLERANCE[np.dtype(dtype)]
    # Rounding a matrix to a half type moves all its singular values by about the same amount.
    storing = upper * float(jnp.finfo(leaf.dtype).eps) if leaf.dtype != dtype else 0.0
    return (lower * (1 - computing) - storing <= values) & (values <= upper * (1 + computing) + storing)


def _printed_row(row: MatrixSummary) -> tuple[str, ...]:
    out, reduction = row.shape
    return (
        row.path,
        str(row.num_matrices),
        f"{out} x {reduction}",
        _printed(row.sigma_min, 4),
        _printed(row.sigma_max, 4),
        _printed(row.condition_number, 2),
        f"{row.share_in_band:.1%}",
        _printed(row.orthogonality_distance, 4),
    )


def _printed(number: float, digits: int) -> str:
    return f"{number:.{digits}f}" if number < 1e6 else f"{number:.1e}"


def _named(path: str, known: Mapping[str, Any], what: str) -> Any:
    if path not in known:
        raise ValueError(
            f"folded_singular_values needs {what} in pairs, got {path!r}; {nearest(path, known)}."
        )
    return known[path]


def _gain_of_each_output(gains: np.ndarray, matrices: np.ndarray, kernel: str, norm: str) -> np.ndarray:
    count, _, outputs = matrices.shape
    if gains.size != count * outputs:
        raise ValueError(
            f"folded_singular_values needs a BatchNorm with one channel for each output, got {norm!r} of "
            f"{gains.size} channels after {kernel!r} of {count * outputs} outputs."
        )
    return gains.reshape(count, 1, outputs)
