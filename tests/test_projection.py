"""clip_singular_values against answers built by hand, on every route, type and ugly case."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import svb_jax
from svb_jax.projection import clip_stacks
from svb_jax.reading import empty_reading
from svb_jax.routes import lower_square
from svb_jax.stacks import Share, Stacks
from tests.prescribed import LOWER, UPPER, assert_nearest_in_band, band_violation, frame

clip = jax.jit(svb_jax.clip_singular_values, static_argnames="method")


def clip_stack(stack, method, share=None):
    shares = None if share is None else [[share]]
    [clipped], reading = clip_stacks(
        [Stacks.of([stack])], [[(LOWER, UPPER)]], method, empty_reading(jnp.zeros(())), shares
    )
    return clipped.split()[0], reading


def straddling(count: int, condition: float) -> np.ndarray:
    """Return a spectrum with values below, inside and above the band."""
    return np.geomspace(2.0 / condition, 2.0, count)


def built(shape: tuple[int, int], spectrum: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix of this spectrum, and the same matrix with its spectrum clipped."""
    vectors = frame(*shape, seed)
    return vectors.matrix(spectrum), vectors.matrix(np.clip(spectrum, LOWER, UPPER))


CASES = [
    *(("svd", condition) for condition in (4, 10, 1000)),
    *(("auto", condition) for condition in (4, 10, 1000)),
    *(("gram", condition) for condition in (4, 10)),
    *(("polar", condition) for condition in (4, 100)),
]


@pytest.mark.parametrize(("method", "condition"), CASES)
@pytest.mark.parametrize("shape", [(160, 1440), (1440, 160), (64, 64)])
def test_lands_on_the_matrix_with_the_clipped_spectrum(shape, method, condition):
    matrix, answer = built(shape, straddling(min(shape), condition))
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER, method=method), np.float64)
    assert np.linalg.norm(clipped - answer, 2) < 1e-4
    assert band_violation(clipped) < 5e-6


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "polar"])
def test_float64_is_exact_to_its_own_digits(method):
    with jax.enable_x64(True):
        matrix, answer = built((27, 16), straddling(16, 8))
        clipped = clip(jnp.asarray(matrix, jnp.float64), LOWER, UPPER, method=method)
        assert clipped.dtype == jnp.float64
        # The products of the polar route stop where a value's distance to the band's end no longer matters.
        np.testing.assert_allclose(clipped, answer, atol=1e-9 if method == "polar" else 1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("method", ["svd", "gram", "auto", "polar"])
def test_half_types_store_the_rounding_of_the_exact_projection(method, dtype):
    matrix = jnp.asarray(built((27, 16), straddling(16, 8))[0], dtype)
    u, s, vt = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    exact = jnp.asarray((u * np.clip(s, LOWER, UPPER)) @ vt, dtype)
    clipped = clip(matrix, LOWER, UPPER, method=method)
    assert clipped.dtype == dtype
    # An entry may round the other way only where it lies between two numbers of the type.
    assert np.mean(np.asarray(clipped) != np.asarray(exact)) < 0.01
    assert (
        np.max(np.abs(np.asarray(clipped, np.float32) - np.asarray(exact, np.float32)))
        <= jnp.finfo(dtype).eps
    )


@pytest.mark.parametrize("method", ["svd", "auto"])
@pytest.mark.parametrize("kind", ["zero", "zero row", "duplicate rows", "rank one"])
def test_vanished_directions_are_lifted_to_the_lower_bound(method, kind):
    matrix = built((16, 27), straddling(16, 4))[0]
    if kind == "zero":
        matrix[:] = 0
    elif kind == "zero row":
        matrix[3] = 0
    elif kind == "duplicate rows":
        matrix[5] = matrix[4] = matrix[3]
    else:
        matrix = np.outer(matrix[0], np.ones(27))
    matrix = jnp.asarray(matrix, jnp.float32)
    assert_nearest_in_band(matrix, clip(matrix, LOWER, UPPER, method=method))


@pytest.mark.parametrize("method", ["gram", "polar"])
def test_other_routes_leave_vanished_directions_alone(method):
    matrix = built((16, 27), straddling(16, 4))[0]
    matrix[3] = 0
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER, method=method), np.float64)
    values = np.linalg.svd(clipped, compute_uv=False)
    assert values[-1] < 1e-5
    assert band_violation(values[:-1, None] * np.eye(15)) < 5e-6


def test_gram_leaves_a_matrix_whose_square_overflows():
    matrix = jnp.asarray(built((16, 27), 1e30 * straddling(16, 4))[0], jnp.float32)
    np.testing.assert_array_equal(clip(matrix, LOWER, UPPER, method="gram"), matrix)


