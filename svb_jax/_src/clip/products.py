r"""Clip the singular values of a batch of equal matrices with matrix products alone.

Accelerators multiply matrices fast, and decompose them slowly. A tall W = O H has an orthonormal factor O and
a symmetric one, H, whose eigenvalues are the singular values of W. Clipping these to [a, b] is

.. math::
  W' = W + O P (T - H), \quad
  P = \tfrac12 \left(I + \operatorname{sign}(|X| - rI)\right), \quad
  T = cI + r \operatorname{sign}(X), \quad X = H - cI,

with the centre c and the radius r of the band: P projects onto the singular values outside the band, and T
holds the end of the band that each belongs to. A value close to an end of the band needs no resolved sign,
since T − H vanishes there: it ends outside the band by at most an eighth of the resolution.

Both factors come from the Gram matrix G = WᵀW alone: with R = G^(-1/2), O = W R and H = G R.
Rounding errors of G weigh by the square of the condition number; ‖K − I‖ of :func:`inverse_root` certifies
that it was moderate. Otherwise O comes from W itself, by passes X ← X K^(-1/2) with K = XᵀX and only the
first steps to the root in each, and H = OᵀW.

A little noise lets directions in which W vanishes take part; where they end all are equally near. Another
round clips what rounding errors of huge singular values left outside, or finds that nothing is left.

All of it is one loop of passes with two products of tall matrices each, XᵀW or XᵀX and X M: compilers take
longer over each product than devices. The first pass is the last where all matrices are well-conditioned.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.clip.batched import nothing_seen
from svb_jax._src.clip.matrix_functions import (
    InverseRoot,
    eye_like,
    frobenius_norm,
    inverse_root,
    is_at_one,
    leading_power,
    matmul,
    orthogonal_factor,
    rayleigh_quotient,
    symmetric,
    times,
    transpose,
)
from svb_jax._src.stats import Clipped

# Up to this condition number, Gram matrices in float32 leave errors of 3e-6 at the lower end of the band.
CONDITION_NUMBER = 10.0
# How far K may be from the identity before the last step, which squares it.
CERTIFIED_RESIDUAL = 2e-3
# Whose squares and powers are in float32's range.
LARGEST_GRAM, SMALLEST_GRAM = 1e14, 1e-14
# Of K in a pass, before two steps that square it.
FACTOR_RESIDUAL = 1e-2
STEPS_A_PASS = 2
# A round takes values 1e6 times too large into the band, and the worst matrix about 40 passes to its factor.
MAX_PASSES = 500

# What a pass is for: to clip by the Gram matrix; to come nearer to the orthogonal factor; to clip by it.
GRAM, APPROACH, FACTOR, DONE = range(4)


class State(NamedTuple):
    """What a pass hands to the next.

    Attributes:
      purpose: (), GRAM, APPROACH, FACTOR or DONE.
      num_passes: (), so far.
      iterate: (b, n, m), X: the matrices, in units that keep their squares in range, or nearly their factor.
      root_unit: (b,), the square root of those units: divided by its square, which itself may overflow.
      low: (b,), the lower end of the interval that X's singular values are in, on the way to the factor.
      high: (b,), its upper end.
      clipped: the matrices and what was seen of them; ``is_missed`` are those yet to be clipped.
    """

    purpose: jax.Array
    num_passes: jax.Array
    iterate: jax.Array
    root_unit: jax.Array
    low: jax.Array
    high: jax.Array
    clipped: Clipped


class Spectrum(NamedTuple):
    """The small matrices of a pass, G, K or H.

    Attributes:
      matrices: (b, m, m), symmetric.
      bound: (b,), no smaller than their leading eigenvalue.
      largest: (b,), their leading eigenvalue, estimated from below.
      root: of G and of K over ``bound``.
    """

    matrices: jax.Array
    bound: jax.Array
    largest: jax.Array
    root: InverseRoot


def clip_by_products(
    matrices: jax.Array, lower: jax.Array, upper: jax.Array, num_rows: ArrayLike | None = None
) -> Clipped:
    """Clip the singular values of finite, tall matrices of any rank and size, each to a band of its own.

    Args:
      matrices: (b, m, n) with m ≥ n, in float32 or float64.
      lower: (b,), the lower ends of the bands.
      upper: (b,), the upper ends.
      num_rows: (b,), how many rows of each matrix are its own, above rows of zeros; all if not given.

    Returns:
      The clipped matrices and what was seen of them. The extreme singular values are Rayleigh quotients,
      inside the true ones: to about 2 %; the smallest to 2 % of the largest where ``is_exact``.
    """

    def is_running(state: State) -> jax.Array:
        return (state.purpose != DONE) & (state.num_passes < MAX_PASSES)

    # Noise in the padding would let vanished directions end there.
    rows = jnp.arange(matrices.shape[1])[None]
    is_own = None if num_rows is None else rows < jnp.asarray(num_rows)[:, None]

    def run_pass(state: State) -> State:
        return _run_pass(state, lower, upper, is_own)

    with jax.named_scope("passes"):
        return lax.while_loop(is_running, run_pass, _start(matrices)).clipped


def _start(matrices: jax.Array) -> State:
    seen = nothing_seen(matrices)
    zero, zeros = jnp.sum(seen.num_clipped, dtype=jnp.int32), seen.smallest
    clipped = seen._replace(is_missed=~seen.is_missed)
    return State(zero + GRAM, zero, matrices, zeros + 1, zeros, zeros, clipped)


def _normalise(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return matrices of entries up to 1, and the square root of their unit."""
    largest_entry = jnp.max(jnp.abs(matrices), axis=(1, 2))
    root_unit = jnp.sqrt(jnp.maximum(largest_entry, jnp.finfo(matrices.dtype).tiny))
    return _in_units(matrices, root_unit[:, None, None]), root_unit


