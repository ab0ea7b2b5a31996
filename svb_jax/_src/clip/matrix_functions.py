r"""What every route computes with, up to orthogonal factors, inverse roots and projectors by products alone.

These are limits of cubics applied to the singular values. Among the odd cubics, the one that maps an
interval [l, u] nearest to 1 is known in closed form (Grishina et al. 2025, arXiv:2506.10935):

.. math::
  p(x) = \beta \left(\tfrac32 \alpha x - \tfrac12 \alpha^3 x^3\right), \quad
  \alpha^2 = \frac{3}{u^2 + lu + l^2}, \quad \beta = \frac{4}{2 + lu(l + u)\alpha^3},

and maps it onto [2 − β, β]. So all intervals, and the number of steps, follow from the first interval alone.
A value below l keeps its sign and grows with every step, up to 2.5 times in proportion to the largest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

# A step takes the largest values to the new interval's lower end. Further down than this share of the upper
# end they would drown in rounding errors, so longer intervals get the polynomial of this one.
SHORTEST_SHARE = 0.1
# Rows and columns that a TPU multiplies at once.
TILE = 128


def matmul(a: jax.Array, b: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST) -> jax.Array:
    """Multiply two batches of matrices.

    At the default precision of accelerators (bfloat16, TF32) a product misses narrow bands altogether.
    """
    return jnp.matmul(a, b, precision=precision)


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the type to compute in: half types go through float32."""
    # Not by promotion, which is an error between these types where a user made it strict.
    return jnp.dtype(jnp.float32 if jnp.dtype(dtype).itemsize < 4 else dtype)


def replicate(array: jax.Array) -> jax.Array:
    """Return an array whole on every device, where its type says how it lies (explicit sharding).

    Reading a kernel as a matrix merges axes, which the types of sharded arrays do not allow.
    """
    sharding = jax.typeof(array).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(array, whole) if any(sharding.spec) else array


def shard_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array laid out over the devices as the type of ``like`` says."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(array, sharding) if any(sharding.spec) else array


def transpose(matrices: jax.Array) -> jax.Array:
    """Return every matrix of a batch transposed."""
    return jnp.swapaxes(matrices, -2, -1)


def is_tall(matrices: jax.Array) -> bool:
    """Return whether the matrices have at least as many rows as columns."""
    return matrices.shape[-2] >= matrices.shape[-1]


def eye_like(matrices: jax.Array) -> jax.Array:
    """Return the identity, or what is nearest to it, of the matrices' size: one for all of a batch."""
    eye = jnp.eye(*matrices.shape[-2:], dtype=matrices.dtype)
    return jnp.expand_dims(eye, range(matrices.ndim - 2))


def symmetric(matrices: jax.Array) -> jax.Array:
    """Return the symmetric parts of a batch of square matrices."""
    return (matrices + transpose(matrices)) / 2


