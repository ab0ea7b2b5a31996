"""Small matrices of unequal shapes that go through one program: the same answers as each on its own."""

import functools
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import svb_jax
import svb_jax.models
from benchmarks.jax_steps import list_fusions
from svb_jax.cutting import computed_zero, cut
from svb_jax.pooling import MOST_FILLING, make_pools
from svb_jax.projection import clip_stacks
from svb_jax.reading import empty_reading
from svb_jax.stacks import Share, Stacks
from tests.prescribed import LOWER, UPPER, assert_nearest_in_band, frame, kernels

# Tall, wide and square ones, the smallest filled up to many times their numbers, with enough of the window's
# own shape that all are in one pool.
SHAPES = [(27, 16), (6, 40), (16, 16), (1, 1), (3, 1), (40, 12), (1, 5), *[(40, 16)] * 3]


def stacks_of(shapes, count=1):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((count, *shape)), jnp.float32) for shape in shapes]


def one_pool(stacks):
    """Return the pool of all stacks, their numbers, and every matrix with its place."""
    row = Stacks.of(stacks)
    [pool] = make_pools(row.shapes)
    matrices = [matrix for member in pool.members for matrix in stacks[member]]
    assert pool.count == len(matrices)
    return pool, row.numbers, [(pool.place(index), matrix) for index, matrix in enumerate(matrices)]


def test_matrices_are_taken_long_side_first_and_filled_up_with_zeros():
    pool, numbers, matrices = one_pool(stacks_of(SHAPES, count=2))
    assert pool.window == (40, 16)
    assert len(matrices) == 2 * len(SHAPES)
    for place, matrix in matrices:
        matrix = matrix if len(matrix) >= len(matrix.T) else matrix.T
        answer = np.zeros((40, 16), np.float32)
        answer[: matrix.shape[0], : matrix.shape[1]] = matrix
        np.testing.assert_array_equal(pool.take(numbers, place, 1), answer)
        assert int(place.short) == min(matrix.shape)


def test_several_matrices_have_rows_and_columns_of_their_own_in_a_window():
    pool, numbers, matrices = one_pool([*stacks_of([(6, 4), (3, 7)], count=5), *stacks_of([(20, 10)], 9)])
    assert pool.window == (20, 10)
    fits = {
        shape: [int(p.fits) for p, m in matrices if m.shape == shape] for shape in [(6, 4), (3, 7), (20, 10)]
    }
    assert list(fits.values()) == [[2, 2, 2, 2, 1], [2, 2, 2, 2, 1], [1] * 9]
    assert pool.num_windows == 3 + 3 + 9
    for (place, first), (_, second) in itertools.pairwise(matrices):
        if int(place.fits) == 2 and first.shape == second.shape:
            first, second = (each if len(each) >= len(each.T) else each.T for each in (first, second))
            (long, short), answer = first.shape, np.zeros((20, 10), np.float32)
            answer[:long, :short], answer[long : 2 * long, short : 2 * short] = first, second
            np.testing.assert_array_equal(pool.take(numbers, place, 2), answer)
            changed = pool.put(numbers, -pool.take(numbers, place, 2), place, 2)
            own = slice(int(place.start), int(place.start) + 2 * first.size)
            np.testing.assert_array_equal(changed[own], -numbers[own])
            np.testing.assert_array_equal(changed.at[own].set(0), numbers.at[own].set(0))


def test_what_is_put_goes_home_and_touches_no_other():
    pool, numbers, matrices = one_pool(stacks_of(SHAPES, count=2))
    for place, matrix in matrices:
        start, size = int(place.start), matrix.size
        before, numbers = numbers, pool.put(numbers, -pool.take(numbers, place, 1), place, 1)
        np.testing.assert_array_equal(numbers[start : start + size], -matrix.reshape(-1))
        np.testing.assert_array_equal(numbers[:start], before[:start])
        np.testing.assert_array_equal(numbers[start + size :], before[start + size :])
    assert sum(matrix.size for _, matrix in matrices) == numbers.size


@hypothesis.given(st.lists(st.tuples(*[st.integers(1, 20)] * 3), min_size=1, max_size=6))
@hypothesis.example([(1, 20, 1), (1, 8, 8)])
def test_no_window_is_larger_than_the_numbers_of_its_pool(shapes):
    for pool in make_pools(tuple(shapes)):
        assert pool.window_size <= sum(math.prod(shapes[member]) for member in pool.members)


