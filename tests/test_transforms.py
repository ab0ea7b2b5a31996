"""When the transformations act, on what, in which types, and what they report."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import bbn, bound_singular_values, project, projection_stats, svb
from tests.prescribed import (
    BATCH_STATS,
    BBN_EPSILON,
    EPSILON,
    FRAMES,
    SCALE,
    SCALE_STEP,
    SPECTRUM,
    STEP,
    assert_same,
    before_and_after,
    clipped,
    frame,
    gradients,
    kernels,
    land,
    network,
    run_by_hand,
    start,
    take_step,
)

SGD = optax.sgd(1.0)


@pytest.fixture(scope="module", autouse=True, params=["one device", "several"])
def devices(request):
    """Take both ways: one device packs its steps before the conditional, several inside of it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one device":
            patch.setattr(jax, "device_count", lambda: 1)
        jax.clear_caches()
        yield


def follow(tx, expected):
    """Check a run with the same gradients at every step."""
    step = jax.jit(tx.update)
    params, state = start(), tx.init(start())
    for after in expected:
        updates, state = step(gradients(), state, params)
        params = optax.apply_updates(params, updates)
        assert_same(params, after)


NEVER = 10**6


class TestTiming:
    """One compiled step for the whole table: ``every`` and ``until`` may be traced numbers."""

    @staticmethod
    @jax.jit
    def step(params, state, every, until):
        tx = svb(SGD, EPSILON, every, until=until, method="svd")
        updates, state = tx.update(gradients(), state, params)
        return optax.apply_updates(params, updates), state

    @pytest.mark.parametrize(
        ("every", "until", "due"),
        [
            (1, NEVER, (1, 2, 3, 4, 5, 6, 7)),
            (2, NEVER, (2, 4, 6)),
            (3, NEVER, (3, 6)),
            (7, NEVER, (7,)),
            (8, NEVER, ()),
            (1, 1, (1,)),
            (2, 1, ()),
            (2, 4, (2, 4)),
            (2, 5, (2, 4)),
            (3, 6, (3, 6)),
        ],
    )
    def test_steps_count_from_one_and_until_is_the_last(self, every, until, due):
        params, state = start(), svb(SGD, EPSILON).init(start())
        for expected in run_by_hand([1] * 7, svb_at=due):
            params, state = self.step(params, state, every, until)
            assert_same(params, expected)

    @pytest.mark.parametrize("split", [1, 2, 3])
    def test_a_restored_count_goes_on_as_if_never_stopped(self, split):
        params, state = start(), svb(SGD, EPSILON).init(start())
        for call, expected in enumerate(run_by_hand([1] * 7, svb_at=(2, 4, 6)), 1):
            params, state = self.step(params, state, 2, NEVER)
            if call == split:
                params, state = jax.tree.map(lambda leaf: np.array(leaf), (params, state))
            assert_same(params, expected)

    @pytest.mark.parametrize(("every", "due"), [(1, (1, 2, 3, 4)), (2, (2, 4))])
    def test_a_schedule_is_called_with_the_steps_behind(self, every, due):
        epsilons = jnp.array([0.9, 0.1, 0.5, 0.0])
        spectrum, expected = SPECTRUM, []
        for step, epsilon in [(1, 0.9), (2, 0.1), (3, 0.5), (4, 0.0)]:
            spectrum = spectrum + STEP
            if step in due:
                spectrum = clipped(spectrum, 1 / (1 + epsilon), 1 + epsilon)
            expected.append(network(dict.fromkeys(FRAMES, spectrum), SCALE + step * SCALE_STEP))
        follow(svb(SGD, lambda count: epsilons[count], every, method="svd"), expected)

    def test_every_and_until_may_be_injected(self):
        injected = optax.inject_hyperparams(bound_singular_values, static_args="method")
        tx = injected(epsilon=EPSILON, every=2, until=2, method="svd")
        follow(optax.chain(SGD, tx), run_by_hand([1] * 4, svb_at=(2,)))