def times(matrices: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiply each matrix of a batch, or one matrix, by a number for each."""
    return matrices * factors[:, None, None]


def frobenius_norm(matrices: jax.Array) -> jax.Array:
    """Return the Frobenius norm of each matrix of a batch."""
    return jnp.sqrt(jnp.sum(matrices * matrices, axis=(1, 2)))


def leading_power(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return vectors close to the leading eigenvectors, and a bound of the leading eigenvalues.

    The Frobenius norm of x⁸ bounds the eighth power of the leading eigenvalue, and is at most √m times as
    large. As no more than a few digits are needed, low precision will do.
    """
    norm = frobenius_norm(x)
    norm = jnp.where(norm > 0, norm, 1)

    def square(_: jax.Array, power: jax.Array) -> jax.Array:
        return matmul(power, power, lax.Precision.DEFAULT)

    power = lax.fori_loop(0, 3, square, times(x, 1 / norm))
    bound = frobenius_norm(power)
    # The column of the largest diagonal entry has its fair part of the leading eigenvector at least.
    diagonal = jnp.diagonal(power, axis1=1, axis2=2)
    is_largest = jnp.argmax(diagonal, axis=1)[:, None] == jnp.arange(x.shape[-1])[None]
    start = jnp.where(is_largest, diagonal, 0)
    bound = jnp.where(bound > 0, bound, 1)

    def multiply(_: jax.Array, vectors: jax.Array) -> jax.Array:
        product = jnp.einsum("bij,bj->bi", power, vectors, precision=lax.Precision.DEFAULT)
        return product / bound[:, None]

    vectors = lax.fori_loop(0, 4, multiply, start)
    return vectors, norm * bound ** (1 / 8)


def rayleigh_quotient(x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return an eigenvalue's estimate for each symmetric matrix, from its vector; not below 0."""
    norm = jnp.sum(vectors * vectors, axis=1)
    # Summed over rows, which is the faster axis on TPU.
    product = jnp.sum(x * vectors[:, :, None], axis=1)
    value = jnp.sum(vectors * product, axis=1)
    return jnp.maximum(value, 0) / jnp.where(norm > 0, norm, 1)


def nearest_to_one(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return a and b of the cubic a x + b x³ for intervals, and the intervals it maps them into.

    What is at 1 stays as it is, so that no matrix depends on how many steps the others of its batch take.
    """
    end = jnp.maximum(low, SHORTEST_SHARE * high)
    alpha = jnp.sqrt(3 / (high * high + end * high + end * end))
    beta = 4 / (2 + end * high * (end + high) * alpha**3)
    is_done = is_at_one(low)
    a, b = jnp.where(is_done, 1, 1.5 * alpha * beta), jnp.where(is_done, 0, -0.5 * alpha**3 * beta)
    # Not 2 - beta, which would cancel where the interval is long.
    return a, b, low * (a + b * low * low), jnp.where(is_done, high, beta)


def is_at_one(low: jax.Array) -> jax.Array:
    """Return for each matrix whether all its values are 1 to rounding errors, from the smallest of them."""
    # In this form NaN counts as done: a loop that waits for it would never end.
    return ~(low < 1 - 8 * jnp.finfo(low.dtype).eps)


def polynomial(gram: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a I + b K of Gram matrices K."""
    result = times(eye_like(gram), a) + times(gram, b)
    # Kept apart from the product that takes it: computed there, anew for every tile, it would double that
    # product's code and its time to compile on TPU. Matrices of one tile would pay for one more kernel.
    return result if gram.shape[-1] <= TILE else lax.optimization_barrier(result)


def orthogonal_factor(matrices: jax.Array, least: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return U Vᵀ of square matrices U Σ Vᵀ: of symmetric ones, their matrix sign.

    Each step takes two products, X ← X (a I + b XᵀX). Their number follows from ``least`` alone.

    Args:
      matrices: A batch of matrices, of singular values up to 1.
      least: For each, the smallest singular value to be taken to 1. Smaller ones end between 0 and 1.

    Returns:
      The factors, and their Gram matrices before the last step.
    """

    def is_running(state: tuple[jax.Array, ...]) -> jax.Array:
        return ~jnp.all(is_at_one(state[2]))

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _, low, high = state
        a, b, low, high = nearest_to_one(low, high)
        gram = matmul(transpose(x), x)
        return matmul(x, polynomial(gram, a, b)), gram, low, high

    # No Gram matrix is needed before the first step, and the matrices are at hand.
    state = matrices, matrices, least, jnp.ones_like(least)
    with jax.named_scope("orthogonal_factor"):
        x, gram, _, _ = lax.while_loop(is_running, step, state)
    return x, gram


class InverseRoot(NamedTuple):
    """An approximation of K^(-1/2), and the interval that the roots of K's eigenvalues are in after it.

    Attributes:
      root: (b, m, m), R, symmetric.
      residual: (b,), ‖K − I‖ before the last step. Where small, R's error is about its square.
      low: (b,), the interval's lower end.
      high: (b,), the interval's upper end.
    """

    root: jax.Array
    residual: jax.Array
    low: jax.Array
    high: jax.Array


def inverse_root(gram: jax.Array, low: jax.Array, high: jax.Array, max_steps: jax.Array) -> InverseRoot:
    """Return the inverse roots of Gram matrices, or something on the way to them.

    Each step is K = Rᵀ G R, p = a I + b K and R ← R p, three products. The first takes none. K from R itself,
    instead of K ← p K p, corrects the rounding errors of the steps before.

    Args:
      gram: A batch of Gram matrices G.
      low: (b,), the lower end of an interval that the roots of their eigenvalues are in.
      high: (b,), its upper end.
      max_steps: How many steps to take at most; fewer if they are enough for those intervals.
    """

    def next_factor(k: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        a, b, low, high = nearest_to_one(low, high)
        return polynomial(k, a, b), low, high

    def is_running(state: tuple[jax.Array, ...]) -> jax.Array:
        return (state[0] < max_steps) & ~jnp.all(is_at_one(state[3]))

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        num_steps, _, root, low, high = state
        k = matmul(transpose(root), matmul(gram, root))
        p, low, high = next_factor(k, low, high)
        return num_steps + 1, k, matmul(root, p), low, high

    root, low, high = next_factor(gram, low, high)
    state = jnp.ones_like(max_steps), gram, root, low, high
    with jax.named_scope("inverse_root"):
        _, k, root, low, high = lax.while_loop(is_running, step, state)
    return InverseRoot(symmetric(root), frobenius_norm(k - eye_like(k)), low, high)


def sign_units(lower: jax.Array, upper: jax.Array, bound: jax.Array) -> tuple[jax.Array, ...]:
    """Return the units in which X and |X| − r have eigenvalues up to 1, and how far their signs are resolved.

    These are the centre of the band; what X is divided by, and the radius of the band over it; what |X| − r
    is divided by then; and the smallest eigenvalue of each to be taken to 1.
    """
    centre, eps = (lower + upper) / 2, jnp.finfo(bound.dtype).eps
    size = jnp.maximum(centre, bound - centre)
    radius = (upper - lower) / 2 / size
    # Unresolved values stay outside by an eighth of this at most: 20 eps of the end of the band.
    least = jnp.maximum(160 * eps * jnp.where(lower > 0, lower, upper) / size, eps)
    reach = jnp.maximum(radius, 1 - radius)
    return centre, size, radius, reach, jnp.maximum(radius, least), least / reach


def outside_projector(
    small: jax.Array, root: jax.Array, lower: jax.Array, upper: jax.Array, bound: jax.Array
) -> tuple[jax.Array, ...]:
    """Return H, sign(X) of X = H − cI, the projector P onto H's eigenvalues outside a band, and P's rank.

    With c the centre of the band, sign(X) tells the side of each eigenvalue: it is valid outside the band.

    Args:
      small: A batch of symmetric matrices.
      root: By what to multiply them to have H, of eigenvalues from 0 to ``bound``.
      lower: The lower ends of the bands.
      upper: The upper ends.
      bound: The largest eigenvalue at most.
    """
    centre, size, radius, reach, first, second = sign_units(lower, upper, bound)
    eye = eye_like(small)

    def take_sign(stage: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, right, h, _ = state
        is_first = stage == 0
        product = matmul(left, right)
        shifted = product - times(eye, jnp.where(is_first, centre, radius))
        x = times(shifted, 1 / jnp.where(is_first, size, reach))
        sign, square = orthogonal_factor(x, jnp.where(is_first, first, second))
        return sign, jnp.where(is_first, x, left), jnp.where(is_first, product, h), square

    # The sign of X, from H, then that of |X| − r, from sign(X) X. In a loop: compilers would take twice as
    # long over two.
    sign, side, h, square = lax.fori_loop(0, 2, take_sign, (small, root, small, small))
    # Of a sign s, (s³ + s⁴) / 2 is 1 for 1, and 0 for -1 and for what is small: unresolved.
    rank = jnp.sum((sign + square) * square, axis=(1, 2)) / 2
    return h, side, (eye + sign) / 2, jnp.round(rank).astype(jnp.int32)
