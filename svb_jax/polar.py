"""Clipping singular values with matrix products alone.

The orthogonal factor of a matrix, msign(W) = U Vᵀ, is a limit of odd polynomials in W. With O = msign(W)
and H = W Oᵀ, which is symmetric with W's singular values for eigenvalues,

    clip(x, a, b) = (a + b + |a − x| − |b − x|) / 2

becomes products, since |X| = msign(X) X for symmetric X.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

# Odd quintics a x + b x³ + c x⁵ that take [1e-3, 1] to 1 fastest, one after another (Amsel et al. 2025,
# "The Polar Express"), before their safety factor. The last is Newton-Schulz, which then converges cubically.
POLAR_EXPRESS = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
)
NEWTON_SCHULZ = (1.875, -1.25, 0.375)
SAFETY = 1.01

# Each further step nearly doubles the smallest value that still reaches 1. The second count is larger, since
# a singular value may lie arbitrarily close to an end of the band.
MATRIX_STEPS = 14
BAND_STEPS = 20


def orthogonal_factor(matrix: jax.Array, num_steps: int) -> jax.Array:
    """Return msign of a matrix no taller than wide; directions that vanish beside the largest stay small."""
    norm = jnp.sqrt(jnp.sum(matrix * matrix, axis=(-2, -1), keepdims=True))
    x = matrix / jnp.maximum(norm, jnp.finfo(matrix.dtype).tiny)
    coefficients = jnp.asarray([_coefficients(step) for step in range(num_steps)], matrix.dtype)

    def sharpen(x: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
        square = matmul(x, jnp.swapaxes(x, -2, -1))
        return abc[0] * x + matmul(abc[1] * square + abc[2] * matmul(square, square), x), None

    # A loop, not an unrolled chain: dozens of products a shape would take long to compile.
    return lax.scan(sharpen, x, coefficients)[0]


def clip_by_polar(matrix: jax.Array, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the matrices with their singular values clipped, and how many were."""
    if matrix.shape[-2] > matrix.shape[-1]:
        clipped, num_clipped = clip_by_polar(jnp.swapaxes(matrix, -2, -1), lower, upper)
        return jnp.swapaxes(clipped, -2, -1), num_clipped
    # Scaled by its largest entry, or squares of huge and tiny matrices would leave the range of their type.
    scale = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    factor = orthogonal_factor(matrix / jnp.where(scale > 0, scale, 1), MATRIX_STEPS)
    values = matmul(matrix, jnp.swapaxes(factor, -2, -1))
    values = (values + jnp.swapaxes(values, -2, -1)) / 2
    eye = jnp.eye(matrix.shape[-2], dtype=matrix.dtype)
    below = orthogonal_factor(lower * eye - values, BAND_STEPS)
    above = orthogonal_factor(values - upper * eye, BAND_STEPS)
    lifted = matmul(below, lower * factor - matrix)
    lowered = matmul(above, matrix - upper * factor)
    clipped = ((lower + upper) * factor + lifted - lowered) / 2
    # Each value outside adds 1 to one trace and -1 to the other, each value inside -1 to both.
    outside = (jnp.trace(below + above, axis1=-2, axis2=-1) + 2 * matrix.shape[-2]) / 2
    return clipped, jnp.round(outside).astype(jnp.int32)


def _coefficients(step: int) -> tuple[float, float, float]:
    if step >= len(POLAR_EXPRESS):
        return NEWTON_SCHULZ
    a, b, c = POLAR_EXPRESS[step]
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5
