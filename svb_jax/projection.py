"""The nearest matrix whose singular values all lie in a band: three routes, one contract.

``gram`` and ``svd`` decompose. On CPU they take one matrix at a time, each waiting for the last: jaxlib's
LAPACK threads collapse, and XLA's pool has been seen to hang, when several decompositions are in flight.
On accelerators equal matrices go together. ``polar`` is made of matrix products alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from svb_jax.checks import check_band, check_choice
from svb_jax.polar import clip_by_polar

Method = Literal["auto", "svd", "gram", "polar"]

# Squaring a matrix loses eps * condition² of its smallest singular values. Up to the first limit that is no
# more than a float32 SVD loses; up to the second, clipping what came out once more makes the band good again.
ONE_PASS_CONDITION = 4.0
TWO_PASS_CONDITION = 16.0

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Reading(NamedTuple):
    """What a projection saw, summed up over the matrices so far."""

    smallest: jax.Array
    largest: jax.Array
    clipped: jax.Array
    values: jax.Array
    exact: jax.Array
    skipped: jax.Array


def empty_reading(like: jax.Array) -> Reading:
    """Return the reading of no matrix at all, in the shape of ``like``.

    Made like something, because shard_map tells values that differ from device to device from others.
    """
    zero = jnp.zeros_like(like, jnp.int32)
    smallest, largest = jnp.full_like(zero, jnp.inf, jnp.float32), jnp.full_like(zero, -jnp.inf, jnp.float32)
    return Reading(smallest, largest, zero, zero, zero, zero)


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
    clipped, _ = clip_stack(stack, lower, upper, method, empty_reading(jnp.zeros(())))
    return clipped.reshape(matrices.shape).astype(matrices.dtype)


def clip_stack(
    stack: jax.Array,
    lower: ArrayLike,
    upper: ArrayLike,
    method: Method,
    reading: Reading,
    share: tuple[ArrayLike, ArrayLike, int] | None = None,
) -> tuple[jax.Array, Reading]:
    """Clip a stack ``(count, m, n)`` and add what was seen to ``reading``.

    Args:
      stack: float32 or float64 matrices.
      lower: the band's lower end.
      upper: the band's upper end.
      method: the route.
      reading: of the stacks before. They are finished before this one is begun.
      share: first index, how many, and the most that any caller will ask for; only these are clipped, and
        the rest comes back as it is.
    """
    if stack.size == 0:
        return stack, reading
    start, count, most = (0, stack.shape[0], stack.shape[0]) if share is None else share
    return _clip_range(stack, lower, upper, reading, start, count, method=method, most=most)


# Compiled once a shape, so that calls outside any jit are fast from the second on.
@functools.partial(jax.jit, static_argnames=("method", "most"))
def _clip_range(
    stack: jax.Array,
    lower: ArrayLike,
    upper: ArrayLike,
    reading: Reading,
    start: ArrayLike,
    count: ArrayLike,
    *,
    method: Method,
    most: int,
) -> tuple[jax.Array, Reading]:
    lower, upper = jnp.asarray(lower, stack.dtype), jnp.asarray(upper, stack.dtype)
    route = functools.partial(_ROUTES[method], lower=lower, upper=upper)
    together = functools.partial(_clip_together, route, most)
    if method == "polar":
        return together(stack, reading, start, count)
    in_turn = functools.partial(_clip_in_turn, route)
    return lax.platform_dependent(stack, reading, start, count, cpu=in_turn, default=together)


Route = Callable[[jax.Array], tuple[jax.Array, Reading]]


def _clip_in_turn(
    route: Route, stack: jax.Array, reading: Reading, start: ArrayLike, count: ArrayLike
) -> tuple[jax.Array, Reading]:
    def clip_next(i: jax.Array, carry: tuple[jax.Array, Reading]) -> tuple[jax.Array, Reading]:
        stack, reading = carry
        # The count of skipped matrices is never negative, but XLA does not know: only a true dependency on
        # the matrix before, in this stack or the last, keeps two decompositions from running at once.
        matrix = stack[i + jnp.minimum(reading.skipped, 0)]
        clipped, seen = lax.cond(jnp.all(jnp.isfinite(matrix)), route, _leave, matrix)
        return stack.at[i].set(clipped), _add(reading, seen)

    return lax.fori_loop(start, start + count, clip_next, (stack, reading))


def _clip_together(
    route: Route, most: int, stack: jax.Array, reading: Reading, start: ArrayLike, count: ArrayLike
) -> tuple[jax.Array, Reading]:
    def clip_mine(stack: jax.Array, reading: Reading) -> tuple[jax.Array, Reading]:
        # A slice never runs past the end: it is moved back, and the mask says which of it is ours.
        first = jnp.minimum(start, stack.shape[0] - most)
        matrices = lax.dynamic_slice_in_dim(stack, first, most)
        index = first + jnp.arange(most)
        is_mine = (index >= start) & (index < start + count)
        is_finite = jnp.all(jnp.isfinite(matrices), axis=(-2, -1))
        is_clipped = (is_mine & is_finite)[:, None, None]
        clipped, seen = route(jnp.where(is_clipped, matrices, jnp.eye(*stack.shape[1:], dtype=stack.dtype)))
        _, left = _leave(matrices)
        seen = jax.tree.map(lambda yes, no: jnp.where(is_finite, yes, no), seen, left)
        seen = jax.tree.map(lambda ours, none: jnp.where(is_mine, ours, none), seen, empty_reading(index))
        matrices = jnp.where(is_clipped, clipped, matrices)
        return lax.dynamic_update_slice_in_dim(stack, matrices, first, 0), _add(reading, seen)

    # A device that has no share in this stack decomposes nothing.
    return lax.cond(jnp.asarray(count) > 0, clip_mine, lambda *same: same, stack, reading)


def _leave(matrix: jax.Array) -> tuple[jax.Array, Reading]:
    reading = empty_reading(matrix[..., 0, 0])
    return matrix, reading._replace(skipped=jnp.ones_like(reading.skipped))


def _add(reading: Reading, seen: Reading) -> Reading:
    return Reading(
        jnp.minimum(reading.smallest, jnp.min(seen.smallest)),
        jnp.maximum(reading.largest, jnp.max(seen.largest)),
        *(total + jnp.sum(more, dtype=jnp.int32) for total, more in zip(reading[2:], seen[2:], strict=True)),
    )


def _read(values: jax.Array, lower: jax.Array, upper: jax.Array, exact: bool) -> Reading:
    smallest = jnp.min(values, axis=-1).astype(jnp.float32)
    return empty_reading(smallest)._replace(
        smallest=smallest,
        largest=jnp.max(values, axis=-1).astype(jnp.float32),
        clipped=jnp.sum((values < lower) | (values > upper), axis=-1, dtype=jnp.int32),
        values=jnp.full_like(smallest, values.shape[-1], jnp.int32),
        exact=jnp.full_like(smallest, int(exact), jnp.int32),
    )


def _keep(largest: jax.Array, upper: jax.Array) -> jax.Array:
    """Return 1 where the result is best written as a change to the matrix, 0 where it is built anew.

    A change leaves values inside the band exactly as they were, but its rounding errors are those of the
    matrix, and may not be much larger than the band's own.
    """
    return (largest <= 1.25 * upper).astype(largest.dtype)


def _by_svd(matrix: jax.Array, *, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, Reading]:
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    u, vt = _orthonormal(u), jnp.swapaxes(_orthonormal(jnp.swapaxes(vt, -2, -1)), -2, -1)
    keep = _keep(jnp.max(s, axis=-1, keepdims=True), upper)
    change = matmul(u * (jnp.clip(s, lower, upper) - keep * s)[..., None, :], vt)
    return keep[..., None] * matrix + change, _read(s, lower, upper, exact=True)


def _orthonormal(columns: jax.Array) -> jax.Array:
    """Return nearly orthonormal columns after a Newton-Schulz step.

    The vectors of a float32 SVD are orthogonal to about 1e-6, which the band would show; this makes them so
    to rounding, for a fraction of the SVD's cost.
    """
    gram = matmul(jnp.swapaxes(columns, -2, -1), columns)
    return columns + matmul(columns, (jnp.eye(gram.shape[-1], dtype=gram.dtype) - gram) / 2)


class _Gram(NamedTuple):
    """The eigendecomposition of a matrix's short side."""

    eigenvalues: jax.Array
    vectors: jax.Array

    @property
    def values(self) -> jax.Array:
        return jnp.sqrt(jnp.maximum(self.eigenvalues, 0))

    def is_conditioned(self, limit: float) -> jax.Array:
        """Return whether the condition number is below ``limit`` and the square kept its digits."""
        limits = jnp.finfo(self.eigenvalues.dtype)
        smallest, largest = self.eigenvalues[..., 0], self.eigenvalues[..., -1]
        is_scaled_well = (largest > limits.tiny / limits.eps**2) & (largest < limits.max * limits.eps)
        return is_scaled_well & (smallest * limit**2 >= largest)

    def clip(self, matrix: jax.Array, lower: jax.Array, upper: jax.Array) -> jax.Array:
        limits = jnp.finfo(matrix.dtype)
        largest = self.values[..., -1:]
        # Below this a direction is rounding error: there is nothing to lift.
        vanished = self.values**2 <= limits.eps * self.values.shape[-1] * largest**2
        keep = _keep(largest, upper)
        gain = jnp.clip(self.values, lower, upper) / jnp.where(vanished, 1, self.values) - keep
        gain = jnp.where(vanished, 1 - keep, gain)

        def apply(matrix: jax.Array) -> jax.Array:
            change = matmul(self.vectors * gain[..., None, :], jnp.swapaxes(self.vectors, -2, -1))
            changed = matmul(matrix, change) if _is_tall(matrix) else matmul(change, matrix)
            return keep[..., None] * matrix + changed

        return lax.cond(jnp.any(gain != 0), apply, lambda matrix: matrix, matrix)