class TestBand:
    VALUES = np.array([4.5, 1.1, 0.3, 0.1])

    @staticmethod
    @jax.jit
    def bounded(params, epsilon, scale):
        return land(bound_singular_values(epsilon, centre=scale, method="svd"), params)[0]

    @pytest.mark.parametrize(
        ("epsilon", "scale", "lower", "upper"),
        [
            (0.5, 1.0, 2 / 3, 3 / 2),
            (0.0, 1.0, 1, 1),
            (3.0, 1.0, 1 / 4, 4),
            (0.5, 2.0, 4 / 3, 3),
            (0.0, 0.5, 0.5, 0.5),
        ],
    )
    def test_singular_values_end_up_in_it(self, epsilon, scale, lower, upper):
        vectors = frame(6, 4)
        before = kernels(vectors.matrix(self.VALUES))
        expected = kernels(vectors.matrix(clipped(self.VALUES, lower, upper)))
        assert_same(self.bounded(before, epsilon, scale), expected)
        assert_same(project(before, epsilon, centre=scale, method="svd"), expected)

    def test_no_room_at_all_is_a_band_too(self):
        vectors = frame(6, 4)
        after, _ = land(bound_singular_values(0.0), kernels(vectors.matrix(self.VALUES)))
        assert_same(after, kernels(vectors.matrix([1, 1, 1, 1])))

    def test_a_scale_may_depend_on_outputs_and_inputs(self):
        wide, tall = frame(3, 5), frame(5, 3)
        values = np.array([9.0, 1.0, 0.1])
        tx = bound_singular_values(0.25, centre=lambda outputs, inputs: outputs / inputs, method="svd")
        after, _ = land(tx, kernels(wide.matrix(values), tall.matrix(values)))
        by_hand = [clipped(values, centre / 1.25, centre * 1.25) for centre in (5 / 3, 3 / 5)]
        assert_same(after, kernels(wide.matrix(by_hand[0]), tall.matrix(by_hand[1])))

    def test_layers_may_have_bands_of_their_own(self):
        vectors, values = frame(6, 4), np.array([3.0, 1.2, 0.9, 0.1])
        bands = {"0": bound_singular_values(0.5, method="svd"), "1": bound_singular_values(0.1, method="svd")}
        tx = optax.multi_transform(bands, {"0": "0", "1": "1"})
        after, _ = land(tx, kernels(vectors.matrix(values), vectors.matrix(values)))
        narrow = clipped(values, 1 / 1.1, 1.1)
        assert_same(after, kernels(vectors.matrix(clipped(values)), vectors.matrix(narrow)))

    @pytest.mark.parametrize(
        "where", [{"0": True, "1": False}, lambda params: {name: name == "0" for name in params}]
    )
    def test_where_is_a_mask(self, where):
        before, expected = before_and_after(6, 4)
        params = kernels(before, before)
        after, _ = land(bound_singular_values(EPSILON, where=where, method="svd"), params)
        assert_same(after, kernels(expected, before))
        assert_same(project(params, EPSILON, where=where, method="svd"), kernels(expected, before))


class TestNesting:
    @pytest.mark.parametrize("order", ["svb(bbn)", "bbn(svb)"])
    def test_extra_arguments_reach_the_innermost_through_both(self, order):
        def update(updates, state, params=None, *, length, **extra):
            assert set(extra) == {"batch_stats"}
            return jax.tree.map(lambda g: -length * g, updates), state

        inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
        with_svb = functools.partial(svb, epsilon=EPSILON, method="svd")
        with_bbn = functools.partial(bbn, epsilon=BBN_EPSILON)
        tx = with_svb(with_bbn(inner)) if order == "svb(bbn)" else with_bbn(with_svb(inner))
        after, _ = take_step(tx, start(), gradients(), batch_stats=BATCH_STATS, length=2.0)
        assert_same(after, run_by_hand([2], svb_at=(1,), bbn_at=(1,))[0])


# Entries of these are multiples of 1/32, so that every type holds them exactly.
HADAMARD = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2


def exact_matrix(*values):
    return HADAMARD * np.array(values) @ HADAMARD[[2, 0, 3, 1]]


BEFORE = exact_matrix(2.0, 1.0, 0.5, 0.25)
MOVE = exact_matrix(1.0, 0.25, 0.25, -0.125)
BOUNDED = exact_matrix(1.5, 1.25, 0.75, 2 / 3)