@pytest.mark.parametrize("shape", [(300, 257), (256, 300), (256, 256), (300, 20)])
def test_the_lower_square_is_the_square_below_its_diagonal(shape):
    matrix = frame(*shape).matrix(np.linspace(1, 2, min(shape)))
    exact = matrix.T @ matrix if shape[0] >= shape[1] else matrix @ matrix.T
    # Some hundred products of about 0.01 each are summed up in float32.
    np.testing.assert_allclose(jnp.tril(lower_square(jnp.float32(matrix))), np.tril(exact), atol=1e-5)


# Up to an eighth and up to three eighths of 256 values have ways of their own; either side of both.
@pytest.mark.parametrize(
    ("below", "above"), [(1, 0), (0, 1), (20, 12), (20, 13), (60, 36), (60, 37), (96, 0), (0, 96), (200, 50)]
)
@pytest.mark.parametrize("shape", [(300, 256), (256, 300)])
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_wide_matrices_with_few_or_many_values_outside(shape, below, above, method):
    inside = np.linspace(LOWER + 0.01, UPPER - 0.01, 256 - below - above)
    values = np.concatenate([np.geomspace(0.5, 0.6, below), inside, np.geomspace(1.6, 1.8, above)])
    matrix, answer = built(shape, np.random.default_rng(0).permutation(values))
    with jax.enable_x64(True):
        clipped = clip(jnp.asarray(matrix), LOWER, UPPER, method=method)
    np.testing.assert_allclose(clipped, answer, atol=1e-13)


def test_a_wide_matrix_with_few_values_far_outside():
    # It is not kept but built anew, for which few vectors are not enough.
    matrix, answer = built((300, 256), np.r_[np.full(255, 1.0), 2.5])
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER), np.float64)
    assert np.linalg.norm(clipped - answer, 2) < 5e-6


@pytest.mark.parametrize("condition", [3, 10, 1000])
@pytest.mark.parametrize("shape", [(300, 257), (257, 300)])
def test_wide_matrices_decomposed_by_their_lower_triangle(shape, condition):
    matrix, answer = built(shape, straddling(min(shape), condition))
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER), np.float64)
    assert np.linalg.norm(clipped - answer, 2) < 1e-4
    assert band_violation(clipped) < 5e-6


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "polar"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_is_left_alone_and_spoils_no_other(method, bad):
    good, answer = built((16, 27), straddling(16, 4))
    spoilt = good.copy()
    spoilt[2, 5] = bad
    stack = jnp.asarray(np.stack([good, spoilt, good]), jnp.float32)
    clipped = clip(stack, LOWER, UPPER, method=method)
    np.testing.assert_array_equal(clipped[1], stack[1])
    np.testing.assert_allclose(clipped[0], answer, atol=2e-5)
    np.testing.assert_allclose(clipped[2], answer, atol=2e-5)


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "polar"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 3, 4, 5), (0, 4, 5), (3, 0, 5), (4, 0)])
def test_every_shape_comes_back_in_its_shape(method, shape):
    matrices = 3 * jax.random.normal(jax.random.key(0), shape)
    clipped = clip(matrices, LOWER, UPPER, method=method)
    assert clipped.shape == shape
    if matrices.size:
        assert max(band_violation(m) for m in clipped.reshape(-1, *shape[-2:])) < 5e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_auto_takes_scales_whose_squares_leave_the_type(scale):
    matrix, _ = built((16, 27), scale * straddling(16, 4))
    clipped = clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER)
    bound = UPPER if scale > 1 else LOWER
    answer = bound * built((16, 27), np.ones(16))[0]
    np.testing.assert_allclose(clipped, answer, atol=1e-5)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_a_matrix_inside_the_band_is_not_touched(method):
    matrix = jnp.asarray(built((16, 27), np.linspace(0.7, 1.4, 16))[0], jnp.float32)
    np.testing.assert_array_equal(clip(matrix, LOWER, UPPER, method=method), matrix)


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "polar"])
def test_equal_bounds_give_a_multiple_of_an_orthogonal_matrix(method):
    matrix = jnp.asarray(built((16, 27), straddling(16, 8))[0], jnp.float32)
    clipped = np.asarray(clip(matrix, 1.0, 1.0, method=method), np.float64)
    np.testing.assert_allclose(clipped @ clipped.T, np.eye(16), atol=5e-6)


def test_a_reading_tells_the_spectrum_before_and_the_route():
    easy = built((16, 27), np.array([3.0, 0.5] + [1.0] * 14))[0]
    hard = built((16, 27), np.array([4.0, 0.01] + [1.0] * 14))[0]
    stack = jnp.asarray(np.stack([easy, hard, np.full((16, 27), np.nan)]), jnp.float32)
    _, reading = clip_stack(stack, "auto")
    assert float(reading.smallest) == pytest.approx(0.01, abs=1e-5)
    assert float(reading.largest) == pytest.approx(4.0, abs=1e-5)
    assert reading.counts.tolist() == [4, 32, 1, 1]


