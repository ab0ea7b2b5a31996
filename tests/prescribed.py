"""Matrices of prescribed singular values, and by hand what a bound must make of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from svb_jax._src.leaves import matrix_leaves

EPSILON = 0.5
LOWER, UPPER = 1 / 1.5, 1.5

# Any two neighbours lie beyond different ends of the band, or one of them inside it.
SPECTRUM = np.array([3.0, 0.1, 1.2, 0.4, 2.0, 0.9, 0.5, 1.4])


class Frame(NamedTuple):
    """Singular vectors, to be given any singular values."""

    u: np.ndarray
    vt: np.ndarray

    def matrix(self, values) -> np.ndarray:
        return self.u * np.asarray(values) @ self.vt


def frame(rows: int, columns: int, seed: int = 0) -> Frame:
    rng = np.random.default_rng(seed)
    rank = min(rows, columns)
    u, _ = np.linalg.qr(rng.standard_normal((rows, rank)))
    v, _ = np.linalg.qr(rng.standard_normal((columns, rank)))
    return Frame(u, v.T)


def spectrum(size: int, seed: int = 0) -> np.ndarray:
    """Return singular values of which some lie beyond either end of the band."""
    return np.roll(SPECTRUM, -seed)[:size]


def clipped(values, lower: float = LOWER, upper: float = UPPER) -> np.ndarray:
    return np.minimum(np.maximum(values, lower), upper)


def band_violation(matrix, lower: float = LOWER, upper: float = UPPER) -> float:
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return max(lower - values.min(), values.max() - upper)


def assert_nearest_in_band(matrix, result, lower: float = LOWER, upper: float = UPPER) -> None:
    """Check the band and the distance, which is unique also where the nearest matrix is not."""
    exact, result = np.asarray(matrix, np.float64), np.asarray(result, np.float64)
    values = np.linalg.svd(exact, compute_uv=False)
    optimum = np.linalg.norm(np.clip(values, lower, upper) - values)
    assert band_violation(result, lower, upper) < 5e-6
    assert np.linalg.norm(result - exact) <= (1 + 1e-5) * optimum + 1e-6 * np.linalg.norm(exact)


def before_and_after(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix that straddles the band, and the nearest one inside."""
    vectors, values = frame(rows, columns, seed), spectrum(min(rows, columns), seed)
    return vectors.matrix(values), vectors.matrix(clipped(values))


# A network of two kernels and a BatchNorm. Its gradients keep the singular vectors, so that every step of
# plain gradient descent adds STEP to the singular values: whole runs can be followed by hand.
FRAMES = {"conv": frame(8, 8, seed=1), "dense": frame(8, 8, seed=2)}
STEP = np.array([0.2, 0.05, 0.1, -0.05, -0.1, -0.1, 0.3, 0.1])
SCALE = np.array([4.0, 0.2, 1.5, 1.0, 6.0, 1.0, 0.1, 0.7])
SCALE_STEP = np.array([0.5, -0.05, 0.2, 0.3, -1.0, 0.4, 0.2, -0.1])
STD = np.array([1.0, 2.0, 0.5, 1.0, 1.5, 0.25, 1.0, 0.5])
BATCH_STATS = {"bn": {"mean": np.zeros(8, np.float32), "var": (STD**2 - 1e-5).astype(np.float32)}}
BBN_EPSILON = 1.0


def network(spectra, scale) -> dict:
    """Return parameters, or gradients: a kernel for each spectrum, and a BatchNorm's scale."""
    shapes = {"conv": (2, 2, 2, 8), "dense": (8, 8)}
    kernels = {
        name: {"kernel": FRAMES[name].matrix(spectra[name]).reshape(shape)} for name, shape in shapes.items()
    }
    tree = {**kernels, "bn": {"scale": np.asarray(scale), "bias": np.zeros(8)}}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def start() -> dict:
    return network(dict.fromkeys(FRAMES, SPECTRUM), SCALE)


def gradients() -> dict:
    return network(dict.fromkeys(FRAMES, -STEP), -SCALE_STEP)


def bounded_scale(scale, epsilon: float = BBN_EPSILON, std=STD) -> np.ndarray:
    mean = np.mean(scale / std)
    return np.minimum(np.maximum(scale, mean * std / (1 + epsilon)), mean * std * (1 + epsilon))


def run_by_hand(moves, svb_at=(), bbn_at=(), free=()) -> list[dict]:
    """Return the parameters after each call of an optimizer whose learning rate is one.

    Args:
      moves: for each call, how many steps it takes at once.
      svb_at: the calls, counted from 1, that end in a projection.
      bbn_at: the calls that end in a bounding of scales.
      free: kernels that are never projected.
    """
    spectra, scale, states = dict.fromkeys(FRAMES, SPECTRUM), SCALE, []
    for call, steps in enumerate(moves, 1):
        spectra = {name: values + steps * STEP for name, values in spectra.items()}
        scale = scale + steps * SCALE_STEP
        if call in svb_at:
            spectra = {name: values if name in free else clipped(values) for name, values in spectra.items()}
        if call in bbn_at:
            scale = bounded_scale(scale)
        states.append(network(spectra, scale))
    return states


def assert_same(params, expected) -> None:
    """Compare trees of parameters to what float32 leaves of a run of a few steps."""
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), params, expected)


def kernels(*matrices) -> dict:
    return {str(i): {"kernel": jnp.asarray(matrix, jnp.float32)} for i, matrix in enumerate(matrices)}


def take_step(tx, params, grads, **extra):
    """Take one compiled step."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step(params, tx.init(params), grads)


def land(tx, params, **extra):
    """Return where a step of length zero lands, and the state."""
    return take_step(tx, params, jax.tree.map(jnp.zeros_like, params), **extra)


def matrices_by_path(params, dimension_numbers) -> dict[str, jax.Array]:
    """Return every leaf's matrices as a batch (count, reduction, output), by path."""
    values = jax.tree.leaves(params)
    leaves = matrix_leaves(params, dimension_numbers)
    return {leaf.path: leaf.to_matrices(values[leaf.index]) for leaf in leaves}
