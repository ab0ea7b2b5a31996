"""Clipping by products alone: every matrix into the band, and no farther from it than need be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from svb_jax._src.clip import matrix_functions, products
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.batched import clip_batched
from svb_jax._src.clip.products import clip_by_products
from svb_jax._src.stats import Clipped
from tests.prescribed import LOWER, UPPER, before_and_after, clipped, frame

BAND_TOLERANCE = 5e-6
ROWS, COLUMNS, BATCH = 24, 8, 3


@jax.jit
def compiled(matrices, lower, upper):
    """Clip a batch of matrices, which may be wide."""
    batch = Batch(matrices, lower, upper, jnp.ones(len(matrices), bool))
    return clip_batched([batch], clip_by_products, can_pad=True, is_partial=False)[0]


def bands(count, lower=LOWER, upper=UPPER, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    return jnp.full(count, lower, dtype), jnp.full(count, upper, dtype)


def batch_of(matrices) -> Batch:
    matrices = jnp.asarray(matrices)
    return Batch(matrices, *bands(len(matrices), dtype=matrices.dtype), jnp.ones(len(matrices), bool))


def clip(matrices, lower=LOWER, upper=UPPER) -> Clipped:
    matrices = jnp.asarray(matrices, jnp.float32)
    return compiled(matrices, *bands(len(matrices), lower, upper))


def assert_nearest(matrix, result, lower=LOWER, upper=UPPER) -> None:
    """Check the band in proportion to its ends, and the distance, both in float64."""
    size = np.abs(np.asarray(matrix, np.float64)).max() or 1.0
    matrix, result = np.asarray(matrix, np.float64) / size, np.asarray(result, np.float64)
    after = np.linalg.svd(result, compute_uv=False)
    assert after.min() >= lower * (1 - BAND_TOLERANCE)
    assert after.max() <= upper * (1 + BAND_TOLERANCE)
    before = np.linalg.svd(matrix, compute_uv=False)
    optimum = np.linalg.norm(np.clip(before, lower / size, upper / size) - before)
    distance = np.linalg.norm(result / size - matrix)
    assert distance <= (1 + 1e-5) * optimum + 1e-6 * np.linalg.norm(matrix)


def assert_all_nearest(matrices, lower=LOWER, upper=UPPER) -> Clipped:
    matrices = np.asarray(matrices, np.float32)
    result = clip(matrices, lower, upper)
    for before, after in zip(matrices, result.matrices, strict=True):
        assert_nearest(before, after, lower, upper)
    assert not any(result.is_missed)
    return result


def prescribed(values, seed=0) -> np.ndarray:
    """Return a batch of matrices of the same singular values."""
    return np.stack([frame(ROWS, COLUMNS, seed + i).matrix(values) for i in range(BATCH)])


@pytest.mark.parametrize("rows", [ROWS, COLUMNS])
def test_spectra_that_straddle_the_band_are_clipped_at_both_ends(rows):
    pairs = [before_and_after(rows, ROWS + COLUMNS - rows, seed) for seed in range(BATCH)]
    before, after = (np.stack(each) for each in zip(*pairs, strict=True))
    result = clip(before)
    np.testing.assert_allclose(result.matrices, after, rtol=0, atol=3e-6)
    # Two values of the eight of condition number 30 are inside the band.
    assert list(result.num_clipped) == [5] * BATCH
    assert all(result.is_exact)


@pytest.mark.parametrize("condition_number", [1.0, 2.5, 5.0])
def test_well_conditioned_matrices_need_no_more_than_their_gram_matrix(condition_number):
    values = np.geomspace(2.0, 2.0 / condition_number, COLUMNS)
    before, after = prescribed(values), prescribed(clipped(values))
    result = clip(before)
    np.testing.assert_allclose(result.matrices, after, rtol=0, atol=3e-6)
    assert not any(result.is_exact)
    assert list(result.num_clipped) == [np.sum((values < LOWER) | (values > UPPER))] * BATCH


def test_nor_do_wide_ones_for_the_narrowest_band():
    before = frame(640, 640).matrix(np.geomspace(1.84, 0.54, 640)).astype(np.float32)
    result = clip(before[None], 1.0, 1.0)
    assert not any(result.is_exact)
    assert_nearest(before, result.matrices[0], 1.0, 1.0)


def test_matrices_in_the_band_come_back():
    before = prescribed(np.linspace(0.7, 1.4, COLUMNS)).astype(np.float32)
    result = clip(before)
    np.testing.assert_allclose(result.matrices, before, rtol=0, atol=2e-7)
    assert not any(result.num_clipped)


def test_a_second_projection_clips_nothing():
    once = clip(prescribed(np.geomspace(3.0, 0.4, COLUMNS))).matrices
    again = clip(once)
    np.testing.assert_allclose(again.matrices, once, rtol=0, atol=5e-6)
    assert not any(again.num_clipped)


def test_one_difficult_matrix_leaves_the_others_alone():
    values = np.geomspace(2.0, 0.5, COLUMNS)
    alone = clip(prescribed(values))
    mixed = prescribed(values)
    mixed[1] = 0
    together = clip(mixed)
    assert list(together.is_exact) == [False, True, False]
    for index in (0, 2):
        np.testing.assert_array_equal(together.matrices[index], alone.matrices[index])
        assert together.num_clipped[index] == alone.num_clipped[index]


@pytest.mark.nan_inputs
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("values", [np.geomspace(2.0, 0.5, COLUMNS), np.geomspace(2.0, 1e-5, COLUMNS)])
def test_what_is_not_finite_or_not_active_is_left_alone_and_others_are_not(values, bad):
    matrices = jnp.asarray(prescribed(values), jnp.float32)
    alone = clip(matrices)
    batch = batch_of(matrices.at[0, 3, 2].set(bad))
    batch = batch._replace(is_active=jnp.array([True, True, False]), upper=batch.upper.at[2].set(jnp.nan))
    together = jax.jit(clip_by_products)(batch)
    assert list(together.is_skipped) == [True, False, True]
    assert not any(together.is_missed)
    assert list(together.is_exact) == [False, bool(alone.is_exact[1]), False]
    np.testing.assert_array_equal(together.matrices[1], alone.matrices[1])
    for left in (0, 2):
        np.testing.assert_array_equal(together.matrices[left], batch.matrices[left])


def ugly() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal((BATCH, ROWS, COLUMNS))
    duplicates, zero_columns, one_entry = gaussian.copy(), gaussian.copy(), np.zeros_like(gaussian)
    duplicates[:, :, 1] = duplicates[:, :, 0]
    duplicates[1] = duplicates[1, :1]
    zero_columns[:, :, 3:6] = 0
    one_entry[:, 2, 3] = 5.0
    return {
        "gaussian": gaussian,
        "zero": np.zeros_like(gaussian),
        "duplicates": duplicates,
        "zero columns": zero_columns,
        "one entry": one_entry,
        "constant": np.ones_like(gaussian),
        "near the largest number": np.full_like(gaussian, 2e38),
        "condition 1e7 downwards": prescribed(np.geomspace(1, 1e-7, COLUMNS)),
        "condition 1e7 upwards": prescribed(np.geomspace(1e7, 1, COLUMNS)),
        "huge": gaussian * 1e30,
        "tiny": gaussian * 1e-30,
        "one huge value": prescribed(np.r_[1e4, np.geomspace(2, 0.5, COLUMNS - 1)]),
    }


@pytest.mark.parametrize("name", ugly())
def test_any_matrix_ends_in_the_band(name):
    assert_all_nearest(ugly()[name])


@pytest.mark.parametrize(
    ("lower", "upper"), [(1.0, 1.0), (1 / 1.001, 1.001), (0.5, 1e7), (0.0, 1.0), (0.01, 0.011), (91.0, 110.0)]
)
def test_any_band(lower, upper):
    assert_all_nearest(prescribed(np.geomspace(3.0, 0.4, COLUMNS)), lower, upper)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 5)])
def test_small_shapes(shape):
    matrices = np.random.default_rng(0).standard_normal((BATCH, *shape)) * 3
    matrices[1] = 0
    assert_all_nearest(matrices)


def test_statistics_are_close_and_inside():
    values = np.geomspace(2.5, 0.3, COLUMNS)
    result = clip(prescribed(values))
    np.testing.assert_allclose(result.largest, 2.5, rtol=0.02)
    np.testing.assert_allclose(result.smallest, 0.3, rtol=0.02)
    assert np.all(result.largest <= 2.5 * (1 + 1e-6))
    assert np.all(result.smallest >= 0.3 * (1 - 1e-5))
    for name, matrices in ugly().items():
        figures = np.stack(clip(matrices)[1:4])
        assert np.isfinite(figures).all(), name


def test_float64_to_its_own_digits():
    with jax.enable_x64(True):
        values = np.geomspace(2.0, 1e-3, COLUMNS)
        before, after = prescribed(values), prescribed(clipped(values))
        result = clip_by_products(batch_of(before))
        np.testing.assert_allclose(result.matrices, after, rtol=0, atol=1e-12)


def test_under_vmap_and_strict_promotion():
    matrices = jnp.asarray(prescribed(np.geomspace(2.0, 0.5, COLUMNS)), jnp.float32)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        one_by_one = jax.vmap(lambda matrix: clip_by_products(batch_of(matrix[None])))(matrices)
    np.testing.assert_allclose(one_by_one.matrices[:, 0], clip(matrices).matrices, rtol=0, atol=1e-6)


def test_under_shard_map():
    matrices = jnp.asarray(prescribed(np.geomspace(2.0, 0.01, COLUMNS))[:2], jnp.float32)
    mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")
    sharded = jax.jit(jax.shard_map(clip_by_products, mesh=mesh, in_specs=spec, out_specs=spec))
    actual = sharded(batch_of(matrices)).matrices
    np.testing.assert_allclose(actual, clip(matrices).matrices, rtol=0, atol=1e-6)


def split(x: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 parts of float32 numbers, from the largest to the smallest."""
    parts = []
    for _ in range(3):
        # Not a cast there and back, which XLA may leave out.
        parts.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return parts