def _in_units(values: jax.Array, root_unit: jax.Array) -> jax.Array:
    # In two factors, and no division: XLA would join two of them, and the unit's inverse may overflow.
    return values * (1 / root_unit) * (1 / root_unit)


def _out_of_units(values: jax.Array, root_unit: jax.Array) -> jax.Array:
    limit = jnp.finfo(values.dtype).max
    return jnp.clip(values * root_unit * root_unit, -limit, limit)


def _run_pass(state: State, lower: jax.Array, upper: jax.Array, is_own: jax.Array | None) -> State:
    x, is_approach = state.iterate, state.purpose == APPROACH
    scaled = _in_units(state.clipped.matrices, state.root_unit[:, None, None])
    gram = symmetric(matmul(transpose(x), jnp.where(state.purpose == FACTOR, scaled, x)))
    # Squares of huge matrices in their own units, which count as uncertain.
    gram = jnp.clip(jnp.where(jnp.isnan(gram), 0, gram), -10 * LARGEST_GRAM, 10 * LARGEST_GRAM)
    spectrum = _take_roots(gram, state)
    small = state._replace(iterate=lower, clipped=state.clipped._replace(matrices=lower))
    with jax.named_scope("approach"):
        right, small = lax.cond(
            is_approach,
            lambda: (spectrum.root.root, _approach(small, spectrum)),
            lambda: _clip(small, spectrum, lower, upper),
        )
    moved = matmul(x, right)
    # Uncertain matrices wait for their factor: a wrong step by the Gram matrix could not be taken back.
    is_certain = (state.purpose == FACTOR) | ~small.clipped.is_missed
    is_clipped = (state.clipped.is_missed & is_certain & ~is_approach)[:, None, None]
    moves = jnp.where(is_clipped, _out_of_units(moved, state.root_unit[:, None, None]), 0)
    matrices = state.clipped.matrices + moves
    state = small._replace(iterate=moved, clipped=small.clipped._replace(matrices=matrices))
    is_renewed = ~is_approach & (state.purpose != DONE)
    with jax.named_scope("renewal"):
        return lax.cond(is_renewed, lambda state: _renew_iterate(state, is_own), lambda state: state, state)


def _take_roots(gram: jax.Array, state: State) -> Spectrum:
    is_approach = state.purpose == APPROACH
    vectors, bound = leading_power(gram)
    # The margin is for rounding errors of low precision.
    bound = jnp.where(is_approach, 1, 1.02 * bound)
    root = inverse_root(
        times(gram, 1 / bound),
        low=jnp.where(is_approach, state.low, 1 / CONDITION_NUMBER),
        high=jnp.where(is_approach, state.high, 1),
        max_steps=jnp.where(state.purpose == GRAM, 100, jnp.where(is_approach, STEPS_A_PASS, 1)),
    )
    return Spectrum(gram, bound, rayleigh_quotient(gram, vectors), root)


def _approach(state: State, spectrum: Spectrum) -> State:
    """Return the interval of X's singular values after a pass nearer to the factor, and what comes next."""
    residual = frobenius_norm(spectrum.matrices - eye_like(spectrum.matrices))
    # Only the last steps leave values alone that are 1 already.
    is_late = state.low > 0.9
    is_near = is_late & (residual < FACTOR_RESIDUAL) | ~state.clipped.is_missed
    # Where values are still small that should all be 1, they were smaller than the first interval: once more.
    is_again = ~is_near & is_at_one(state.low)
    return state._replace(
        purpose=jnp.where(jnp.all(is_near), FACTOR, APPROACH).astype(jnp.int32),
        num_passes=state.num_passes + 1,
        low=jnp.where(is_again, _least(residual.dtype), spectrum.root.low),
        high=jnp.where(is_again, 1, spectrum.root.high),
    )


