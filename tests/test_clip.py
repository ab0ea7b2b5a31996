"""clip_singular_values against answers built by hand, on every route, type and ugly case."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import svb_jax
from svb_jax._src.clip import ROUTES, clip_batches
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import clip_batched, group_alike
from svb_jax._src.clip.cpu import clip_sequentially
from svb_jax._src.leaves import summarise
from tests.prescribed import LOWER, UPPER, assert_nearest_in_band, band_violation, frame

clip = jax.jit(svb_jax.clip_singular_values, static_argnames="method")


def batch_of(matrices, is_active=True):
    matrices = jnp.asarray(np.stack(matrices), jnp.float32)
    ends = (jnp.full(len(matrices), end, jnp.float32) for end in (LOWER, UPPER))
    return Batch(matrices, *ends, jnp.broadcast_to(jnp.asarray(is_active), len(matrices)))


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
    *(("products", condition) for condition in (4, 10, 100)),
]


@pytest.mark.parametrize(("method", "condition"), CASES)
@pytest.mark.parametrize("shape", [(160, 1440), (1440, 160), (64, 64)])
def test_lands_on_the_matrix_with_the_clipped_spectrum(shape, method, condition):
    matrix, answer = built(shape, straddling(min(shape), condition))
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER, method=method), np.float64)
    assert np.linalg.norm(clipped - answer, 2) < 1e-4
    assert band_violation(clipped) < 5e-6


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
def test_float64_is_exact_to_its_own_digits(method):
    with jax.enable_x64(True):
        matrix, answer = built((27, 16), straddling(16, 8))
        clipped = clip(jnp.asarray(matrix, jnp.float64), LOWER, UPPER, method=method)
        assert clipped.dtype == jnp.float64
        np.testing.assert_allclose(clipped, answer, atol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
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


@pytest.mark.parametrize("method", ["svd", "auto", "products"])
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


def test_gram_leaves_vanished_directions_alone_and_says_so():
    matrix = built((16, 27), straddling(16, 4))[0]
    matrix[3] = 0
    [clipped] = clip_batches([batch_of([matrix])], "gram")
    values = np.linalg.svd(np.asarray(clipped.matrices[0], np.float64), compute_uv=False)
    assert values[-1] < 1e-5
    assert clipped.is_missed.tolist() == [True]
    assert band_violation(values[:-1, None] * np.eye(15)) < 5e-6


@pytest.mark.parametrize("condition", [3, 10, 1000])
@pytest.mark.parametrize("shape", [(300, 257), (257, 300)])
def test_matrices_too_large_to_be_padded(shape, condition):
    matrix, answer = built(shape, straddling(min(shape), condition))
    clipped = np.asarray(clip(jnp.asarray(matrix, jnp.float32), LOWER, UPPER), np.float64)
    assert np.linalg.norm(clipped - answer, 2) < 1e-4
    assert band_violation(clipped) < 5e-6


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
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


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 3, 4, 5), (0, 4, 5), (3, 0, 5), (4, 0)])
def test_every_shape_comes_back_in_its_shape(method, shape):
    matrices = 3 * jax.random.normal(jax.random.key(0), shape)
    clipped = clip(matrices, LOWER, UPPER, method=method)
    assert clipped.shape == shape
    if matrices.size:
        assert max(band_violation(m) for m in clipped.reshape(-1, *shape[-2:])) < 5e-6


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30, 1e38])
def test_scales_whose_squares_leave_the_type(scale, method):
    matrix, _ = built((16, 27), scale * straddling(16, 4))
    matrix = jnp.asarray(matrix, jnp.float32)
    clipped = clip(matrix, LOWER, UPPER, method=method)
    assert_nearest_in_band(matrix, clipped)
    # Products of matrices far above the band keep their vectors to rounding errors of the matrix only.
    if scale < 1 or method != "products":
        answer = (UPPER if scale > 1 else LOWER) * built((16, 27), np.ones(16))[0]
        np.testing.assert_allclose(clipped, answer, atol=1e-5)


@pytest.mark.parametrize("method", ["svd", "auto", "products"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_singular_values_beyond_the_range_of_their_type(method, dtype):
    matrix = jnp.full((4, 4), 2e38, dtype)
    clipped = clip(matrix, 0.5, 2.0, method=method).astype(jnp.float32)
    # Beside such a value all others are its rounding errors: which end of the band they go to is open.
    tolerance = 5e-6 if dtype == jnp.float32 else 1e-2
    assert band_violation(clipped, 0.5, 2.0) < tolerance


@pytest.mark.parametrize("method", ["svd", "auto", "products"])
def test_the_band_holds_at_large_condition_numbers(method):
    matrix, _ = built((300, 300), 2 * np.geomspace(1e-7, 1, 300))
    clipped = clip(jnp.asarray(matrix, jnp.float32), 0.5, 2.0, method=method)
    values = np.linalg.svd(np.asarray(clipped, np.float64), compute_uv=False)
    assert values.min() >= 0.5 * (1 - 5e-6)
    assert values.max() <= 2.0 * (1 + 5e-6)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_a_matrix_inside_the_band_is_not_touched(method):
    matrix = jnp.asarray(built((16, 27), np.linspace(0.7, 1.4, 16))[0], jnp.float32)
    np.testing.assert_array_equal(clip(matrix, LOWER, UPPER, method=method), matrix)


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
def test_values_far_above_a_wide_band_end_in_it(method):
    matrix = frame(320, 160, 1).matrix(np.geomspace(10.0, 4.4, 160))
    clipped = clip(jnp.asarray(matrix, jnp.float32), 0.2, 5.0, method=method)
    # Relative to the band's end, to which all rounding errors are in proportion.
    assert band_violation(clipped, 0.2, 5.0) < 1.5e-6 * 5.0


@pytest.mark.parametrize("method", ["svd", "gram", "auto", "products"])
def test_equal_bounds_give_a_multiple_of_an_orthogonal_matrix(method):
    matrix = jnp.asarray(built((16, 27), straddling(16, 8))[0], jnp.float32)
    clipped = np.asarray(clip(matrix, 1.0, 1.0, method=method), np.float64)
    np.testing.assert_allclose(clipped @ clipped.T, np.eye(16), atol=5e-6)


@pytest.mark.parametrize(
    ("clip_all", "tolerance"),
    [
        (functools.partial(clip_sequentially, method="auto"), 1e-5),
        # Products estimate the extremes, to 2 % of the largest.
        (functools.partial(clip_batched, route=ROUTES["auto"], can_pad=True, is_partial=False), 0.08),
    ],
    ids=["sequential", "batched"],
)
def test_statistics_tell_the_spectrum_before_and_the_path(clip_all, tolerance):
    easy = built((16, 27), np.array([3.0, 0.8] + [1.0] * 14))[0]
    hard = built((16, 27), np.array([4.0, 0.01] + [1.0] * 14))[0]
    batch = batch_of([easy, hard, np.full((16, 27), np.nan)])
    stats = summarise(clip_all([batch]))
    assert float(stats.sigma_min) == pytest.approx(0.01, abs=tolerance)
    assert float(stats.sigma_max) == pytest.approx(4.0, abs=tolerance)
    assert [int(count) for count in stats[2:]] == [32, 3, 1, 0, 1]


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_inactive_matrices_come_back_as_they_are(method):
    batch = batch_of([built((6, 9), straddling(6, 4), seed)[0] for seed in range(4)])
    [whole] = clip_batches([batch], method)
    is_active = jnp.array([False, True, True, False])
    [part] = clip_batches([batch._replace(is_active=is_active)], method)
    expected = jnp.where(is_active[:, None, None], whole.matrices, batch.matrices)
    np.testing.assert_array_equal(part.matrices, expected)
    assert part.is_skipped.tolist() == [True, False, False, True]


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
@pytest.mark.parametrize("is_partial", [False, True])
def test_one_batch_as_on_accelerators_gives_what_one_by_one_gives(method, is_partial):
    matrices = [built((6, 9), straddling(6, 4), seed)[0] for seed in range(4)]
    matrices[2][0, 0] = np.nan
    batches = [
        batch_of(matrices[:3], [True, False, True]),
        batch_of(matrices[3:]),
        batch_of([np.eye(3)], False),
    ]
    expected = clip_sequentially(batches, method)
    actual = clip_batched(batches, ROUTES[method], can_pad=method == "auto", is_partial=is_partial)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.matrices, other.matrices, rtol=1e-5, atol=2e-6)
        np.testing.assert_array_equal(one.is_skipped, other.is_skipped)
    stats = [summarise(each) for each in (actual, expected)]
    assert int(stats[0].num_clipped) == int(stats[1].num_clipped)
    np.testing.assert_allclose(stats[0].sigma_max, stats[1].sigma_max, rtol=1e-4)


def test_a_program_for_other_platforms_is_made_on_any_machine():
    project = jax.jit(functools.partial(svb_jax.clip_singular_values, lower=LOWER, upper=UPPER))
    # Once called, a program for this machine is in the cache: it must not be taken for the others.
    project(jnp.eye(3))
    exported = jax.export.export(project, platforms=["cpu", "tpu", "cuda"])(jnp.eye(3))
    matrix, answer = built((3, 3), np.array([3.0, 1.0, 0.1]))
    np.testing.assert_allclose(exported.call(jnp.asarray(matrix, jnp.float32)), answer, atol=5e-6)


def test_the_program_for_tpu_has_no_decomposition():
    project = jax.jit(functools.partial(svb_jax.clip_singular_values, lower=LOWER, upper=UPPER))
    program = project.trace(jnp.ones((2, 9, 6))).lower(lowering_platforms=("tpu",)).as_text()
    assert "dot_general" in program
    assert "custom_call" not in program
    assert "cholesky" not in program


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (jnp.ones(3), 0.5, 2.0),
            r"needs real floating-point matrices of 16 bits or more and of shape \(..., m, n\), got float32 "
            r"of shape \(3,\)",
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
    with pytest.raises(ValueError, match="method to be one of auto, svd, gram, products, got 'qr'"):
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


BAD_BANDS = [(0.5, np.nan), (np.nan, 2.0), (2.0, 1.0), (-1.0, 2.0), (0.5, np.inf)]


@pytest.mark.parametrize("method", ["auto", "svd", "gram", "products"])
def test_a_traced_band_that_is_none_leaves_its_matrix_alone(method):
    matrices = jnp.stack([jnp.diag(jnp.array([3.0, 1.0, 0.1]))] * (len(BAD_BANDS) + 1))
    lower, upper = (jnp.array(ends) for ends in zip(*BAD_BANDS, (0.5, 2.0), strict=True))
    clipped = clip(matrices, lower, upper, method=method)
    np.testing.assert_array_equal(clipped[:-1], matrices[:-1])
    np.testing.assert_allclose(clipped[-1], np.diag([2.0, 1.0, 0.5]), atol=2e-6)


def test_colliding_paths_have_the_bands_that_describe_shows():
    params = {"a": {"b": 3 * jnp.eye(2)}, "a/b": 3 * jnp.eye(2), "z": 3 * jnp.eye(2)}
    options = {"epsilon": {"a": 0.1, "*": 1.0}, "dimension_numbers": svb_jax.every_matrix}
    projected = svb_jax.project(params, **options)
    tops = [float(leaf[0, 0]) for leaf in jax.tree.leaves(projected)]
    assert tops == pytest.approx([row.band[1] for row in svb_jax.describe(params, **options).rows])
    assert tops == pytest.approx([1.1, 1.1, 2.0])


def test_a_matrix_of_explicit_sharding_comes_back_as_it_lay():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        matrix = jax.device_put(3 * jnp.eye(8, 4), NamedSharding(mesh, PartitionSpec("d")))
        clipped = svb_jax.clip_singular_values(matrix, 0.5, 2.0)
        assert clipped.sharding.spec == PartitionSpec("d", None)
    np.testing.assert_allclose(clipped, 2 * np.eye(8, 4), atol=1e-6)


class TestPaddedRows:
    """Matrices that share a short side are clipped as one batch, the shorter ones with rows of zeros."""

    def clipped(self, *matrices):
        batches = [batch_of([matrix]) for matrix in matrices]
        return clip_batched(batches, ROUTES["products"], can_pad=True, is_partial=False)

    def test_they_are_grouped_by_their_short_side(self):
        shapes = [(2, 9, 4), (1, 4, 7), (3, 5, 5), (1, 4, 4), (1, 2048, 1024), (1, 1024, 1024)]
        batches = [jnp.zeros(shape) for shape in shapes]
        assert sorted(map(sorted, group_alike(batches, True))) == [[0, 1, 3], [2], [4], [5]]
        assert sorted(map(sorted, group_alike(batches, False))) == [[0], [1], [2], [3], [4], [5]]

    @pytest.mark.parametrize("rank", [0, 1, 2, 4])
    def test_what_vanished_is_lifted_in_a_matrix_own_rows(self, rank):
        tall = frame(40, 4).matrix([3.0, 1.2, 0.9, 0.1])
        spectrum = np.array([2.0, 1.0, 0.8, 0.3]) * (np.arange(4) < rank)
        short = frame(4, 6, seed=1).matrix(spectrum)
        for before, after in zip((tall, short), self.clipped(tall, short), strict=True):
            assert after.matrices.shape[1:] == before.shape
            assert_nearest_in_band(np.float32(before), after.matrices[0])
