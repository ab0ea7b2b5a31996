"""The paper's theory, in float64: what docs/method.md states, checked against automatic differentiation.

The paper prints the gradients of its equations 2, 4, 5, 7, 8 and 9 without their minus sign.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svb_jax import clip_singular_values, folded_singular_values, project_batch_norm

EPSILONS = (1.0, 0.1, 1e-3, 0.0)
WIDTHS = (5, 4, 6, 3)  # from the input to the output of a network of three layers
DEPTH = len(WIDTHS) - 1
SHORTEST = min(WIDTHS)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def orthogonal(rng, size):
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


def diagonal(values, rows, columns):
    """Return a matrix (rows, columns) with these values on its diagonal, zeros after them."""
    matrix = np.zeros((rows, columns))
    matrix[range(len(values)), range(len(values))] = values
    return matrix


def chain(matrices):
    """Return the product of layers, the first of them applied first."""
    return functools.reduce(lambda product, matrix: matrix @ product, matrices)


@jax.jit
def bound(matrices, epsilon):
    return clip_singular_values(matrices, 1 / (1 + epsilon), 1 + epsilon, method="svd")


class TestLemma1:
    """Singular values of G W, where W's are all 1 and G is diagonal: BatchNorm after an orthogonal layer."""

    # Of either sign, and none alike.
    GAINS = np.array([0.3, -2.0, 1.1, -0.7, 4.0])

    def folded(self, rng, inputs):
        kernel = bound(rng.standard_normal((inputs, 5)), 0.0)  # W transposed: (in, out)
        params = {"dense": {"kernel": kernel}, "norm": {"scale": 3.0 * self.GAINS}}
        stats = {"norm": {"var": np.full(5, 9.0)}}
        return folded_singular_values(params, stats, [("dense/kernel", "norm")], bn_epsilon=0.0)[
            "dense/kernel"
        ]

    @pytest.mark.parametrize("inputs", [5, 8])
    def test_fat_matrices_have_exactly_the_gains(self, rng, inputs):
        np.testing.assert_allclose(self.folded(rng, inputs), np.sort(np.abs(self.GAINS))[::-1], rtol=1e-12)

    @pytest.mark.parametrize("inputs", [1, 3, 4])
    def test_tall_matrices_stay_between_the_smallest_and_the_largest_gain(self, rng, inputs):
        for _ in range(20):
            values = self.folded(rng, inputs)
            assert values.shape == (inputs,)
            # Strictly between: a tall matrix mixes the gains of its outputs.
            assert np.all((values > 0.3) & (values < 4.0))


@pytest.mark.parametrize("inputs", [3, 8])
def test_svb_and_bbn_together_bound_the_folded_layer(rng, inputs):
    weight_epsilon, scale_epsilon = 0.5, 0.2
    limit = (1 + weight_epsilon) * (1 + scale_epsilon) * (1 + 1e-12)
    pairs = [("dense/kernel", "norm")]
    largest_without_bbn = 0
    for _ in range(10):
        kernel = bound(rng.standard_normal((inputs, 5)) * rng.uniform(0.1, 3, 5), weight_epsilon)
        params = {"dense": {"kernel": kernel}, "norm": {"scale": jnp.asarray(rng.uniform(1, 20, 5))}}
        stats = {"norm": {"var": jnp.asarray(rng.uniform(0.1, 9, 5))}}
        alpha = np.mean(params["norm"]["scale"] / np.sqrt(stats["norm"]["var"] + 1e-5))
        bounded = project_batch_norm(params, stats, scale_epsilon)
        values = folded_singular_values(bounded, stats, pairs)["dense/kernel"] / alpha
        assert np.all((values >= 1 / limit) & (values <= limit))
        unbounded = folded_singular_values(params, stats, pairs)["dense/kernel"] / alpha
        largest_without_bbn = max(largest_without_bbn, unbounded.max())
    assert largest_without_bbn > 1.2 * limit