def test_a_row_is_pooled_and_no_more_filled_up_than_agreed():
    convnet_38 = (
        (1, 27, 16),
        (12, 144, 16),
        (1, 144, 32),
        (11, 288, 32),
        (1, 288, 64),
        (11, 576, 64),
        (1, 64, 10),
    )
    [pool] = make_pools(convnet_38)
    assert pool.window == (576, 64)
    assert sorted(pool.members) == [0, 1, 2, 3, 4, 5, 6]
    numbers = sum(np.prod(shape) for shape in convnet_38)
    assert pool.num_windows * np.prod(pool.window) <= MOST_FILLING * numbers
    # Hundreds of depthwise kernels fit into a few windows, but single ones of other shapes do not.
    assert len(make_pools(((512, 9, 1), (8, 576, 64)))) == 1
    assert len(make_pools((*((1, 9 + k, 1) for k in range(8)), (1, 576, 64)))) > 1
    assert [pool.members for pool in make_pools(((0, 3, 4), (2, 3, 4), (3, 0, 5)))] == [(1,)]


def test_two_pools_of_one_row_leave_each_other_alone():
    narrow = stacks_of([(3 + k, 1) for k in range(8)])
    stacks = [*narrow[:4], *stacks_of([(40, 16)]), *narrow[4:]]
    assert len(make_pools(tuple(stack.shape for stack in stacks))) > 1
    clipped, reading = clip_all(stacks, "auto")
    for stack, result in zip(stacks, clipped, strict=True):
        for matrix, after in zip(stack, result, strict=True):
            assert_nearest_in_band(matrix, after)
    assert int(reading.values) == 8 + 16


@st.composite
def pooled(draw):
    """Draw a matrix of every shape, each of any rank, scale and spread."""
    matrices = []
    for shape in SHAPES:
        rank, seed = draw(st.integers(0, min(shape))), draw(st.integers(0, 2**32 - 1))
        scale, spread = 10.0 ** draw(st.floats(-6, 6)), 10.0 ** draw(st.floats(0, 6))
        spectrum = np.zeros(min(shape))
        spectrum[:rank] = scale * spread ** -np.random.default_rng(seed).uniform(0, 1, rank)
        matrices.append(frame(*shape, seed).matrix(spectrum))
    return kernels(*matrices)


project = jax.jit(svb_jax.project, static_argnames="method")


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(pooled(), st.sampled_from([0.0, 0.05, 0.5, 4.0]), st.sampled_from(["auto", "svd"]))
def test_zeros_around_a_matrix_change_nothing_at_any_rank(params, epsilon, method):
    projected = project(params, epsilon, method=method)
    for name, leaf in params.items():
        assert_nearest_in_band(leaf["kernel"], projected[name]["kernel"], 1 / (1 + epsilon), 1 + epsilon)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_the_answer_built_by_hand(method):
    built = []
    for seed, shape in enumerate(SHAPES):
        vectors, spectrum = frame(*shape, seed), np.geomspace(3.0, 0.4, min(shape))
        built.append((vectors.matrix(spectrum), vectors.matrix(np.clip(spectrum, LOWER, UPPER))))
    params = kernels(*(matrix for matrix, _ in built))
    projected = project(params, UPPER - 1, method=method)
    for name, (_, answer) in enumerate(built):
        np.testing.assert_allclose(projected[str(name)]["kernel"], answer, atol=5e-6)


