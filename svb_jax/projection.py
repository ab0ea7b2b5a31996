"""The nearest matrices whose singular values all lie in a band.

On CPU one matrix is taken after another, on accelerators equal ones together. ``polar``, made of products
alone, takes them together everywhere.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.checks import check_band, check_choice
from svb_jax.in_turn import clip_in_turn
from svb_jax.reading import Reading, empty_reading
from svb_jax.routes import ROUTES, Method
from svb_jax.stacks import Bands, Share, Shares, Stacks
from svb_jax.together import by_products, by_route, clip_together

_is_for_all_platforms = contextvars.ContextVar("is_for_all_platforms", default=False)


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
    [clipped], _ = clip_stacks([Stacks.of([stack])], [[(lower, upper)]], method, empty_reading(jnp.zeros(())))
    return clipped.numbers.reshape(matrices.shape).astype(matrices.dtype)


@contextlib.contextmanager
def all_platforms() -> Iterator[None]:
    """Trace projections for platforms too that this process does not have.

    A process without accelerators traces what CPUs need and no more, since tracing for accelerators too
    takes several times as long. To export a function for them from such a process, trace it in this context.

    Example:
      >>> import jax, jax.numpy as jnp, svb_jax
      >>> project = jax.jit(lambda params: svb_jax.project(params, epsilon=0.5))
      >>> with svb_jax.all_platforms():
      ...     exported = jax.export.export(project, platforms=["cpu", "tpu"])({"kernel": jnp.eye(3)})
      >>> exported.platforms
      ('cpu', 'tpu')
    """
    token = _is_for_all_platforms.set(True)
    try:
        yield
    finally:
        _is_for_all_platforms.reset(token)


def clip_stacks(
    stacks: Sequence[Stacks],
    bands: Sequence[Bands],
    method: Method,
    reading: Reading,
    shares: Sequence[Sequence[Share]] | None = None,
) -> tuple[list[Stacks], Reading]:
    """Clip rows of stacks and add what was seen to ``reading``.

    Args:
      stacks: float32 or float64 matrices.
      bands: lower and upper end for each stack of each row, or once for all of a row.
      method: the route.
      reading: of what was clipped before.
      shares: which matrices of each stack to clip, if not all.
    """
    filled = [index for index, row in enumerate(stacks) if row.numbers.size]
    rows = [stacks[index] for index in filled]
    results, reading = _clip_stacks(
        rows,
        [
            [
                (jnp.asarray(lower, row.numbers.dtype), jnp.asarray(upper, row.numbers.dtype))
                for lower, upper in bands[index]
            ]
            for index, row in zip(filled, rows, strict=True)
        ],
        [[None] * len(row.shapes) for row in rows] if shares is None else [shares[index] for index in filled],
        reading,
        method=method,
        is_for_cpu_only=jax.default_backend() == "cpu" and not _is_for_all_platforms.get(),
    )
    clipped = dict(enumerate(stacks)) | dict(zip(filled, results, strict=True))
    return list(clipped.values()), reading


# Compiled once for the same shapes, so that calls outside any jit are fast from the second on.
@functools.partial(jax.jit, static_argnames=("method", "is_for_cpu_only"))
def _clip_stacks(
    stacks: list[Stacks],
    bands: list[Bands],
    shares: list[Shares],
    reading: Reading,
    *,
    method: Method,
    is_for_cpu_only: bool,
) -> tuple[list[Stacks], Reading]:
    if method == "polar":
        return clip_together(by_products, stacks, bands, shares, reading)
    in_turn = functools.partial(clip_in_turn, ROUTES[method])
    together = None if is_for_cpu_only else functools.partial(clip_together, by_route(ROUTES[method]))
    return lax.platform_dependent(stacks, bands, shares, reading, cpu=in_turn, default=together)