class DeepLinear:
    """A deep linear network with layers aligned to each other and to its whitened data."""

    def __init__(self, rng):
        num_samples = WIDTHS[0]
        self.inputs = np.sqrt(num_samples) * orthogonal(rng, num_samples)  # columns; C^xx is the identity
        self.targets = rng.standard_normal((WIDTHS[-1], num_samples))
        self.correlation = self.targets @ self.inputs.T / num_samples
        left, self.sigma, right = np.linalg.svd(self.correlation)
        self.frames = [right.T, *(orthogonal(rng, width) for width in WIDTHS[1:-1]), left]
        self.strengths = rng.uniform(0.5, 1.5, (DEPTH, SHORTEST))

    def layers(self, strengths):
        shapes = zip(WIDTHS[1:], WIDTHS[:-1], strict=True)
        diagonals = [diagonal(s, *shape) for s, shape in zip(strengths, shapes, strict=True)]
        return [self.frames[i + 1] @ d @ self.frames[i].T for i, d in enumerate(diagonals)]

    def loss(self, layers):
        residuals = self.targets - chain(layers) @ self.inputs
        return jnp.sum(residuals**2) / (2 * self.inputs.shape[1])

    def energy(self, strengths):
        """Equation 10, summed over the directions."""
        return jnp.sum((self.sigma - jnp.prod(strengths, axis=0)) ** 2) / 2


@pytest.fixture
def network(rng):
    return DeepLinear(rng)


class TestForward:
    def test_gradient_of_two_layers_is_minus_equation_2(self, rng):
        # Data that is not whitened, layers that are not aligned.
        x, y = rng.standard_normal((5, 9)), rng.standard_normal((3, 9))
        first, second = rng.standard_normal((4, 5)), rng.standard_normal((3, 4))

        def loss(first, second):
            return jnp.sum((y - second @ first @ x) ** 2) / (2 * 9)

        residual = y @ x.T / 9 - second @ first @ x @ x.T / 9
        gradients = jax.grad(loss, (0, 1))(first, second)
        np.testing.assert_allclose(gradients[0], -second.T @ residual, rtol=1e-12)
        np.testing.assert_allclose(gradients[1], -residual @ first.T, rtol=1e-12)

    def test_gradient_of_deep_layers_is_minus_equation_7(self, rng, network):
        layers = [rng.standard_normal(shape) for shape in zip(WIDTHS[1:], WIDTHS[:-1], strict=True)]
        residual = network.correlation - chain(layers)
        for i, gradient in enumerate(jax.grad(network.loss)(layers)):
            above = chain([np.eye(WIDTHS[i + 1]), *layers[i + 1 :]])
            below = chain([np.eye(WIDTHS[0]), *layers[:i]])
            np.testing.assert_allclose(gradient, -above.T @ residual @ below.T, rtol=1e-12, atol=1e-13)

    def test_gradient_of_aligned_layers_is_the_scalar_energys(self, network):
        of_layers = jax.grad(network.loss)(network.layers(network.strengths))
        of_energy = jax.grad(network.energy)(network.strengths)
        for i, (gradient, expected) in enumerate(zip(of_layers, of_energy, strict=True)):
            in_frames = network.frames[i + 1].T @ gradient @ network.frames[i]
            # No direction's gradient leaks into another's: zero off the diagonal.
            np.testing.assert_allclose(in_frames, diagonal(expected, *gradient.shape), atol=1e-13)

    def test_gradient_of_the_energy_is_minus_equation_9(self, network):
        strengths = network.strengths
        gap = network.sigma - strengths.prod(axis=0)
        for i, gradient in enumerate(jax.grad(network.energy)(strengths)):
            others = np.delete(strengths, i, axis=0).prod(axis=0)
            np.testing.assert_allclose(gradient, -others * gap, rtol=1e-12)

    def test_gradient_descent_trains_each_direction_on_its_own(self, network):
        layers, strengths = network.layers(network.strengths), jnp.asarray(network.strengths)
        of_layers, of_energy = jax.jit(jax.grad(network.loss)), jax.jit(jax.grad(network.energy))
        for _ in range(300):
            layers = [w - 0.1 * g for w, g in zip(layers, of_layers(layers), strict=True)]
            strengths = strengths - 0.1 * of_energy(strengths)
        for layer, expected in zip(layers, network.layers(strengths), strict=True):
            np.testing.assert_allclose(layer, expected, atol=1e-10)
        np.testing.assert_allclose(jnp.prod(strengths, axis=0), network.sigma, rtol=1e-6)


