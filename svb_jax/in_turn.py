"""Matrices clipped one after another, as CPUs have it.

Each waits for the last: jaxlib's LAPACK threads collapse, and XLA's pool has been seen to hang, when several
decompositions are in flight. Small matrices of all shapes share a program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.cutting import take
from svb_jax.packing import LARGEST_TO_MIX
from svb_jax.pooling import Pool, make_pools
from svb_jax.reading import Reading, add_reading, read
from svb_jax.routes import Decomposition, Route, decompose, lower_square
from svb_jax.stacks import Bands, Share, Shares, Stacks, band_of

Done = tuple[jax.Array, Reading]
Carry = TypeVar("Carry")


def clip_in_turn(
    route: Route, stacks: list[Stacks], bands: list[Bands], shares: list[Shares], reading: Reading
) -> tuple[list[Stacks], Reading]:
    """Clip one matrix after another, and add what was seen to ``reading``."""
    clipped: dict[int, Stacks] = {}
    large = [
        (index, stack, band_of(bands[index], position), shares[index][position])
        for index, row in enumerate(stacks)
        if row.largest > LARGEST_TO_MIX
        for position, stack in enumerate(row.split())
    ]
    decomposed: Sequence[Decomposition | None] = [None] * len(large)
    if route.is_by_square:
        decomposed, reading = decompose_in_turn(
            [stack for _, stack, _, _ in large], [share for _, _, _, share in large], reading
        )
    results: dict[int, list[jax.Array]] = {index: [] for index, *_ in large}
    for (index, stack, band, share), gram in zip(large, decomposed, strict=True):
        # The smallest part on which all work of the route waits for the stack before.
        if gram is None:
            stack = _after(reading, stack)
        else:
            gram = gram._replace(eigenvalues=_after(reading, gram.eigenvalues))
        stack, reading = _clip_one_by_one(route, (stack, reading), band, gram, share)
        results[index].append(stack)
    for index, row in enumerate(stacks):
        if index in results:
            clipped[index] = Stacks.of(results[index])
        else:
            clipped[index], reading = _clip_pools(route, row, bands[index], shares[index], reading)
    return list(clipped.values()), reading


def _clip_one_by_one(
    route: Route,
    stack: Done,
    band: tuple[ArrayLike, ArrayLike],
    decomposed: Decomposition | None,
    share: Share | None,
) -> Done:
    def clip_next(index: ArrayLike, done: Done) -> Done:
        clipped, reading = done
        gram = jax.tree.map(lambda of_stack: take(of_stack, index), decomposed)
        matrix, values, is_exact, _ = route.clip(take(clipped, index), gram, *band)
        seen = read(values, *band, padding=0, is_exact=is_exact)
        return _put(clipped, matrix, index), add_reading(reading, seen)

    return _in_turn(clip_next, stack, len(stack[0]), share)


def _clip_pools(
    route: Route, row: Stacks, bands: Bands, shares: Shares, reading: Reading
) -> tuple[Stacks, Reading]:
    done = _after(reading, row.numbers), reading
    for pool in make_pools(row.shapes):
        done = _clip_pool(route, pool, bands, shares, done)
    return row.replace(done[0]), done[1]


def _clip_pool(route: Route, pool: Pool, bands: Bands, shares: Shares, done: Done) -> Done:
    """Clip the matrices of a pool, as many of a stack at once as fit into a window.

    Those whose window is not good for the route as a whole are taken again, one by one.
    """
    lowers, uppers = (jnp.stack(ends) for ends in zip(*bands, strict=True))
    turns, order, stops = pool.count, None, None
    if held := [share for share in shares if share is not None]:
        mine = jnp.concatenate([held[member].holds(pool.shapes[member][0]) for member in pool.members])
        turns, order = jnp.sum(mine), jnp.argsort(~mine)
        stops = jnp.stack([jnp.asarray(share.start + share.count, jnp.int32) for share in held])

    def clip_next(state: tuple[jax.Array, jax.Array, Done]) -> tuple[jax.Array, jax.Array, Done]:
        turn, one_by_one_until, (numbers, reading) = state
        place = pool.place(turn if order is None else take(order, turn))
        num = place.fits
        if stops is not None:
            num = jnp.minimum(num, take(stops, place.member) - place.position)
        num = jnp.where(turn < one_by_one_until, 1, num) if route.is_by_square else 1
        band = place.member if len(bands) > 1 else 0
        lower, upper = take(lowers, band), take(uppers, band)
        padding = pool.window[1] - num * place.short
        window = pool.take(numbers, place, num)
        window, values, is_exact, is_done = route(window, lower, upper, padding, num == 1)
        seen = add_reading(reading, read(values, lower, upper, padding, is_exact))
        reading = jax.tree.map(lambda new, old: jnp.where(is_done, new, old), seen, reading)
        numbers = pool.put(numbers, window, place, num)
        return (
            jnp.where(is_done, turn + num, turn),
            jnp.where(is_done, one_by_one_until, turn + num),
            (numbers, reading),
        )

    start = jnp.zeros_like(done[1].skipped)
    return lax.while_loop(lambda state: state[0] < turns, clip_next, (start, start, done))[-1]


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
    return decomposed, reading._replace(extremes=jnp.where(_is_over(last), reading.extremes, 0))


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

    Its largest singular value comes out of the decompositions themselves, while a count may be known before.
    """
    # None is minus one; only the reading of nothing has a largest value below zero, which is infinite.
    return jnp.where(reading.largest != -1, array, 0)


def _in_turn(
    turn: Callable[[ArrayLike, Carry], Carry], carry: Carry, length: int, share: Share | None
) -> Carry:
    if share is not None:
        return lax.fori_loop(share.start, share.start + share.count, turn, carry)
    # A large matrix is a stack of its own, and a loop would copy it.
    return turn(0, carry) if length == 1 else lax.fori_loop(0, length, turn, carry)
