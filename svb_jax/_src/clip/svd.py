"""The reference: a thin SVD, its values clipped, multiplied back. Exact for every matrix."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.matrix_functions import matmul, transpose
from svb_jax._src.clip.units import orthonormalizer, power_of_two, times_unit
from svb_jax._src.stats import Clipped

LARGEST_CONDITION_TO_CHANGE = 100.0


def clip_by_svd(matrices: jax.Array, lower: jax.Array, upper: jax.Array, padding: ArrayLike = 0) -> Clipped:
    """Clip the singular values of finite, tall matrices.

    Args:
      matrices: (..., m, n) with m ≥ n.
      lower: (...), the band's lower end.
      upper: (...), the band's upper end.
      padding: How many zero columns do not count in the statistics.
    """
    unit = power_of_two(matrices)
    u, s, vt = jnp.linalg.svd(matrices / unit[..., None, None], full_matrices=False)
    values = times_unit(s, unit[..., None])
    clipped = jnp.clip(values, lower[..., None], upper[..., None])
    num_values = values.shape[-1] - padding
    smallest = lax.dynamic_index_in_dim(values, num_values - 1, axis=-1, keepdims=False)
    # The additive form W + U(clip(S) - S)Vᵀ leaves values inside the band as they were, but has the rounding
    # errors of W and of its smallest directions: only where neither is large beside the band.
    is_change = (values[..., 0] <= 1.25 * upper) & (values[..., 0] <= LARGEST_CONDITION_TO_CHANGE * smallest)
    is_change = is_change[..., None]
    correction = clipped - jnp.where(is_change, values, 0)
    # The vectors of a float32 SVD are orthogonal to about 1e-6, which the band would show.
    inner = matmul(orthonormalizer(u) * correction[..., None, :], orthonormalizer(transpose(vt)))
    change = matmul(u, matmul(inner, vt))
    is_own = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1) < num_values
    is_outside = ((values < lower[..., None]) | (values > upper[..., None])) & is_own
    return Clipped(
        matrices=jnp.where(is_change[..., None], matrices, 0) + change,
        smallest=smallest,
        largest=values[..., 0],
        num_clipped=jnp.sum(is_outside, axis=-1, dtype=jnp.int32),
        is_exact=jnp.ones_like(unit, bool),
        is_missed=jnp.zeros_like(unit, bool),
        is_skipped=jnp.zeros_like(unit, bool),
    )
