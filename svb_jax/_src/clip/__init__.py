"""The nearest matrices whose singular values all lie in a band: the array level.

One contract, several routes: ``svd``, ``gram`` and ``products``, each a module. ``auto`` is the platform's
best: products on accelerators, whose decompositions are slow to compile and slow to run; on CPU the Gram
matrix, and the SVD where that would not do. Accelerators take equal matrices as one batch (``batched``), CPUs
one after another (``cpu``). The platform is the one the program is compiled for, whatever machine traces it.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import clip_active, clip_batched, untouched
from svb_jax._src.clip.cpu import clip_sequentially
from svb_jax._src.clip.derivative import clip_tangent, clipped_tangent
from svb_jax._src.clip.gram import clip_by_gram
from svb_jax._src.clip.products import clip_by_products
from svb_jax._src.clip.svd import clip_by_svd
from svb_jax._src.stats import Clipped

Method = Literal["auto", "svd", "gram", "products"]

# The routes of a batch.
ROUTES = {
    "auto": clip_by_products,
    "svd": functools.partial(clip_active, clip=clip_by_svd),
    "gram": functools.partial(clip_active, clip=clip_by_gram),
    "products": clip_by_products,
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
# Compiled once for the same shapes, so that calls outside any jit are fast from the second on.
@functools.partial(jax.jit, static_argnums=(1, 2))
def clip_batches(batches: list[Batch], method: Method, is_partial: bool = False) -> list[Clipped]:
    """Clip the active, finite matrices of every batch into their bands.

    Args:
      batches: The matrices; a batch may be empty.
      method: The route.
      is_partial: Whether there may be batches without any active matrix, which then cost nothing.
    """
    batches = [with_sound_band(batch) for batch in batches]
    filled = [index for index, batch in enumerate(batches) if batch.matrices.size]
    results = {index: untouched(batch) for index, batch in enumerate(batches) if index not in filled}
    if filled:
        batches = [batches[index] for index in filled]
        route = ROUTES[method]
        can_pad = route is clip_by_products
        batched = functools.partial(clip_batched, route=route, can_pad=can_pad, is_partial=is_partial)
        sequential = functools.partial(clip_sequentially, method=method)
        by_platform = functools.partial(lax.platform_dependent, cpu=sequential, default=batched)
        clip = batched if method == "products" else by_platform
        results |= zip(filled, clip(batches), strict=True)
    return [results[index] for index in range(len(results))]


def with_sound_band(batch: Batch) -> Batch:
    """Deactivate the matrices whose band is none: NaN, infinite, negative or out of order."""
    is_band = (batch.lower >= 0) & (batch.lower <= batch.upper) & (batch.upper < jnp.inf)
    return batch._replace(is_active=batch.is_active & is_band)


@clip_batches.defjvp
def _clip_batches_jvp(
    method: Method, is_partial: bool, primals: Any, tangents: Any
) -> tuple[list[Clipped], list[Clipped]]:
    [batches], [batch_tangents] = primals, tangents
    clipped = clip_batches(batches, method, is_partial)
    changes = [
        clip_tangent(with_sound_band(batch), tangent)
        for batch, tangent in zip(batches, batch_tangents, strict=True)
    ]
    return clipped, [clipped_tangent(*pair) for pair in zip(clipped, changes, strict=True)]
