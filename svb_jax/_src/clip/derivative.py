r"""The derivative of clipping, by divided differences.

With W = U Σ Vᵀ tall, f = clip and P = Uᵀ dW V split into its symmetric part S and its antisymmetric part A,

    dF = U (Γ⁻ ∘ S + Γ⁺ ∘ A) Vᵀ + (I − U Uᵀ) dW V diag(f(σ)/σ) Vᵀ,
    Γ⁻ᵢⱼ = (f(σᵢ) − f(σⱼ)) / (σᵢ − σⱼ),    Γ⁺ᵢⱼ = (f(σᵢ) + f(σⱼ)) / (σᵢ + σⱼ).

Where two values are equal Γ⁻ is f′, which is 1 in the closed band and 0 outside. A direction that has
vanished has no derivative: the lift to the band's lower end is arbitrary there, and counts as constant.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.matrix_functions import eye_like, is_tall, matmul, transpose
from svb_jax._src.clip.units import power_of_two, times_unit
from svb_jax._src.stats import Clipped


def clip_tangent(batch: Batch, tangent: Batch) -> jax.Array:
    """Return the change of a batch's clipped matrices when matrices and bands change by ``tangent``."""
    matrices, lower, upper, is_active = batch
    is_active &= jnp.all(jnp.isfinite(matrices), axis=(1, 2))
    chosen = is_active[:, None, None]
    sound = Batch(jnp.where(chosen, matrices, eye_like(matrices)), lower, upper, is_active)
    if is_tall(matrices):
        change = _tall_tangent(sound, tangent)
    else:
        change = transpose(
            _tall_tangent(
                sound._replace(matrices=transpose(sound.matrices)),
                tangent._replace(matrices=transpose(tangent.matrices)),
            )
        )
    return jnp.where(chosen, change, tangent.matrices)


def _tall_tangent(batch: Batch, tangent: Batch) -> jax.Array:
    unit = power_of_two(batch.matrices)[:, None]
    u, s, vt = jnp.linalg.svd(batch.matrices / unit[..., None], full_matrices=False)
    values, lower, upper = times_unit(s, unit), batch.lower[:, None], batch.upper[:, None]
    clipped = jnp.clip(values, lower, upper)
    is_inside = (values >= lower) & (values <= upper)
    # Values that were clipped to an end of the band move with it.
    with_ends = jnp.where(values < lower, tangent.lower[:, None], 0)
    with_ends += jnp.where(values > upper, tangent.upper[:, None], 0)

    projected = matmul(matmul(transpose(u), tangent.matrices), transpose(vt))
    symmetric, antisymmetric = (projected + transpose(projected)) / 2, (projected - transpose(projected)) / 2
    inner = _differences(values, clipped, is_inside) * symmetric
    # The rounding error of the largest value: a value no larger than this has vanished.
    noise = jnp.finfo(values.dtype).eps * max(batch.matrices.shape[1:]) * values[:, :1]
    sums = clipped[:, :, None] + clipped[:, None, :], values[:, :, None] + values[:, None, :]
    inner += _ratio(*sums, noise[:, :, None]) * antisymmetric
    inner += with_ends[:, :, None] * eye_like(projected)
    outer = matmul(tangent.matrices, transpose(vt)) - matmul(u, projected)
    outer *= _ratio(clipped, values, noise)[:, None, :]
    return matmul(matmul(u, inner) + outer, vt)


def clipped_tangent(clipped: Clipped, change: jax.Array) -> Clipped:
    """Return a tangent in which the statistics, which are there to be looked at, do not move."""
    return Clipped(change, *(_zero_tangent(figures) for figures in clipped[1:]))


def _zero_tangent(array: jax.Array) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.zeros_like(array) if is_float else np.zeros(array.shape, dtypes.float0)


def _differences(values: jax.Array, clipped: jax.Array, is_inside: jax.Array) -> jax.Array:
    """Return Γ⁻."""
    run = values[:, :, None] - values[:, None, :]
    rise = clipped[:, :, None] - clipped[:, None, :]
    # For values closer than rounding errors the quotient is meaningless, and the limit is the slope there.
    is_equal = jnp.abs(run) <= 4 * jnp.finfo(values.dtype).eps * values[:, :1, None]
    slope = jnp.where(is_inside, 1, 0).astype(values.dtype)[:, :, None]
    return jnp.where(is_equal, slope, rise / jnp.where(is_equal, 1, run))


def _ratio(clipped: jax.Array, values: jax.Array, noise: jax.Array) -> jax.Array:
    """Return clipped / values, 0 where the values are no more than noise."""
    is_vanished = values <= noise
    return jnp.where(is_vanished, 0, clipped / jnp.where(is_vanished, 1, values))
