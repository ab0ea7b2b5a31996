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
that R is one, and estimates of the extreme singular values that they were few. Otherwise O comes from W
itself, by passes X ← X K^(-1/2) with K = XᵀX and only the first steps to the root in each, and H = OᵀW.

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

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import Rows, nothing_seen
from svb_jax._src.clip.matrix_functions import (
    InverseRoot,
    eye_like,
    frobenius_norm,
    inverse_root,
    is_at_one,
    leading_power,
    matmul,
    outside_projector,
    rayleigh_quotient,
    symmetric,
    times,
    transpose,
)
from svb_jax._src.stats import Clipped

# Up to this condition number, Gram matrices in float32 leave errors of 4e-6 at the lower end of the band.
CONDITION_NUMBER = 5.5
# For how large a one the steps to the inverse root would do: with fewer, ‖K − I‖ of wide matrices would not
# be small before the last.
ROOT_CONDITION_NUMBER = 10.0
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
      clipped: The matrices and what was seen of them; ``is_missed`` are those yet to be clipped.
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
      root: Of G and of K over ``bound``.
    """

    matrices: jax.Array
    bound: jax.Array
    largest: jax.Array
    root: InverseRoot


def clip_by_products(
    batch: Batch, num_rows: ArrayLike | None = None, axis_names: tuple[str, ...] = ()
) -> Clipped:
    """Clip the singular values of tall matrices of any rank and size, but for inactive and non-finite ones.

    Args:
      batch: The matrices (b, m, n) with m ≥ n, and their bands.
      num_rows: (b,) or for all, how many rows of a matrix are its own, above rows of zeros; all if not given.
      axis_names: Of a surrounding ``shard_map``, the axes that split the rows of each matrix.

    Returns:
      The clipped matrices and what was seen of them. The extreme singular values are Rayleigh quotients,
      inside the true ones: to about 2 %; the smallest to 2 % of the largest where ``is_exact``.
    """

    def is_running(state: State) -> jax.Array:
        return (state.purpose != DONE) & (state.num_passes < MAX_PASSES)

    rows = Rows(batch.matrices.shape[1] if num_rows is None else num_rows, axis_names)
    # Any band will do for what is left alone, if only it is one.
    lower, upper = (jnp.where(batch.is_active, end, 1) for end in (batch.lower, batch.upper))

    def run_pass(state: State) -> State:
        return _run_pass(state, lower, upper, rows)

    with jax.named_scope("passes"):
        return lax.while_loop(is_running, run_pass, _start(batch)).clipped


def _start(batch: Batch) -> State:
    seen = nothing_seen(batch.matrices)
    zero, zeros = jnp.sum(seen.num_clipped, dtype=jnp.int32), seen.smallest
    # Joined with what is false, for the matrices' varying-axes type, as shard_map requires.
    is_active = batch.is_active | seen.is_missed
    clipped = seen._replace(is_missed=is_active, is_skipped=~is_active)
    return State(zero + GRAM, zero, batch.matrices, zeros + 1, zeros, zeros, clipped)


def _in_units(values: jax.Array, root_unit: jax.Array) -> jax.Array:
    # In two factors, and no division: XLA would join two of them, and the unit's inverse may overflow.
    return values * (1 / root_unit) * (1 / root_unit)


def _out_of_units(values: jax.Array, root_unit: jax.Array) -> jax.Array:
    limit = jnp.finfo(values.dtype).max
    return jnp.clip(values * root_unit * root_unit, -limit, limit)


def _run_pass(state: State, lower: jax.Array, upper: jax.Array, rows: Rows) -> State:
    x, is_approach = state.iterate, state.purpose == APPROACH
    scaled = _in_units(state.clipped.matrices, state.root_unit[:, None, None])
    gram = symmetric(rows.sum(matmul(transpose(x), jnp.where(state.purpose == FACTOR, scaled, x))))
    # Squares of huge matrices in their own units, or of non-finite ones, which count as uncertain.
    gram = jnp.clip(jnp.where(jnp.isnan(gram), 0, gram), -10 * LARGEST_GRAM, 10 * LARGEST_GRAM)
    # What is not to be clipped must not send its batch on a longer way.
    gram = jnp.where(state.clipped.is_missed[:, None, None], gram, eye_like(gram))
    spectrum = _take_roots(gram, state)
    # Without the tall matrices, which the conditional would copy.
    light = state._replace(iterate=lower, clipped=state.clipped._replace(matrices=lower))
    with jax.named_scope("approach"):
        right, light = lax.cond(
            is_approach,
            lambda: (spectrum.root.root, _approach(light, spectrum)),
            lambda: _clip(light, spectrum, lower, upper),
        )
    moved = matmul(x, right)
    # Uncertain matrices wait for their factor: a wrong step by the Gram matrix could not be taken back.
    is_certain = (state.purpose == FACTOR) | ~light.clipped.is_missed
    is_clipped = (state.clipped.is_missed & is_certain & ~is_approach)[:, None, None]
    moves = jnp.where(is_clipped, _out_of_units(moved, state.root_unit[:, None, None]), 0)
    matrices = state.clipped.matrices + moves
    state = light._replace(iterate=moved, clipped=light.clipped._replace(matrices=matrices))
    is_renewed = ~is_approach & (state.purpose != DONE)
    with jax.named_scope("renewal"):
        return lax.cond(is_renewed, lambda state: _renew_iterate(state, rows), lambda state: state, state)


def _take_roots(gram: jax.Array, state: State) -> Spectrum:
    is_approach = state.purpose == APPROACH
    vectors, bound = leading_power(gram)
    # The margin is for rounding errors of low precision.
    bound = jnp.where(is_approach, 1, 1.02 * bound)
    root = inverse_root(
        times(gram, 1 / bound),
        low=jnp.where(is_approach, state.low, 1 / ROOT_CONDITION_NUMBER),
        high=jnp.where(is_approach, state.high, 1),
        max_steps=jnp.where(state.purpose == GRAM, 100, jnp.where(is_approach, STEPS_A_PASS, 1)),
    )
    return Spectrum(gram, bound, rayleigh_quotient(gram, vectors), root)


def _approach(state: State, spectrum: Spectrum) -> State:
    """Return the interval of X's singular values after a pass nearer to the factor, and what comes next."""
    residual = frobenius_norm(spectrum.matrices - eye_like(spectrum.matrices))
    # Only the last steps, of short intervals, leave values alone that are 1 already.
    is_near = (state.low > 0.9) & (residual < FACTOR_RESIDUAL) | ~state.clipped.is_missed
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


