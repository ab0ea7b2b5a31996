"""The derivative of clipping, against finite differences and answers known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from svb_jax import bound_singular_values, clip_singular_values, project
from tests.prescribed import before_and_after, frame, kernels

LOWER, UPPER = 0.7, 1.4
SPECTRA = {
    "either side": [2.0, 1.3, 1.0, 0.3],
    "equal inside": [1.0, 1.0, 1.0, 1.0],
    "equal outside": [2.0, 2.0, 0.3, 0.3],
    "far apart": [50.0, 1.0, 0.9, 1e-3],
}


# Far apart, gram itself is not accurate enough for differences of its values.
CASES = [
    (method, name)
    for method in ("auto", "svd", "gram", "products")
    for name in SPECTRA
    if (method, name) != ("gram", "far apart")
]


@pytest.mark.parametrize(("method", "spectrum"), CASES)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)])
def test_both_modes_agree_with_finite_differences(method, shape, spectrum):
    with jax.enable_x64(True):
        matrix = jnp.asarray(frame(*shape).matrix(np.array(SPECTRA[spectrum])))
        arguments = (matrix, jnp.array(LOWER), jnp.array(UPPER))
        clip = lambda *arguments: clip_singular_values(*arguments, method=method)  # noqa: E731
        check_grads(clip, arguments, order=1, modes=["fwd", "rev"], rtol=2e-4, atol=2e-4, eps=1e-6)


def test_inside_the_band_clipping_is_the_identity():
    jacobian = jax.jacrev(lambda w: clip_singular_values(w, 0.5, 2.0))(jnp.eye(3))
    np.testing.assert_array_equal(jacobian.reshape(9, 9), np.eye(9))


def test_an_end_of_the_band_takes_the_values_clipped_to_it_along():
    matrix = jnp.diag(jnp.array([3.0, 1.0, 0.1]))
    with_ends = jax.jacfwd(lambda lower, upper: clip_singular_values(matrix, lower, upper), (0, 1))(0.5, 2.0)
    np.testing.assert_allclose(with_ends[0], np.diag([0, 0, 1]), atol=1e-6)
    np.testing.assert_allclose(with_ends[1], np.diag([1, 0, 0]), atol=1e-6)


def test_at_an_end_of_the_band_the_derivative_is_the_one_from_inside():
    tangent = jax.jvp(lambda w: clip_singular_values(w, 0.5, 2.0), (2 * jnp.eye(1),), (jnp.eye(1),))[1]
    assert float(tangent[0, 0]) == 1.0


@pytest.mark.parametrize("matrix", [jnp.zeros((3, 2)), jnp.full((3, 2), 1.0), jnp.full((3, 2), jnp.nan)])
def test_gradients_stay_finite_where_a_direction_has_vanished_or_a_matrix_is_skipped(matrix):
    gradient = jax.grad(lambda w: jnp.sum(clip_singular_values(w, 0.5, 2.0, method="svd")))(matrix)
    assert np.isfinite(gradient).all()


def test_a_vanished_direction_counts_as_constant():
    rank_one = jnp.outer(jnp.arange(1.0, 7.0), jnp.ones(4))
    weights = jnp.arange(24.0).reshape(6, 4)
    gradient = jax.grad(lambda w: jnp.sum(clip_singular_values(w, 0.5, 2.0) * weights))(rank_one)
    # No value is in the band: turning the one direction by 1 / σ is all that is left.
    assert np.abs(gradient).max() < 10


def test_large_matrices_keep_their_values_under_differentiation():
    vectors = frame(512, 256)
    spectrum = np.geomspace(0.4, 2.5, 256)
    matrix = jnp.asarray(vectors.matrix(spectrum), jnp.float32)
    value, tangent = jax.jvp(lambda w: clip_singular_values(w, 0.8, 1.25), (matrix,), (matrix,))
    np.testing.assert_allclose(value, vectors.matrix(np.clip(spectrum, 0.8, 1.25)), atol=1e-5)
    inside = np.where((spectrum > 0.8) & (spectrum < 1.25), spectrum, 0)
    np.testing.assert_allclose(tangent, vectors.matrix(inside), atol=1e-4)


def test_a_whole_tree_is_differentiable():
    params = {"a": {"kernel": 3 * jnp.eye(2)}, "b": {"kernel": jnp.eye(3), "bias": jnp.ones(3)}}
    loss = lambda params: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(project(params, 0.5)))  # noqa: E731
    gradient = jax.grad(loss)(params)
    np.testing.assert_allclose(gradient["b"]["kernel"], np.ones((3, 3)), atol=1e-6)
    # Only turning, not growing, moves a matrix whose values are all clipped: here by half as much.
    np.testing.assert_allclose(gradient["a"]["kernel"], np.zeros((2, 2)), atol=1e-6)


def test_under_vmap():
    matrices = jnp.asarray(
        np.stack([frame(5, 3, seed).matrix([2.0, 1.0, 0.3]) for seed in range(3)]), jnp.float32
    )
    one = lambda w: jnp.sum(clip_singular_values(w, LOWER, UPPER) ** 2)  # noqa: E731
    expected = jnp.stack([jax.grad(one)(matrix) for matrix in matrices])
    np.testing.assert_allclose(jax.vmap(jax.grad(one))(matrices), expected, atol=1e-5)


@pytest.mark.parametrize("per_layer", [False, True])
def test_steps_that_project_can_be_differentiated(per_layer):
    params = kernels(before_and_after(6, 4)[0], before_and_after(3, 3)[0])
    weights = jnp.sin(jnp.arange(24.0, dtype=jnp.float32)).reshape(6, 4)
    bound = bound_singular_values(0.5, per_layer=per_layer)

    def tangent(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.ones_like(leaf) if is_float else np.zeros(leaf.shape, jax.dtypes.float0)

    def chained(params, state):
        updates, state = bound.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return optax.apply_updates(params, updates), state

    def scanned(params, state):
        return jax.lax.scan(lambda carry, _: (bound.apply(*carry), None), (params, state), length=2)[0]

    def gradient(way):
        loss = lambda params: jnp.sum(way(params)["0"]["kernel"] * weights)  # noqa: E731
        return jax.grad(loss)(params)["0"]["kernel"]

    expected = gradient(lambda params: project(params, 0.5))
    assert float(jnp.abs(expected).max()) > 0.1
    # In forward mode the state, with its statistics, is differentiated too.
    jax.jvp(bound.apply, (params, bound.init(params)), jax.tree.map(tangent, (params, bound.init(params))))
    for step in (chained, bound.apply, scanned):
        found = gradient(lambda params, step=step: step(params, bound.init(params))[0])
        np.testing.assert_allclose(found, expected, atol=1e-5)
