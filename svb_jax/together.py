"""Equal matrices clipped together, as accelerators have it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.polar import clip_by_polar
from svb_jax.reading import Reading, add_reading, empty_reading, read, skipped_reading, sum_readings
from svb_jax.routes import Route
from svb_jax.stacks import Band, Bands, Share, Shares, Stacks, band_of

Done = tuple[jax.Array, Reading]
# From a batch and a band's two ends to the clipped batch and a reading of each matrix.
Together = Callable[[jax.Array, ArrayLike, ArrayLike], Done]


def clip_together(
    route: Together, stacks: list[Stacks], bands: list[Bands], shares: list[Shares], reading: Reading
) -> tuple[list[Stacks], Reading]:
    """Clip all matrices of a stack at once, one stack after another, and add what was seen to ``reading``."""
    clipped = []
    for row, bands_of_row, shares_of_row in zip(stacks, bands, shares, strict=True):
        results = []
        for position, (stack, share) in enumerate(zip(row.split(), shares_of_row, strict=True)):
            if stack.size:
                clip = functools.partial(_clip_finite, route, band_of(bands_of_row, position))
                stack, seen = _clip_stack(clip, stack, share)
                reading = add_reading(reading, seen)
            results.append(stack)
        clipped.append(Stacks.of(results))
    return clipped, reading


def by_route(route: Route) -> Together:
    """Return a route that decomposes, with readings."""

    def clip(matrices: jax.Array, lower: ArrayLike, upper: ArrayLike) -> Done:
        clipped, values, is_exact, _ = route(matrices, lower, upper)
        return clipped, read(values, lower, upper, 0, is_exact)

    return clip


def by_products(matrices: jax.Array, lower: ArrayLike, upper: ArrayLike) -> Done:
    """Clip by the route ``polar``, which never knows the singular values."""
    clipped, num_clipped = clip_by_polar(matrices, jnp.asarray(lower), jnp.asarray(upper))
    nothing = empty_reading(num_clipped)
    num_values = jnp.full_like(num_clipped, min(matrices.shape[-2:]))
    counts = jnp.stack([num_clipped, num_values], axis=-1)
    return clipped, Reading(jnp.full_like(nothing.extremes, jnp.nan), nothing.counts.at[:, :2].set(counts))


def _clip_stack(clip: Callable[[jax.Array, jax.Array], Done], stack: jax.Array, share: Share | None) -> Done:
    if share is None:
        return clip(stack, jnp.ones(len(stack), bool))

    def clip_share(stack: jax.Array) -> Done:
        # A slice never runs past the end: it is moved back, and the mask says which of it is ours.
        first = jnp.minimum(share.start, stack.shape[0] - share.most)
        matrices = lax.dynamic_slice_in_dim(stack, first, share.most)
        is_mine = lax.dynamic_slice_in_dim(share.holds(len(stack)), first, share.most)
        matrices, seen = clip(matrices, is_mine)
        return lax.dynamic_update_slice_in_dim(stack, matrices, first, 0), seen

    def leave(stack: jax.Array) -> Done:
        return stack, empty_reading(jnp.asarray(share.count))

    # A device that has no share in this stack decomposes nothing.
    return lax.cond(jnp.asarray(share.count) > 0, clip_share, leave, stack)


def _clip_finite(route: Together, band: Band, matrices: jax.Array, is_mine: jax.Array) -> Done:
    """Clip those of a batch that are ours and finite, and sum up what was seen of ours."""
    is_finite = jnp.all(jnp.isfinite(matrices), axis=(-2, -1))
    is_clipped = (is_mine & is_finite)[:, None, None]
    eye = jnp.eye(*matrices.shape[1:], dtype=matrices.dtype)
    clipped, seen = route(jnp.where(is_clipped, matrices, eye), *band)
    skipped = skipped_reading(is_finite)
    seen = jax.tree.map(lambda yes, no: jnp.where(is_finite[:, None], yes, no), seen, skipped)
    return jnp.where(is_clipped, clipped, matrices), sum_readings(seen, is_mine)