class TestTypes:
    """The stepped matrix has singular values 3, 1.25, 0.75 and 0.125, of which two are moved."""

    @staticmethod
    def params(dtype):
        params, grads = ({"kernel": jnp.asarray(matrix, dtype)} for matrix in (BEFORE, -MOVE))
        np.testing.assert_array_equal(params["kernel"].astype(jnp.float32), BEFORE)
        np.testing.assert_array_equal(grads["kernel"].astype(jnp.float32), -MOVE)
        return params, grads

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_half_types_store_the_exact_projection_rounded_once(self, dtype):
        after, _ = take_step(svb(SGD, EPSILON), *self.params(dtype))
        assert after["kernel"].dtype == dtype
        np.testing.assert_array_equal(after["kernel"], jnp.asarray(BOUNDED, dtype))
        stepped = {"kernel": jnp.asarray(BEFORE + MOVE, dtype)}
        np.testing.assert_array_equal(project(stepped, EPSILON)["kernel"], jnp.asarray(BOUNDED, dtype))

    @pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 5e-7), (jnp.float64, 2e-15)])
    def test_full_types_are_projected_in_their_own_precision(self, dtype, atol):
        with jax.enable_x64(True):
            after, state = take_step(svb(SGD, EPSILON), *self.params(dtype))
            assert after["kernel"].dtype == dtype
            np.testing.assert_allclose(after["kernel"], BOUNDED, rtol=0, atol=atol)
            assert {leaf.dtype.name for leaf in jax.tree.leaves(state[-1])} == {"int32", "float32"}

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_kept_types_fit_apply_if_finite_and_round_the_update(self, dtype):
        params, grads = self.params(dtype)
        tx = optax.apply_if_finite(svb(SGD, EPSILON, keep_dtype=True), max_consecutive_errors=1)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        assert updates["kernel"].dtype == dtype
        np.testing.assert_array_equal(updates["kernel"], jnp.asarray(BOUNDED - BEFORE, dtype))

    def test_apply_if_finite_refuses_updates_of_another_type(self):
        params, grads = self.params(jnp.bfloat16)
        tx = optax.apply_if_finite(svb(SGD, EPSILON), max_consecutive_errors=1)
        with pytest.raises(TypeError, match="bfloat16"):
            tx.update(grads, tx.init(params), params)

    def test_off_steps_keep_the_update(self):
        params, grads = self.params(jnp.bfloat16)
        after, _ = take_step(svb(SGD, EPSILON, every=2), params, grads)
        np.testing.assert_array_equal(after["kernel"].astype(jnp.float32), BEFORE + MOVE)


@pytest.mark.nan_inputs
class TestNonFinite:
    @pytest.mark.parametrize(("bad", "method"), [(np.nan, "auto"), (np.inf, "auto"), (-np.inf, "svd")])
    def test_such_weights_are_left_alone_and_counted(self, bad, method):
        before, expected = before_and_after(6, 4)
        spoilt = before.copy()
        spoilt[2, 1] = bad
        grads = kernels(np.zeros((6, 4)), np.ones((6, 4)), np.zeros((6, 4)))
        tx = svb(SGD, EPSILON, method=method)
        after, state = take_step(tx, kernels(before, spoilt, before), grads)
        assert_same(after, kernels(expected, spoilt - 1, expected))
        stats = projection_stats(state)
        assert int(stats["svb/skipped"]) == 1
        np.testing.assert_allclose(stats["svb/sigma_max"], 3.0, rtol=1e-6)

    def test_a_whole_tree_of_them_is_survived(self):
        params = kernels(np.full((6, 4), np.inf))
        after, state = land(bound_singular_values(EPSILON, method="svd"), params)
        assert_same(after, params)
        stats = projection_stats(state)
        assert int(stats["svb/skipped"]) == 1
        assert int(state.stats["svb"].num_values) == 0


def test_leaves_of_two_types_land_each_in_its_own():
    pairs = {name: before_and_after(8, 8, seed) for seed, name in enumerate(["first", "half", "last"])}
    dtypes = {"first": jnp.float32, "half": jnp.bfloat16, "last": jnp.float32}
    params = {name: {"kernel": jnp.asarray(pairs[name][0], dtype)} for name, dtype in dtypes.items()}
    landed, _ = take_step(svb(SGD, EPSILON), params, jax.tree.map(jnp.zeros_like, params))
    for name, dtype in dtypes.items():
        kernel = landed[name]["kernel"]
        assert kernel.dtype == dtype
        atol = 2e-6 if dtype == jnp.float32 else 0.02
        np.testing.assert_allclose(kernel.astype(jnp.float32), pairs[name][1], atol=atol)
