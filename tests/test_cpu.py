"""What CPUs need: matrices one at a time, small ones padded to shapes they share."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import svb_jax
from svb_jax._src.clip.batch import Batch
from svb_jax._src.clip.cpu import clip_sequentially
from svb_jax._src.clip.cpu.buckets import LARGEST_PADDING_RATIO, make_buckets
from svb_jax._src.clip.cpu.slices import opaque_zero, slice_at
from svb_jax._src.leaves import summarise
from svb_jax.ahead_of_time.fusions import list_fusions
from tests.prescribed import LOWER, UPPER, assert_nearest_in_band, frame, kernels, matrices_by_path

SHAPES = [(27, 16), (9, 12), (16, 16), (30, 4), (4, 30), (1, 1), (7, 1), (1, 7), (12, 20)]

project = jax.jit(svb_jax.project, static_argnames="method")


def zeros(*shapes):
    return [jnp.zeros(shape) for shape in shapes]


def batches_of(shapes, count=1, values=lambda size: np.geomspace(3.0, 0.4, size)):
    return [
        batch_of(np.stack([frame(*shape, seed).matrix(values(min(shape))) for seed in range(count)]))
        for shape in shapes
    ]


def batch_of(matrices, lower=LOWER, upper=UPPER):
    ends = (jnp.full(len(matrices), end, jnp.float32) for end in (lower, upper))
    return Batch(jnp.asarray(matrices, jnp.float32), *ends, jnp.ones(len(matrices), bool))


def test_buckets_hold_every_batch_once_and_are_no_larger_than_agreed():
    convnet_38 = zeros(
        (1, 27, 16), (12, 144, 16), (1, 144, 32), (11, 288, 32), (1, 288, 64), (11, 576, 64), (1, 64, 10)
    )
    buckets = make_buckets(convnet_38)
    assert sorted(member for bucket in buckets for member in bucket.members) == list(range(7))
    assert len(buckets) <= 2
    for bucket in buckets:
        for member in bucket.members:
            assert np.prod(bucket.shape) <= LARGEST_PADDING_RATIO * np.prod(convnet_38[member].shape[1:])


def test_buckets_do_not_depend_on_the_number_of_matrices():
    shapes = [(27, 16), (144, 16), (288, 32), (576, 64), (64, 10)]
    one = make_buckets(zeros(*((1, *shape) for shape in shapes)))
    many = make_buckets(zeros(*((7 * index + 1, *shape) for index, shape in enumerate(shapes))))
    assert one == many


def test_large_matrices_are_not_padded_and_types_are_not_mixed():
    assert len(make_buckets(zeros((1, 300, 256), (1, 256, 256)))) == 2
    assert len(make_buckets(zeros((1, 300, 256), (2, 300, 256)))) == 1
    assert len(make_buckets(zeros((1, 5760, 640), (1, 5760, 640)))) == 2
    assert len(make_buckets([jnp.zeros((1, 4, 4)), jnp.zeros((1, 4, 4), jnp.bfloat16)])) == 2


@st.composite
def padded(draw):
    """Draw a matrix of every shape, each of any rank, scale and spread."""
    matrices = []
    for shape in SHAPES:
        rank, seed = draw(st.integers(0, min(shape))), draw(st.integers(0, 2**32 - 1))
        scale, spread = 10.0 ** draw(st.floats(-6, 6)), 10.0 ** draw(st.floats(0, 6))
        spectrum = np.zeros(min(shape))
        spectrum[:rank] = scale * spread ** -np.random.default_rng(seed).uniform(0, 1, rank)
        matrices.append(frame(*shape, seed).matrix(spectrum))
    return kernels(*matrices)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(padded(), st.sampled_from([0.0, 0.05, 0.5, 4.0]), st.sampled_from(["auto", "svd"]))
def test_padding_changes_nothing_at_any_rank(params, epsilon, method):
    projected = project(params, epsilon, method=method)
    for name, leaf in params.items():
        assert_nearest_in_band(leaf["kernel"], projected[name]["kernel"], 1 / (1 + epsilon), 1 + epsilon)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_the_answer_built_by_hand(method):
    clipped = clip_sequentially(batches_of(SHAPES), method)
    for shape, batch in zip(SHAPES, clipped, strict=True):
        answer = frame(*shape, 0).matrix(np.clip(np.geomspace(3.0, 0.4, min(shape)), LOWER, UPPER))
        np.testing.assert_allclose(batch.matrices[0], answer, atol=5e-6)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
@pytest.mark.parametrize("kind", ["not finite", "ill-conditioned", "tiny", "zero"])
def test_a_difficult_matrix_spoils_no_neighbour(method, kind):
    batches = batches_of(SHAPES, count=2)
    good = clip_sequentially(batches, method)
    spoilt = {
        "not finite": np.full((27, 16), np.nan),
        "ill-conditioned": frame(27, 16).matrix(np.geomspace(2.0, 1e-5, 16)),
        "tiny": 1e-25 * np.asarray(batches[0].matrices[0]),
        "zero": np.zeros((27, 16)),
    }[kind]
    batches[0] = batches[0]._replace(matrices=batches[0].matrices.at[0].set(spoilt))
    clipped = clip_sequentially(batches, method)
    np.testing.assert_array_equal(clipped[0].matrices[1], good[0].matrices[1])
    for one, other in zip(clipped[1:], good[1:], strict=True):
        np.testing.assert_array_equal(one.matrices, other.matrices)
    assert int(summarise(clipped).num_skipped) == (kind == "not finite")


def test_statistics_count_no_padding():
    clipped = clip_sequentially(batches_of(SHAPES, values=np.ones), "auto")
    clipped[2] = clip_sequentially(batches_of(SHAPES[2:3], values=lambda size: 2 * np.ones(size)), "auto")[0]
    stats = summarise(clipped)
    assert float(stats.sigma_min) == pytest.approx(1.0, abs=1e-5)
    assert float(stats.sigma_max) == pytest.approx(2.0, abs=1e-5)
    assert int(stats.num_clipped) == 16
    assert int(stats.num_values) == sum(min(shape) for shape in SHAPES)


def test_statistics_of_many_matrices_take_one_reduction():
    batches = batches_of(SHAPES, count=5)
    clipped = clip_sequentially(batches, "auto")
    program = jax.jit(summarise).lower(clipped).compile().as_text()
    assert len(re.findall(r" = \S.* reduce(?:-window)?\(", program)) == 1


def test_a_gram_matrix_in_range_leaves_its_matrix_unscaled():
    batches = batches_of([(40, 30)], count=3)
    program = jax.jit(clip_sequentially, static_argnums=1).lower(batches, "auto").compile().as_text()
    scaled = [fusion for fusion in list_fusions(program) if re.search(r"f32\[40,30\]\S* multiply\(", fusion)]
    # The SVD divides the matrix by a unit; the Gram matrix has none.
    assert len(scaled) == 1


def test_every_matrix_has_its_own_band():
    bands = [(0.3 * index + 0.5, 0.3 * index + 0.8) for index in range(len(SHAPES))]
    batches = [
        batch_of(3 * batch.matrices, *band) for batch, band in zip(batches_of(SHAPES), bands, strict=True)
    ]
    for batch, result, band in zip(batches, clip_sequentially(batches, "auto"), bands, strict=True):
        assert_nearest_in_band(batch.matrices[0], result.matrices[0], *band)


def test_large_leaves_of_one_shape_may_be_read_along_different_axes():
    shape = (60, 40, 50)
    axes = {
        "a": svb_jax.MatrixAxes(0, (1, 2)),
        "b": svb_jax.MatrixAxes((0, 1), 2),
        "c": svb_jax.MatrixAxes(1, 2),
    }
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name in axes}
    clipped = jax.jit(lambda p: svb_jax.project(p, 0.5, dimension_numbers=axes))(params)
    for name, kind in axes.items():
        before, after = (
            matrices_by_path({name: tree[name]}, {name: kind})[name] for tree in (params, clipped)
        )
        for matrix, result in zip(before, after, strict=True):
            assert_nearest_in_band(matrix, result)


def test_slices_of_one_shape_share_a_kernel():
    def slice_all(array, count):
        return [slice_at(array, start, 2, opaque_zero(count)) for start in range(0, 8, 2)]

    array = jnp.arange(24.0).reshape(8, 3)
    compiled = jax.jit(slice_all).lower(array, jnp.int32(5)).compile()
    for start, piece in zip(range(0, 8, 2), compiled(array, jnp.int32(5)), strict=True):
        np.testing.assert_array_equal(piece, array[start : start + 2])
    pieces = [fusion for fusion in list_fusions(compiled.as_text()) if "f32[2,3]" in fusion]
    assert len(pieces) == 4
    assert len(set(pieces)) == 1