def matmul_of_tpu(a: jax.Array, b: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST) -> jax.Array:
    """Multiply as a TPU does: one, three or six products of bfloat16 parts, summed in float32."""
    most = {lax.Precision.DEFAULT: 0, lax.Precision.HIGH: 1, lax.Precision.HIGHEST: 2}[precision]
    pairs = [(i, j) for i in range(3) for j in range(3) if i + j <= most]
    left, right = split(a), split(b)
    # The small ones first.
    terms = [jnp.matmul(left[i], right[j]) for i, j in sorted(pairs, key=sum, reverse=True)]
    return jnp.sum(jnp.stack(terms), axis=0)


def matmul_of_gpu(a: jax.Array, b: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST) -> jax.Array:
    """Multiply as a GPU does: in float32 at the highest precision, with operands of TF32 below."""
    if precision != lax.Precision.HIGHEST:
        a, b = (lax.reduce_precision(each, exponent_bits=8, mantissa_bits=10) for each in (a, b))
    return jnp.matmul(a, b)


@pytest.fixture
def clip_with(monkeypatch):
    """Return the route with a product of one's own."""

    def patched(product):
        for module in (matrix_functions, products):
            monkeypatch.setattr(module, "matmul", product)
        return jax.jit(lambda *args: clip_by_products(*args))

    return patched