def _is_tall(matrix: jax.Array) -> bool:
    return matrix.shape[-2] >= matrix.shape[-1]


def _decompose_gram(matrix: jax.Array) -> _Gram:
    transposed = jnp.swapaxes(matrix, -2, -1)
    gram = matmul(transposed, matrix) if _is_tall(matrix) else matmul(matrix, transposed)
    vectors, eigenvalues = lax.linalg.eigh(gram, symmetrize_input=False)
    return _Gram(eigenvalues, vectors)


def _by_gram(matrix: jax.Array, *, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, Reading]:
    return _clip_gram(_decompose_gram(matrix), matrix, lower, upper)


def _clip_gram(
    gram: _Gram, matrix: jax.Array, lower: jax.Array, upper: jax.Array
) -> tuple[jax.Array, Reading]:
    clipped = gram.clip(matrix, lower, upper)
    clipped = lax.cond(
        jnp.all(gram.is_conditioned(ONE_PASS_CONDITION)),
        lambda clipped: clipped,
        lambda clipped: _decompose_gram(clipped).clip(clipped, lower, upper),
        clipped,
    )
    return clipped, _read(gram.values, lower, upper, exact=False)


def _by_auto(matrix: jax.Array, *, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, Reading]:
    gram = _decompose_gram(matrix)
    return lax.cond(
        jnp.all(gram.is_conditioned(TWO_PASS_CONDITION)),
        lambda matrix: _clip_gram(gram, matrix, lower, upper),
        functools.partial(_by_svd, lower=lower, upper=upper),
        matrix,
    )


def _by_polar(matrix: jax.Array, *, lower: jax.Array, upper: jax.Array) -> tuple[jax.Array, Reading]:
    clipped, num_clipped = clip_by_polar(matrix, lower, upper)
    short = jnp.moveaxis(matrix, -2, -1) if _is_tall(matrix) else matrix
    values = jnp.full_like(short[..., 0], jnp.nan)
    return clipped, _read(values, lower, upper, exact=False)._replace(clipped=num_clipped)


_ROUTES: dict[str, Any] = {"auto": _by_auto, "svd": _by_svd, "gram": _by_gram, "polar": _by_polar}