@pytest.mark.parametrize("method", ["svd", "gram", "auto"])
def test_a_matrix_that_is_not_finite_spoils_no_neighbour(method):
    stacks = stacks_of(SHAPES)
    good = clip_all(stacks, method)[0]
    stacks[0] = stacks[0].at[0, 3, 3].set(jnp.nan)
    clipped, reading = clip_all(stacks, method)
    np.testing.assert_array_equal(clipped[0], stacks[0])
    for one, other in zip(clipped[1:], good[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(reading.skipped) == 1


@pytest.mark.parametrize("method", ["gram", "auto"])
@pytest.mark.parametrize("kind", ["not finite", "ill-conditioned", "tiny", "zero"])
def test_a_matrix_that_spoils_its_window_is_taken_by_itself(method, kind):
    """Six matrices fit into two windows of one stack; what is wrong with one must not reach the others."""
    stack = np.stack([frame(6, 4, seed).matrix(np.geomspace(2.0, 0.6, 4)) for seed in range(6)])
    spoilt = {
        "not finite": np.full((6, 4), np.nan),
        "ill-conditioned": frame(6, 4).matrix(np.array([2.0, 1.0, 1.0, 1e-4])),
        "tiny": 1e-6 * stack[0],
        "zero": np.zeros((6, 4)),
    }[kind]
    window = np.stack([frame(18, 12, seed).matrix(np.geomspace(2.0, 0.6, 12)) for seed in range(2)])
    stacks = [jnp.asarray(stack, jnp.float32), jnp.asarray(window, jnp.float32)]
    [pool] = make_pools(tuple(stack.shape for stack in stacks))
    assert pool.num_windows == 2 + 2
    good, all_of = clip_all(stacks, method)
    assert all_of.counts.tolist()[1:] == [48, 0, 0]
    stacks[0] = stacks[0].at[1].set(jnp.asarray(spoilt, jnp.float32))
    clipped, reading = clip_all(stacks, method)
    for index in (0, 2, 3, 4, 5):
        np.testing.assert_allclose(clipped[0][index], good[0][index], atol=1e-6)
    np.testing.assert_array_equal(clipped[1], good[1])
    _, by_itself = clip_all([stacks[0][1:2]], method)
    if kind == "not finite" or (method, kind) == ("gram", "zero"):
        np.testing.assert_array_equal(clipped[0][1], stacks[0][1])
    elif method == "auto" or kind == "tiny":
        assert_nearest_in_band(stacks[0][1], clipped[0][1])
    assert (
        int(reading.exact)
        == int(by_itself.exact)
        == (method == "auto" and kind in ("ill-conditioned", "zero"))
    )
    assert int(reading.skipped) == int(by_itself.skipped) == (kind == "not finite")
    assert int(reading.values) == 48 - 4 * (kind == "not finite")


def test_a_reading_counts_no_zeros_that_fill_up():
    stacks = [jnp.asarray(frame(*shape).matrix(np.ones(min(shape))), jnp.float32)[None] for shape in SHAPES]
    stacks[2] = 2 * stacks[2]
    _, reading = clip_all(stacks, "auto")
    assert float(reading.smallest) == pytest.approx(1.0, abs=1e-5)
    assert float(reading.largest) == pytest.approx(2.0, abs=1e-5)
    assert reading.counts.tolist() == [16, sum(min(shape) for shape in SHAPES), 0, 0]


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
            svb_jax.matrices.matrices_by_path({name: tree[name]}, {name: kind})[name]
            for tree in (params, clipped)
        )
        for matrix, result in zip(before, after, strict=True):
            assert_nearest_in_band(matrix, result)


def test_every_matrix_has_the_band_of_its_stack():
    stacks = [3 * stack for stack in stacks_of(SHAPES)]
    bands = [(0.3 * index + 0.5, 0.3 * index + 0.8) for index in range(len(stacks))]
    clipped, _ = clip_row(stacks, bands, "auto")
    for stack, result, band in zip(stacks, clipped, bands, strict=True):
        assert_nearest_in_band(stack[0], result[0], *band)


def test_a_share_in_a_pool_is_clipped_and_the_rest_is_left():
    stacks = stacks_of(SHAPES, count=3)
    whole, _ = clip_all(stacks, "auto")
    shares = [Share(index % 3, (index + 1) % 3, 2) for index in range(len(stacks))]
    shared, reading = clip_all(stacks, "auto", shares)
    counted = 0
    for stack, clipped, result, share in zip(stacks, whole, shared, shares, strict=True):
        mine = range(share.start, min(share.start + share.count, 3))
        for index in range(3):
            np.testing.assert_array_equal(result[index], (clipped if index in mine else stack)[index])
        counted += len(mine) * min(stack.shape[1:])
    assert int(reading.values) == counted


def clip_all(stacks, method, shares=None):
    return clip_row(stacks, [(LOWER, UPPER)], method, shares)


def clip_row(stacks, bands, method, shares=None):
    nothing = empty_reading(jnp.zeros(()))
    shares = None if shares is None else [shares]
    [clipped], reading = clip_stacks([Stacks.of(stacks)], [bands], method, nothing, shares)
    return clipped.split(), reading


def test_equal_pieces_are_cut_by_one_kernel():
    def cut_all(array, count):
        zero = computed_zero(count)
        return [cut(array, start, start + 2, zero) for start in range(0, 8, 2)]

    array = jnp.arange(24.0).reshape(8, 3)
    compiled = jax.jit(cut_all).lower(array, jnp.int32(5)).compile()
    for start, piece in zip(range(0, 8, 2), compiled(array, jnp.int32(5)), strict=True):
        np.testing.assert_array_equal(piece, array[start : start + 2])
    pieces = [fusion for fusion in list_fusions(compiled.as_text()) if "f32[2,3]" in fusion]
    assert len(pieces) == 4
    assert len(set(pieces)) == 1


def test_a_network_is_projected_in_less_than_twice_its_own_memory(monkeypatch):
    # What several devices do to keep a row whole takes a copy of it.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    network = svb_jax.models.make("convnet_38")
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(network.init, jax.random.key(0), images)["params"]
    compiled = jax.jit(functools.partial(svb_jax.project, epsilon=0.5)).lower(params).compile()
    memory = compiled.memory_analysis()
    result = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert memory.output_size_in_bytes >= result
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 2 * result
