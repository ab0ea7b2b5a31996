"""The nearest matrices whose singular values all lie in a band: the array level.

One contract, several routes: ``svd``, ``gram`` and ``products``, each a module. ``auto`` is the platform's
best: products on accelerators, whose decompositions are slow to compile and slow to run; on CPU the Gram
matrix, and the SVD where that would not do. Accelerators take equal matrices as one batch (``batched``), CPUs
one after another (``cpu``). The platform is the one the program is compiled for, whatever machine traces it.
"""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax._src.checks import check_band, check_choice
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import clip_batched, untouched
from svb_jax._src.clip.cpu import clip_sequentially
from svb_jax._src.clip.derivative import clip_tangent, clipped_tangent
from svb_jax._src.clip.gram import clip_by_gram
from svb_jax._src.clip.matrix_functions import compute_dtype, replicate, shard_like
from svb_jax._src.clip.products import clip_by_products
from svb_jax._src.clip.svd import clip_by_svd
from svb_jax._src.stats import Clipped

Method = Literal["auto", "svd", "gram", "products"]

ROUTES = {"auto": clip_by_products, "svd": clip_by_svd, "gram": clip_by_gram, "products": clip_by_products}


def clip_singular_values(
    matrices: ArrayLike, lower: ArrayLike, upper: ArrayLike, *, method: Method = "auto"
) -> jax.Array:
    r"""Clip the singular values of every matrix to ``[lower, upper]``.

    .. math::
      U \Sigma V^\top \mapsto U \operatorname{clip}(\Sigma, \text{lower}, \text{upper}) V^\top,

    the nearest such matrix in the Frobenius norm. Half types are projected in float32 and rounded once.
    A matrix with non-finite entries comes back as it is, and so does one whose band is none: a traced end
    that is not finite, or out of order.

    The function can be differentiated in both modes, with respect to all three arguments. At an end of the
    band, where the clip has a kink, the derivative is the one from inside.

    Args:
      matrices: shape ``(..., m, n)``, either side the longer.
      lower: the band's lower end, not negative.
      upper: the band's upper end, no less than ``lower``.
      method: ``svd`` is exact for every matrix. ``gram`` decomposes the Gram matrix of the short side, which
        is faster and as exact up to a condition number of about 10; it leaves vanished directions alone.
        ``products`` uses matrix products only and is exact for every matrix. ``auto`` is the platform's best:
        ``products`` on accelerators; on CPU ``gram`` where its own eigenvalues show that it is good, and
        ``svd`` elsewhere.

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
    is_float = jnp.issubdtype(matrices.dtype, jnp.floating) and matrices.dtype.itemsize >= 2
    if matrices.ndim < 2 or not is_float:
        raise ValueError(
            "clip_singular_values needs real floating-point matrices of 16 bits or more and of shape "
            f"(..., m, n), got {matrices.dtype} of shape {matrices.shape}."
        )
    check_choice("clip_singular_values", "method", method, get_args(Method))
    check_band("clip_singular_values", lower, upper)
    dtype = compute_dtype(matrices.dtype)
    count = math.prod(matrices.shape[:-2])
    lower, upper = (jnp.broadcast_to(jnp.asarray(end, dtype), (count,)) for end in (lower, upper))
    batch = replicate(matrices).astype(dtype).reshape(count, *matrices.shape[-2:])
    [clipped] = clip_batches([Batch(batch, lower, upper, jnp.ones(count, bool))], method)
    return shard_like(clipped.matrices.reshape(matrices.shape).astype(matrices.dtype), matrices)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
# Compiled once for the same shapes, so that calls outside any jit are fast from the second on.
@functools.partial(jax.jit, static_argnums=(1, 2))
def clip_batches(batches: list[Batch], method: Method, is_partial: bool = False) -> list[Clipped]:
    """Clip the active, finite matrices of every batch into their bands.

    Args:
      batches: the matrices; a batch may be empty.
      method: the route.
      is_partial: whether there may be batches without any active matrix, which then cost nothing.
    """
    batches = [with_sound_band(batch) for batch in batches]
    results = dict(enumerate(map(untouched, batches)))
    filled = [index for index, batch in enumerate(batches) if batch.matrices.size]
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
