"""Matrices and their singular values on the host, in float64, one decomposition after the other.

Nothing is compiled, an array replicated over devices is decomposed once, and NumPy's LAPACK knows nothing of
the threads that XLA would run several decompositions on at once.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from svb_jax._src.dimension_numbers import DimensionNumbers
from svb_jax._src.leaves import MatrixLeaf, matrix_leaves


def host_matrices(
    params: Any, dimension_numbers: DimensionNumbers = None
) -> Iterator[tuple[MatrixLeaf, np.ndarray]]:
    """Yield every leaf that holds matrices, with these as a batch (count, reduction, output)."""
    values = jax.tree.leaves(params)
    for leaf in matrix_leaves(params, dimension_numbers):
        value = values[leaf.index]
        need = "svb_jax computes spectra on the host and needs arrays with values, got"
        if isinstance(value, Tracer):
            hint = "call it outside jit, on the parameters that a step returns"
            raise TypeError(f"{need} a traced {leaf.label!r}: {hint}.")
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(f"{need} only the shape of {leaf.label!r}.")
        # NumPy from here on: it keeps float64, and merges axes however they are sharded.
        yield leaf, leaf.to_matrices(np.asarray(value).astype(np.float64))


def host_spectra(matrices: Any) -> np.ndarray:
    """Return the singular values of matrices (..., m, n), NaN where a matrix is not finite."""
    matrices = np.asarray(matrices)
    precise = matrices.astype(np.result_type(matrices, np.float64), copy=False)
    values = np.full((*precise.shape[:-2], min(precise.shape[-2:])), np.nan)
    # Only finite matrices: if one does not converge, NumPy raises for the whole batch.
    finite = np.isfinite(precise).all((-2, -1))
    values[finite] = np.linalg.svd(precise[finite], compute_uv=False)
    return values