class TestMixing:
    """Equation 11: how strongly a direction of one layer feeds a direction of the next."""

    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_strengths_are_bounded_with_the_layers(self, rng, epsilon):
        first, second = bound(3 * rng.standard_normal((2, 6, 6)), epsilon)
        u1, s1, vt1 = np.linalg.svd(first)
        u2, s2, vt2 = np.linalg.svd(second)
        mixing = u2.T @ np.asarray(second @ first) @ vt1.T
        for m in range(6):
            for other in range(6):
                expected = s2[m] * s1[other] * (vt2[m] @ u1[:, other])
                assert mixing[m, other] == pytest.approx(expected, abs=1e-12)
        limit = (1 + epsilon) ** 2 * (1 + 1e-12)
        assert np.abs(mixing).max() <= limit
        # More than the entries: no mixture of directions leaves the band's square, on either side.
        values = np.linalg.svd(mixing, compute_uv=False)
        assert values.max() <= limit
        assert values.min() >= 1 / limit

    def test_without_bounds_strengths_exceed_it(self, rng):
        first, second = 3 * rng.standard_normal((2, 6, 6))
        u2, vt1 = np.linalg.svd(second)[0], np.linalg.svd(first)[2]
        assert np.abs(u2.T @ second @ first @ vt1.T).max() > (1 + max(EPSILONS)) ** 2

    def test_aligned_layers_do_not_mix_and_attain_the_bound(self, rng):
        frames = [orthogonal(rng, 4) for _ in range(3)]
        strengths = np.array([[9.0, 1.2, 1.0, 0.01], [7.0, 1.1, 0.9, 0.02]])
        layers = [frames[i + 1] @ np.diag(s) @ frames[i].T for i, s in enumerate(strengths)]
        first, second = bound(np.stack(layers), 0.5)
        mixing = frames[2].T @ np.asarray(second @ first) @ frames[0]
        np.testing.assert_allclose(mixing, np.diag([1.5**2, 1.2 * 1.1, 0.9, 1 / 1.5**2]), atol=1e-12)


class TestBackward:
    """Equations 12 and 13: what is left of an error vector ``NUM_LAYERS`` layers further down."""

    NUM_LAYERS = 7

    def propagate(self, layers, error):
        """Return the loss' gradient at the layers' input, where ``error`` is that at their output."""

        def through(x):
            return jnp.dot(error, functools.reduce(lambda x, layer: layer @ x, layers, x))

        return np.asarray(jax.grad(through)(jnp.zeros(layers[0].shape[1])))

    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_equal_widths_preserve_the_errors_norm(self, rng, epsilon):
        free, error = rng.standard_normal((self.NUM_LAYERS, 6, 6)), rng.standard_normal(6)
        layers = bound(free, epsilon)
        propagated = self.propagate(layers, error)
        np.testing.assert_allclose(propagated, chain(layers).T @ error, rtol=1e-10)
        growth = np.linalg.norm(propagated) / np.linalg.norm(error)
        limit = (1 + epsilon) ** self.NUM_LAYERS * (1 + 1e-12)
        assert 1 / limit <= growth <= limit

    @pytest.mark.parametrize("epsilon", EPSILONS)
    @pytest.mark.parametrize("widths", [(6, 6, 6, 6), WIDTHS, (3, 7, 4, 5)], ids=str)
    def test_every_component_of_the_error_survives(self, rng, widths, epsilon):
        frames = [orthogonal(rng, width) for width in widths]
        num_components = min(widths)
        # Left alone, these would make some components explode and others vanish.
        strengths = np.geomspace(1e3, 1e-3, num_components)
        layers = []
        for i, shape in enumerate(zip(widths[1:], widths[:-1], strict=True)):
            free = frames[i + 1] @ diagonal(strengths, *shape) @ frames[i].T
            layers.append(np.asarray(bound(free, epsilon)))
        error = rng.standard_normal(widths[-1])
        before = (frames[-1].T @ error)[:num_components]
        after = (frames[0].T @ self.propagate(layers, error))[:num_components]
        expected = np.clip(strengths, 1 / (1 + epsilon), 1 + epsilon) ** 3
        np.testing.assert_allclose(after / before, expected, rtol=1e-9)
        assert np.all(np.abs(np.log(after / before)) <= 3 * np.log1p(epsilon) + 1e-9)

    def test_a_bottleneck_preserves_its_components_but_not_the_norm(self, rng):
        widths = (6, 2, 6)
        layers = [
            bound(rng.standard_normal(shape), 0.0) for shape in zip(widths[1:], widths[:-1], strict=True)
        ]
        inside = np.asarray(layers[1]) @ rng.standard_normal(2)
        outside = rng.standard_normal(6)
        norm = np.linalg.norm
        assert norm(self.propagate(layers, inside)) == pytest.approx(norm(inside), rel=1e-12)
        assert norm(self.propagate(layers, outside)) < 0.99 * norm(outside)