def random_matrices(rng: np.random.Generator) -> np.ndarray:
    """Return a batch of condition numbers from 1 to 1e8, of any size, with values at the ends of the band."""
    matrices = []
    for seed in rng.integers(1 << 30, size=BATCH):
        values = np.geomspace(1, 10.0 ** -rng.uniform(0, rng.choice([1, 8])), COLUMNS)
        values *= rng.choice([1.0, UPPER, 10.0 ** rng.uniform(-4, 4)])
        values[rng.integers(COLUMNS)] = rng.choice([LOWER, UPPER, UPPER * (1 + 1e-5)])
        matrices.append(frame(ROWS, COLUMNS, seed).matrix(values))
    return np.stack(matrices).astype(np.float32)


@pytest.mark.parametrize("product", [matmul_of_tpu, matmul_of_gpu])
def test_the_bounds_hold_in_the_arithmetic_of_an_accelerator(clip_with, product):
    rng, clip_there = np.random.default_rng(0), clip_with(product)
    for matrices in [*map(np.float32, ugly().values()), *(random_matrices(rng) for _ in range(40))]:
        result = clip_there(batch_of(matrices))
        for before, after in zip(matrices, result.matrices, strict=True):
            assert_nearest(before, after)
        assert not any(result.is_missed)


@pytest.mark.parametrize("product", [matmul_of_tpu, matmul_of_gpu])
def test_long_sums_leave_the_narrowest_band_in_reach(clip_with, product):
    # The first has a Gram matrix that will do, just so; the other does not.
    values = [np.geomspace(1.5, 1.5 / condition_number, 64) for condition_number in (5.0, 9.9)]
    before = np.float32([frame(576, 64, seed).matrix(each) for seed, each in enumerate(values)])
    result = clip_with(product)(Batch(before, *bands(2, 1.0, 1.0), jnp.ones(2, bool)))
    assert list(result.is_exact) == [False, True]
    for matrix, after in zip(before, result.matrices, strict=True):
        assert_nearest(matrix, after, 1.0, 1.0)


@pytest.mark.parametrize("product", [matmul_of_tpu, matmul_of_gpu])
def test_at_the_default_precision_of_an_accelerator_they_would_not(clip_with, product):
    def coarse(a: jax.Array, b: jax.Array, precision: lax.Precision = lax.Precision.DEFAULT) -> jax.Array:
        del precision
        return product(a, b, lax.Precision.DEFAULT)

    matrices = prescribed(np.geomspace(2.0, 0.5, COLUMNS)).astype(np.float32)
    after = clip_with(coarse)(batch_of(matrices)).matrices
    with pytest.raises(AssertionError):
        assert_nearest(matrices[0], after[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_spectra(seed):
    assert_all_nearest(random_matrices(np.random.default_rng(seed)))