def _least(dtype: jnp.dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 100


def _renew_iterate(state: State, is_own: jax.Array | None) -> State:
    """Start anew from the matrices: as they are for their Gram matrix, with some noise for their factor."""
    iterate, root_unit = _normalise(state.clipped.matrices)
    norm = frobenius_norm(iterate)
    eps = jnp.finfo(norm.dtype).eps
    noise = eps * _noise(iterate.shape[1:], iterate.dtype)[None]
    noise = noise if is_own is None else jnp.where(is_own[:, :, None], noise, 0)
    noisy = times(iterate, 1 / jnp.where(norm > 0, norm, 1)) + noise
    iterate = jnp.where(state.purpose == APPROACH, noisy, iterate)
    return state._replace(iterate=iterate, root_unit=root_unit)


def _clip(state: State, spectrum: Spectrum, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, State]:
    """Return by what to multiply X, P (T R − I) or P (T − H), what was seen and what comes next."""
    is_gram, small, bound = state.purpose == GRAM, spectrum.matrices, spectrum.bound
    eye, eps = eye_like(small), jnp.finfo(small.dtype).eps

    def of_root(values: jax.Array) -> jax.Array:
        return jnp.where(is_gram, jnp.sqrt(values), values)

    bound, largest = of_root(spectrum.bound), of_root(spectrum.largest)
    root = jnp.where(is_gram, times(spectrum.root.root, 1 / bound), eye)
    h = jnp.where(is_gram, symmetric(matmul(small, root)), small)
    unit = state.root_unit
    # No larger than makes a difference, so that no digits are lost to them.
    lower = jnp.minimum(_in_units(lower, unit), 2.0**60)
    upper = jnp.minimum(_in_units(upper, unit), jnp.maximum(lower, 1.1 * bound))
    side, outside, num_outside = _outside(h, lower, upper, bound)
    ends = times(eye, (upper + lower) / 2) + times(side, (upper - lower) / 2)
    # Not R P (T − H), which would multiply the rounding errors of large H.
    right = symmetric(matmul(outside, matmul(ends, root) - jnp.where(is_gram, eye, h)))

    is_uncertain = (spectrum.root.residual > CERTIFIED_RESIDUAL) | (bound > 8 * upper) | (lower > 2 * bound)
    is_uncertain |= (spectrum.bound > LARGEST_GRAM) | (spectrum.bound < SMALLEST_GRAM)
    tolerance = 16 * eps * small.shape[-1] ** 0.5 * jnp.maximum(bound, lower)
    is_missed = jnp.where(is_gram, is_uncertain, frobenius_norm(right) > tolerance)
    filtered = jnp.where(is_gram, root, eye - times(h, 1 / bound))
    smallest = rayleigh_quotient(h, leading_power(filtered)[0])
    seen = state.clipped
    is_first = jnp.where(is_gram, state.num_passes == 0, seen.is_missed & ~seen.is_exact)
    is_missed &= seen.is_missed
    seen = seen._replace(
        smallest=jnp.where(is_first, _out_of_units(smallest, unit), seen.smallest),
        largest=jnp.where(is_first, _out_of_units(largest, unit), seen.largest),
        num_clipped=jnp.where(is_first, num_outside, seen.num_clipped),
        is_exact=seen.is_exact | (seen.is_missed & ~is_gram),
        is_missed=is_missed,
    )
    return right, state._replace(
        purpose=jnp.where(jnp.any(is_missed), jnp.where(is_gram, APPROACH, GRAM), DONE).astype(jnp.int32),
        num_passes=state.num_passes + 1,
        low=jnp.full_like(state.low, _least(small.dtype)),
        high=jnp.ones_like(state.high),
        clipped=seen,
    )


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


def _outside(
    x: jax.Array, lower: jax.Array, upper: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return on which side of a band's centre eigenvalues are, valid outside the band; P; and P's rank.

    Args:
      x: a batch of symmetric matrices of eigenvalues from 0 to ``bound``.
      lower: the lower ends of the bands.
      upper: the upper ends.
      bound: the largest eigenvalue at most.
    """
    centre, size, radius, reach, first, second = sign_units(lower, upper, bound)
    eye = eye_like(x)
    x = times(x - times(eye, centre), 1 / size)

    def take_sign(stage: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        distance, resolved, _, last, _ = state
        sign, square = orthogonal_factor(distance, resolved)
        distance = matmul(sign, x) - times(eye, radius)
        return times(distance, 1 / reach), second, last, sign, square

    # The sign of X, then that of |X| - r: a loop, since a compiler would take as long again over the second.
    _, _, side, sign, square = lax.fori_loop(0, 2, take_sign, (x, first, x, x, x))
    # Of a sign s, (s³ + s⁴) / 2 is 1 for 1, and 0 for -1 and for what is small: unresolved.
    rank = jnp.sum((sign + square) * square, axis=(1, 2)) / 2
    return side, (eye + sign) / 2, jnp.round(rank).astype(jnp.int32)


def _noise(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return a matrix of noise, of norm about 1."""
    row = lax.broadcasted_iota(dtype, shape, 0)
    column = lax.broadcasted_iota(dtype, shape, 1)
    hashed = jnp.sin(12.9898 * row + 78.233 * column) * 43758.5453
    return (hashed - jnp.floor(hashed) - 0.5) * (3 / (shape[0] ** 0.5 + shape[1] ** 0.5))
