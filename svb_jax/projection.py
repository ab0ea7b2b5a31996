"""The nearest matrices whose singular values all lie in a band.

On CPU one matrix is decomposed at a time, each waiting for the last: jaxlib's LAPACK threads collapse, and
XLA's pool has been seen to hang, when several decompositions are in flight. There small matrices of all
shapes share a program. On accelerators equal matrices go together. ``polar``, made of products alone, does
so everywhere.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.checks import check_band, check_choice
from svb_jax.cutting import take
from svb_jax.pooling import Pool, make_pools
from svb_jax.routes import (
    ROUTES,
    Clipped,
    Decomposition,
    Method,
    Reading,
    Route,
    add_reading,
    clip_by_products,
    decompose,
    empty_reading,
    lower_square,
)

Band = tuple[ArrayLike, ArrayLike]
Together = Callable[[jax.Array, ArrayLike, ArrayLike], Clipped]
Carry = TypeVar("Carry")


def clip_singular_values(
    matrices: ArrayLike, lower: ArrayLike, upper: ArrayLike, *, method: Method = "auto"
) -> jax.Array:
    r"""Clip the singular values of every matrix to ``[lower, upper]``.

    .. math::
      U \Sigma V^\top \mapsto U \operatorname{clip}(\Sigma, \text{lower}, \text{upper}) V^\top,

    the nearest such matrix in the Frobenius norm. Half types are projected in float32 and rounded once.
    A matrix with non-finite entries comes back as it is.

    Args:
      matrices: shape ``(..., m, n)``, either side the longer.
      lower: the band's lower end, not negative.
      upper: the band's upper end, no less than ``lower``.
      method: ``svd`` is exact for every matrix. ``gram`` decomposes the product of the short side, which is
        faster and as exact up to a condition number of about 10; it leaves vanished directions alone.
        ``polar`` uses matrix products only, good up to a condition number of about 100. ``auto`` is ``gram``
        where its own eigenvalues show that it is good, and ``svd`` elsewhere.

    Returns:
      The projected matrices, in the shape and type of ``matrices``.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.clip_singular_values(jnp.diag(jnp.array([3.0, 1.0, 0.1])), 0.5, 2.0).round(4)
      Array([[2. , 0. , 0. ],
             [0. , 1. , 0. ],
             [0. , 0. , 0.5]], dtype=float32)
    """
    matrices = jnp.asarray(matrices)
    if matrices.ndim < 2 or not jnp.issubdtype(matrices.dtype, jnp.floating):
        raise ValueError(
            "clip_singular_values needs real floating-point matrices of shape (..., m, n), "
            f"got {matrices.dtype} of shape {matrices.shape}."
        )
    check_choice("clip_singular_values", "method", method, get_args(Method))
    check_band("clip_singular_values", lower, upper)
    compute = matrices.astype(jnp.promote_types(matrices.dtype, jnp.float32))
    stack = compute.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:])
    [clipped], _ = clip_stacks([stack], [(lower, upper)], method, empty_reading(jnp.zeros(())))
    return clipped.reshape(matrices.shape).astype(matrices.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Share:
    """The part of a stack that is clipped; the rest comes back as it is.

    Attributes:
      start: the first matrix.
      count: how many.
      most: the most that any caller will ask for.
    """

    start: ArrayLike
    count: ArrayLike
    most: int = field(metadata={"static": True})


def clip_stacks(
    stacks: Sequence[jax.Array],
    bands: Sequence[Band],
    method: Method,
    reading: Reading,
    shares: Sequence[Share] | None = None,
) -> tuple[list[jax.Array], Reading]:
    """Clip stacks ``(count, m, n)`` and add what was seen to ``reading``.

    Args:
      stacks: float32 or float64 matrices.
      bands: lower and upper end for each stack.
      method: the route.
      reading: of what was clipped before.
      shares: which matrices of each stack to clip, if not all.
    """
    clipped = list(stacks)
    filled = [index for index, stack in enumerate(stacks) if stack.size]
    results, reading = _clip_stacks(
        [stacks[index] for index in filled],
        [tuple(jnp.asarray(end, stacks[index].dtype) for end in bands[index]) for index in filled],
        [None if shares is None else shares[index] for index in filled],
        reading,
        method=method,
    )
    for index, result in zip(filled, results, strict=True):
        clipped[index] = result
    return clipped, reading


# Compiled once for the same shapes, so that calls outside any jit are fast from the second on.
@functools.partial(jax.jit, static_argnames="method")
def _clip_stacks(
    stacks: list[jax.Array],
    bands: list[Band],
    shares: list[Share | None],
    reading: Reading,
    *,
    method: Method,
) -> tuple[list[jax.Array], Reading]:
    if method == "polar":
        return _clip_together(clip_by_products, stacks, bands, shares, reading)
    in_turn = functools.partial(_clip_in_turn, ROUTES[method])
    together = functools.partial(_clip_together, ROUTES[method])
    return lax.platform_dependent(stacks, bands, shares, reading, cpu=in_turn, default=together)


def _clip_in_turn(
    route: Route, stacks: list[jax.Array], bands: list[Band], shares: list[Share | None], reading: Reading
) -> tuple[list[jax.Array], Reading]:
    clipped = list(stacks)
    pools = make_pools(stacks)
    large = sorted({*range(len(stacks))}.difference(*(pool.members for pool in pools)))
    decomposed: Sequence[Decomposition | None] = [None] * len(large)
    if route.is_by_square:
        decomposed, reading = decompose_in_turn(
            [stacks[index] for index in large], [shares[index] for index in large], reading
        )
    for index, gram in zip(large, decomposed, strict=True):
        # The smallest part on which all work of the route waits for the stack before.
        if gram is None:
            stack = _after(reading, stacks[index])
        else:
            stack, gram = stacks[index], gram._replace(eigenvalues=_after(reading, gram.eigenvalues))
        done = _clip_one_by_one(route, Clipped(stack, reading), bands[index], gram, shares[index])
        clipped[index], reading = done
    for pool in pools:
        results, reading = _clip_pool(route, pool, stacks, bands, shares, reading)
        for member, result in zip(pool.members, results, strict=True):
            clipped[member] = result
    return clipped, reading


def _clip_one_by_one(
    route: Route, stack: Clipped, band: Band, decomposed: Decomposition | None, share: Share | None
) -> Clipped:
    def clip_next(index: ArrayLike, done: Clipped) -> Clipped:
        gram = jax.tree.map(lambda of_stack: take(of_stack, index), decomposed)
        matrix, seen = route.clip(take(done.matrix, index), gram, *band, padding=0)
        return Clipped(_put(done.matrix, matrix, index), add_reading(done.reading, seen))

    return _in_turn(clip_next, stack, len(stack.matrix), share)


def _clip_pool(
    route: Route,
    pool: Pool,
    stacks: list[jax.Array],
    bands: list[Band],
    shares: list[Share | None],
    reading: Reading,
) -> tuple[list[jax.Array], Reading]:
    members = [(stacks[index], bands[index], shares[index]) for index in pool.members]
    lower, upper = (
        jnp.concatenate([jnp.full(len(stack), band[end]) for stack, band, _ in members]) for end in (0, 1)
    )
    order, count = None, pool.count
    if shares[pool.members[0]] is not None:
        is_mine = jnp.concatenate([_is_mine(len(stack), share) for stack, _, share in members])
        order, count = jnp.argsort(~is_mine), jnp.sum(is_mine)

    def clip_next(turn: ArrayLike, done: Clipped) -> Clipped:
        index = turn if order is None else take(order, turn)
        padding = pool.window[1] - pool.short_side(index)
        window, seen = route(pool.take(done.matrix, index), take(lower, index), take(upper, index), padding)
        return Clipped(pool.put(done.matrix, window, index), add_reading(done.reading, seen))

    numbers = _after(reading, pool.gather([stack for stack, _, _ in members]))
    numbers, reading = lax.fori_loop(0, count, clip_next, Clipped(numbers, reading))
    return pool.scatter(numbers), reading


def decompose_in_turn(
    stacks: list[jax.Array], shares: list[Share | None], reading: Reading
) -> tuple[list[Decomposition], Reading]:
    """Return the decompositions of all squares, and the same reading, known only after them.

    First all squares, then all decompositions: OpenBLAS's threads go on spinning for some 30 ms after each,
    which a product that came next would pay for.

    Args:
      stacks: the matrices.
      shares: which of them.
      reading: what must be known before any of it begins.
    """
    squares, last = [], reading.skipped
    for stack, share in zip(stacks, shares, strict=True):
        short = min(stack.shape[1:])
        square_next = functools.partial(_square_next, stack)
        nothing = jnp.zeros_like(stack[:, :short, :short])
        squared, last = _in_turn(square_next, (nothing, last), len(stack), share)
        squares.append(squared)
    decomposed = []
    for squared, share in zip(squares, shares, strict=True):
        nothing = Decomposition(jnp.zeros_like(squared[:, 0]), squared)
        found, last = _in_turn(_decompose_next, (nothing, last), len(squared), share)
        decomposed.append(found)
    return decomposed, reading._replace(smallest=jnp.where(_is_over(last), reading.smallest, 0))


def _square_next(
    stack: jax.Array, index: ArrayLike, carry: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    squares, spoilt = carry
    squared = lower_square(take(stack, index), zero=jnp.where(_is_over(spoilt), 0, 1))
    return _put(squares, squared, index), spoilt + jnp.isnan(squared[-1, -1])


def _decompose_next(
    index: ArrayLike, carry: tuple[Decomposition, jax.Array]
) -> tuple[Decomposition, jax.Array]:
    # The vectors take the place of the squares, which are needed no more.
    decomposed, spoilt = carry
    found = decompose(jnp.where(_is_over(spoilt), take(decomposed.vectors, index), 0))
    spoilt += jnp.isnan(found.eigenvalues[0])
    return jax.tree.map(lambda all_of, one: _put(all_of, one, index), decomposed, found), spoilt


def _put(stack: jax.Array, matrix: jax.Array, index: ArrayLike) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, matrix, index, 0, allow_negative_indices=False)


def _is_over(last: jax.Array) -> jax.Array:
    """Return True, but only when all has run that went into a number.

    No count and no singular value is negative, but XLA does not know: only a true dependency on the matrix
    before keeps two decompositions from running at once.
    """
    return ~(last < 0)


def _after(reading: Reading, array: jax.Array) -> jax.Array:
    """Return the array, but only when all has run that went into a reading.

    Its smallest singular value comes out of the decompositions themselves, while a count may be known before.
    """
    return jnp.where(_is_over(reading.smallest), array, 0)


def _in_turn(
    turn: Callable[[ArrayLike, Carry], Carry], carry: Carry, length: int, share: Share | None
) -> Carry:
    if share is not None:
        return lax.fori_loop(share.start, share.start + share.count, turn, carry)
    # A large matrix is a stack of its own, and a loop would copy it.
    return turn(0, carry) if length == 1 else lax.fori_loop(0, length, turn, carry)


def _clip_together(
    route: Together, stacks: list[jax.Array], bands: list[Band], shares: list[Share | None], reading: Reading
) -> tuple[list[jax.Array], Reading]:
    clipped = []
    for stack, band, share in zip(stacks, bands, shares, strict=True):
        clip_share = functools.partial(_clip_share, route, share or Share(0, len(stack), len(stack)))
        # A device that has no share in this stack decomposes nothing.
        is_due = share is None or jnp.asarray(share.count) > 0
        stack, reading = lax.cond(
            is_due, clip_share, lambda stack, _, reading: (stack, reading), stack, band, reading
        )
        clipped.append(stack)
    return clipped, reading


def _clip_share(
    route: Together, share: Share, stack: jax.Array, band: Band, reading: Reading
) -> tuple[jax.Array, Reading]:
    # A slice never runs past the end: it is moved back, and the mask says which of it is ours.
    first = jnp.minimum(share.start, stack.shape[0] - share.most)
    matrices = lax.dynamic_slice_in_dim(stack, first, share.most)
    is_mine = _is_mine(len(stack), share)
    is_mine = lax.dynamic_slice_in_dim(is_mine, first, share.most)
    is_finite = jnp.all(jnp.isfinite(matrices), axis=(-2, -1))
    is_clipped = (is_mine & is_finite)[:, None, None]
    clipped, seen = route(
        jnp.where(is_clipped, matrices, jnp.eye(*stack.shape[1:], dtype=stack.dtype)), *band
    )
    nothing = empty_reading(is_mine)
    skipped = nothing._replace(skipped=jnp.ones_like(nothing.skipped))
    seen = jax.tree.map(lambda yes, no: jnp.where(is_finite, yes, no), seen, skipped)
    matrices = jnp.where(is_clipped, clipped, matrices)
    return lax.dynamic_update_slice_in_dim(stack, matrices, first, 0), add_reading(reading, seen, is_mine)


def _is_mine(length: int, share: Share | None) -> jax.Array:
    """Return which matrices of a stack a share holds."""
    if share is None:
        return jnp.ones(length, bool)
    index = jnp.arange(length)
    return (index >= share.start) & (index < share.start + share.count)
