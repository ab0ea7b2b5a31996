"""The routes of one matrix: on CPU a branch that is not taken costs nothing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from svb_jax._src.clip.batched import nothing_seen
from svb_jax._src.clip.gram import (
    ONE_PASS_CONDITION,
    GramSpectrum,
    clip_once,
    decompose,
    decompose_gram,
)
from svb_jax._src.clip.svd import clip_by_svd
from svb_jax._src.clip.units import gram_matrix
from svb_jax._src.stats import Clipped

# From a tall matrix (m, n), the ends of its band, whether to clip it, and how many of its columns are
# padding.
RouteOfOne = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], Clipped]


def svd(
    matrix: jax.Array, lower: jax.Array, upper: jax.Array, is_active: jax.Array, padding: jax.Array
) -> Clipped:
    """Clip a matrix by its singular value decomposition."""
    is_active &= _is_finite(matrix)
    return lax.cond(is_active, lambda matrix: clip_by_svd(matrix, lower, upper, padding), _skip, matrix)


def gram(
    matrix: jax.Array, lower: jax.Array, upper: jax.Array, is_active: jax.Array, padding: jax.Array
) -> Clipped:
    """Clip a matrix by its Gram matrix, whatever its condition."""
    is_active &= _is_finite(matrix)
    spectrum = decompose(jnp.where(is_active, matrix, 0))

    def twice(matrix: jax.Array) -> jax.Array:
        clipped = clip_once(matrix, spectrum, lower, upper)
        return clip_once(clipped, decompose(clipped), lower, upper)

    seen = _seen(spectrum, lower, upper, padding)
    is_far = ~spectrum.is_conditioned(ONE_PASS_CONDITION, padding) & ~spectrum.is_inside(
        lower, upper, padding
    )
    branches = [
        *_gram_branches(spectrum, seen, lower, upper, padding),
        (is_far, lambda m: seen._replace(matrices=twice(m))),
    ]
    return _switch(branches, is_active, matrix)


def auto(
    matrix: jax.Array, lower: jax.Array, upper: jax.Array, is_active: jax.Array, padding: jax.Array
) -> Clipped:
    """Clip a matrix by its Gram matrix if its condition allows, else by its own decomposition."""
    # Unscaled: scaling takes two more passes over the matrix. The exact route scales what is out of range.
    product = gram_matrix(matrix)
    limits, largest = jnp.finfo(product.dtype), jnp.max(product)
    is_in_range = is_active & (largest > limits.tiny / limits.eps**2) & (largest < limits.max * limits.eps)
    spectrum = decompose_gram(jnp.where(is_in_range, product, 0), np.ones((), product.dtype))
    seen = _seen(spectrum, lower, upper, padding)
    is_far = ~(is_in_range & spectrum.is_conditioned(ONE_PASS_CONDITION, padding))
    # A Gram matrix in range proves every entry finite. Out of range, svd checks it.
    exactly = (is_far, lambda matrix: svd(matrix, lower, upper, jnp.array(True), padding))
    return _switch([*_gram_branches(spectrum, seen, lower, upper, padding), exactly], is_active, matrix)


ROUTES: dict[str, RouteOfOne] = {"auto": auto, "svd": svd, "gram": gram}

# A branch, and whether to take it.
Branch = tuple[jax.Array, Callable[[jax.Array], Clipped]]


def _seen(spectrum: GramSpectrum, lower: jax.Array, upper: jax.Array, padding: jax.Array) -> Clipped:
    """Return what a spectrum says of a matrix, which is yet to be put in its place."""
    no = jnp.zeros_like(spectrum.eigenvalues[-1], bool)
    return Clipped(
        matrices=no,
        smallest=spectrum.smallest(padding),
        largest=spectrum.values[-1],
        num_clipped=spectrum.num_outside(lower, upper, padding),
        is_exact=no,
        is_missed=spectrum.is_vanished[padding] & (lower > 0),
        is_skipped=no,
    )


def _gram_branches(
    spectrum: GramSpectrum, seen: Clipped, lower: jax.Array, upper: jax.Array, padding: jax.Array
) -> list[Branch]:
    """Return what a Gram matrix is good for: to clip its matrix, or to leave it as it is."""

    def once(matrix: jax.Array) -> Clipped:
        return seen._replace(matrices=clip_once(matrix, spectrum, lower, upper))

    def keep(matrix: jax.Array) -> Clipped:
        return seen._replace(matrices=matrix)

    return [(jnp.array(True), once), (spectrum.is_inside(lower, upper, padding), keep)]


def _switch(branches: list[Branch], is_active: jax.Array, matrix: jax.Array) -> Clipped:
    """Take the last branch whose condition holds; leave the matrix alone if it is not active."""
    conditions, functions = zip(*branches, (~is_active, _skip), strict=True)
    taken = jnp.int32(0)
    for index, condition in enumerate(conditions):
        taken = jnp.where(condition, index, taken)
    return lax.switch(taken, functions, matrix)


def _is_finite(matrix: jax.Array) -> jax.Array:
    # The same reduction by which the SVD finds its unit, so that it is compiled once.
    return jnp.max(jnp.abs(matrix)) < jnp.inf


def _skip(matrix: jax.Array) -> Clipped:
    clipped = nothing_seen(matrix)
    return clipped._replace(is_skipped=~clipped.is_skipped)