def test_a_share_clips_its_part_only():
    stack = jnp.asarray(
        np.stack([built((6, 9), straddling(6, 4), seed)[0] for seed in range(4)]), jnp.float32
    )
    whole, _ = clip_stack(stack, "auto")
    part, reading = clip_stack(stack, "auto", Share(1, 2, 3))
    np.testing.assert_array_equal(part, jnp.stack([stack[0], whole[1], whole[2], stack[3]]))
    assert int(reading.values) == 12


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_together_as_on_accelerators_gives_what_one_by_one_gives(method, monkeypatch):
    stack = jnp.asarray(
        np.stack([built((6, 9), straddling(6, 4), seed)[0] for seed in range(4)]), jnp.float32
    )
    stack = stack.at[2, 0, 0].set(jnp.nan)
    share = Share(1, 2, 3)
    expected = clip_stack(stack, method, share)

    def as_elsewhere(*args, cpu, default):
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", as_elsewhere)
    jax.clear_caches()
    with svb_jax.all_platforms():
        actual = clip_stack(stack, method, share)
    jax.clear_caches()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


def test_without_accelerators_only_what_is_asked_for_is_traced_for_them():
    project = jax.jit(functools.partial(svb_jax.clip_singular_values, lower=LOWER, upper=UPPER))
    with pytest.raises(NotImplementedError, match="not found for platform tpu"):
        jax.export.export(project, platforms=["tpu"])(jnp.eye(3))
    project.clear_cache()
    with svb_jax.all_platforms():
        exported = jax.export.export(project, platforms=["cpu", "tpu", "cuda"])(jnp.eye(3))
    matrix, answer = built((3, 3), np.array([3.0, 1.0, 0.1]))
    np.testing.assert_allclose(exported.call(jnp.asarray(matrix, jnp.float32)), answer, atol=5e-6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (jnp.ones(3), 0.5, 2.0),
            r"needs real floating-point matrices of shape \(..., m, n\), got float32 of shape \(3,\)",
        ),
        ((jnp.ones((3, 3), int), 0.5, 2.0), "needs real floating-point matrices"),
        ((jnp.eye(3), 2.0, 0.5), "needs 0 <= lower <= upper < inf, got lower=2.0 and upper=0.5"),
        ((jnp.eye(3), -1.0, 0.5), "needs 0 <= lower <= upper < inf, got lower=-1.0"),
        ((jnp.eye(3), 0.5, np.inf), "needs 0 <= lower <= upper < inf"),
    ],
)
def test_wrong_calls_are_told_what_is_needed(arguments, sentence):
    with pytest.raises(ValueError, match=f"clip_singular_values {sentence}"):
        svb_jax.clip_singular_values(*arguments)


def test_an_unknown_method_is_told_the_known_ones():
    with pytest.raises(ValueError, match="method to be one of auto, svd, gram, polar, got 'qr'"):
        svb_jax.clip_singular_values(jnp.eye(3), 0.5, 2.0, method="qr")


SHAPES = [
    (1, 1),
    (1, 7),
    (5, 1),
    (3, 3),
    (4, 9),
    (16, 27),
    (10, 64),
    (64, 10),
    (64, 64),
    (64, 576),
    (576, 64),
]


@st.composite
def matrices(draw, shapes):
    """Draw a matrix of any rank, scale and spread, in float32, bfloat16 or float16."""
    shape = draw(st.sampled_from(shapes))
    rank = draw(st.integers(0, min(shape)))
    scale = 10.0 ** draw(st.floats(-6, 6))
    spread = 10.0 ** draw(st.floats(0, 6))
    seed = draw(st.integers(0, 2**32 - 1))
    spectrum = np.zeros(min(shape))
    spectrum[:rank] = scale * spread ** -np.random.default_rng(seed).uniform(0, 1, rank)
    dtype = draw(st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16]))
    return jnp.asarray(frame(*shape, seed).matrix(spectrum), dtype)


def is_nearest_in_band(matrix, epsilon):
    lower, upper = 1 / (1 + epsilon), 1 + epsilon
    wide = matrix.astype(jnp.float32)
    clipped = clip(wide, lower, upper)
    assert_nearest_in_band(wide, clipped, lower, upper)
    # A half type's answer is that of the same numbers in float32, rounded once.
    np.testing.assert_array_equal(
        clip(matrix, lower, upper).astype(jnp.float32), jnp.asarray(clipped, matrix.dtype).astype(jnp.float32)
    )


EPSILONS = st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0, 4.0])


# The same examples in every run, so that a failure is a change's own; the slow search below is always new.
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(matrices(SHAPES), EPSILONS)
def test_auto_is_never_silently_wrong(matrix, epsilon):
    is_nearest_in_band(matrix, epsilon)


@pytest.mark.slow
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(matrices([*SHAPES, (160, 1440), (256, 2304), (2304, 256), (256, 256)]), EPSILONS)
def test_auto_is_never_silently_wrong_on_large_matrices(matrix, epsilon):
    is_nearest_in_band(matrix, epsilon)