def _renew_iterate(state: State, rows: Rows) -> State:
    """Start anew from the matrices: as they are for their Gram matrix, with some noise for their factor."""
    matrices = state.clipped.matrices
    # Units in which entries are at most 1.
    largest_entry = rows.max(jnp.max(jnp.abs(matrices), axis=(1, 2)))
    root_unit = jnp.sqrt(jnp.maximum(largest_entry, jnp.finfo(matrices.dtype).tiny))
    iterate = _in_units(matrices, root_unit[:, None, None])
    # Only now is it asked which are finite: matrices that a Gram matrix is good for show that they are.
    is_finite = jnp.isfinite(root_unit)
    seen = state.clipped._replace(
        is_missed=state.clipped.is_missed & is_finite, is_skipped=state.clipped.is_skipped | ~is_finite
    )
    norm = jnp.sqrt(rows.sum(jnp.sum(iterate * iterate, axis=(1, 2))))
    noise = jnp.finfo(norm.dtype).eps * rows.noise(iterate)
    noisy = times(iterate, 1 / jnp.where(norm > 0, norm, 1)) + noise
    iterate = jnp.where(state.purpose == APPROACH, noisy, iterate)
    purpose = jnp.where(jnp.any(seen.is_missed), state.purpose, DONE)
    return state._replace(purpose=purpose, iterate=iterate, root_unit=root_unit, clipped=seen)


def _clip(state: State, spectrum: Spectrum, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, State]:
    """Return by what to multiply X, P (T R − I) or P (T − H), what was seen and what comes next."""
    is_gram, small, bound = state.purpose == GRAM, spectrum.matrices, spectrum.bound
    eye, eps = eye_like(small), jnp.finfo(small.dtype).eps

    def of_root(values: jax.Array) -> jax.Array:
        return jnp.where(is_gram, jnp.sqrt(values), values)

    bound, largest = of_root(spectrum.bound), of_root(spectrum.largest)
    # H is G R, or already at hand.
    root = jnp.where(is_gram, times(spectrum.root.root, 1 / bound), eye)
    # No larger than makes a difference, so that no digits are lost to them.
    lower = jnp.minimum(_in_units(lower, state.root_unit), 2.0**60)
    upper = jnp.minimum(_in_units(upper, state.root_unit), jnp.maximum(lower, 1.1 * bound))
    h, side, outside, num_outside = outside_projector(small, root, lower, upper, bound)
    ends = times(eye, (upper + lower) / 2) + times(side, (upper - lower) / 2)
    # Not R P (T − H), which would multiply the rounding errors of large H.
    right = symmetric(matmul(outside, matmul(ends, root) - jnp.where(is_gram, eye, h)))

    is_uncertain = (spectrum.root.residual > CERTIFIED_RESIDUAL) | (bound > 8 * upper) | (lower > 2 * bound)
    is_uncertain |= (spectrum.bound > LARGEST_GRAM) | (spectrum.bound < SMALLEST_GRAM)
    filtered = jnp.where(is_gram, root, eye - times(h, 1 / bound))
    smallest = rayleigh_quotient(h, leading_power(filtered)[0])
    is_uncertain |= largest > CONDITION_NUMBER * smallest
    tolerance = 16 * eps * small.shape[-1] ** 0.5 * jnp.maximum(bound, lower)
    is_missed = jnp.where(is_gram, is_uncertain, frobenius_norm(right) > tolerance)
    seen = state.clipped
    is_first = jnp.where(is_gram, state.num_passes == 0, seen.is_missed & ~seen.is_exact)
    is_missed &= seen.is_missed
    seen = seen._replace(
        smallest=jnp.where(is_first, _out_of_units(smallest, state.root_unit), seen.smallest),
        largest=jnp.where(is_first, _out_of_units(largest, state.root_unit), seen.largest),
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
