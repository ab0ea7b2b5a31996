"""Our transformations where optax's users put them: its helpers, its wrappers, its ways to call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import svb_jax
from tests.prescribed import BATCH_STATS, EPSILON, UPPER, band_violation, frame, kernels, start

SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = kernels(frame(6, 4).matrix([3.0, 1.2, 0.9, 0.25]))


def gradients(params, step):
    return jax.tree.map(lambda p: jnp.sin(jnp.arange(p.size, dtype=p.dtype) + step).reshape(p.shape), params)


def run(tx, params, num_steps=4):
    update = jax.jit(tx.update)
    state = tx.init(params)
    for step in range(num_steps):
        updates, state = update(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


class TestHelpers:
    def test_tree_map_params_reaches_the_inner_optimizer_alone(self):
        tx = svb_jax.bbn(svb_jax.svb(SGD, EPSILON), 1.0)
        state = tx.init(start())
        specs = optax.tree.map_params(tx, lambda _: "sharded", state, transform_non_params=lambda _: "whole")
        leaves = jax.tree.leaves(specs)
        assert leaves.count("sharded") == len(jax.tree.leaves(start()))
        assert set(leaves) == {"sharded", "whole"}

    @pytest.mark.parametrize("wrapper", [svb_jax.svb, svb_jax.bbn])
    def test_hyperparameters_are_injected_into_the_wrappers(self, wrapper):
        tx = optax.inject_hyperparams(wrapper)(SGD, epsilon=EPSILON, every=1)
        state = tx.init(start())
        assert float(state.hyperparams["epsilon"]) == EPSILON
        state.hyperparams["epsilon"] = jnp.float32(0.0)
        updates, _ = tx.update(gradients(start(), 0), state, start(), batch_stats=BATCH_STATS)
        landed = optax.apply_updates(start(), updates)
        if wrapper is svb_jax.svb:
            assert band_violation(landed["dense"]["kernel"], 1.0, 1.0) < 5e-6

    def test_a_second_call_compiles_nothing(self):
        tx = svb_jax.svb(SGD, EPSILON)
        update = jax.jit(tx.update)
        _, state = update(gradients(PARAMS, 0), tx.init(PARAMS), PARAMS)
        update(gradients(PARAMS, 1), state, PARAMS)
        assert update._cache_size() == 1

    def test_a_state_can_be_donated_after_an_eager_step(self):
        tx = svb_jax.bbn(svb_jax.svb(SGD, EPSILON), 1.0)
        _, state = tx.update(gradients(start(), 0), tx.init(start()), start(), batch_stats=BATCH_STATS)
        update = jax.jit(tx.update, donate_argnums=1)
        update(gradients(start(), 1), state, start(), batch_stats=BATCH_STATS)

    def test_the_steps_of_a_scan(self):
        tx = svb_jax.svb(SGD, EPSILON, every=3)

        def step(carry, number):
            params, state = carry
            updates, state = tx.update(gradients(params, number), state, params)
            return (optax.apply_updates(params, updates), state), None

        numbers = jnp.arange(6, dtype=jnp.float32)
        (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, numbers))(
            (PARAMS, tx.init(PARAMS))
        )
        assert int(state[1].step) == 6
        assert band_violation(params["0"]["kernel"]) < 5e-6

    def test_a_batch_of_networks_under_vmap(self):
        tx = svb_jax.bound_singular_values(EPSILON, every=2)
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), PARAMS)
        zeros = jax.tree.map(jnp.zeros_like, stacked)
        state = jax.vmap(tx.init)(stacked)
        for due in (False, True):
            updates, state = jax.vmap(tx.update)(zeros, state, stacked)
            landed = optax.apply_updates(stacked, updates)["0"]["kernel"]
            assert all((band_violation(kernel) < 5e-6) == due for kernel in landed)


class TestWhatIsBoundedAtTheEnd:
    """The table in docs/projection.md."""

    @staticmethod
    def is_in_band(params):
        return band_violation(params["0"]["kernel"]) < 5e-6

    @pytest.mark.parametrize(
        "tx",
        [
            svb_jax.svb(SGD, EPSILON),
            optax.chain(optax.clip_by_global_norm(1.0), SGD, svb_jax.bound_singular_values(EPSILON)),
            optax.MultiSteps(svb_jax.svb(SGD, EPSILON), 2).gradient_transformation(),
            optax.apply_if_finite(svb_jax.svb(SGD, EPSILON), 3),
            optax.masked(svb_jax.svb(SGD, EPSILON), {"0": {"kernel": True}}),
            svb_jax.svb(optax.contrib.schedule_free(SGD, 0.1), EPSILON),
            optax.multi_transform({"bounded": svb_jax.svb(SGD, EPSILON)}, {"0": {"kernel": "bounded"}}),
            optax.chain(
                optax.MultiSteps(SGD, 2).gradient_transformation(), svb_jax.bound_singular_values(EPSILON)
            ),
            svb_jax.svb(optax.contrib.sam(SGD, optax.sgd(0.05), sync_period=2), EPSILON),
        ],
        ids=[
            "svb",
            "last in a chain",
            "MultiSteps",
            "apply_if_finite",
            "masked",
            "around schedule_free",
            "multi_transform",
            "after MultiSteps",
            "around SAM",
        ],
    )
    def test_the_parameters(self, tx):
        assert self.is_in_band(run(tx, PARAMS)[0])

    @pytest.mark.parametrize(
        "tx",
        [
            optax.chain(svb_jax.svb(SGD, EPSILON), optax.scale(0.5)),
            optax.chain(svb_jax.svb(SGD, EPSILON), optax.ema(0.9)),
            optax.contrib.schedule_free(svb_jax.svb(SGD, EPSILON), 0.1),
            optax.contrib.sam(SGD, svb_jax.svb(optax.sgd(0.05), EPSILON), sync_period=2),
        ],
        ids=["not last in a chain", "ema after it", "inside schedule_free", "inside SAM"],
    )
    def test_not_the_parameters(self, tx):
        assert not self.is_in_band(run(tx, PARAMS)[0])

    @pytest.mark.parametrize(
        ("tx", "calls"),
        [
            (optax.MultiSteps(svb_jax.svb(SGD, EPSILON, every=2), 2).gradient_transformation(), 4),
            (
                optax.chain(
                    optax.MultiSteps(SGD, 2).gradient_transformation(),
                    svb_jax.bound_singular_values(EPSILON, every=2),
                ),
                2,
            ),
        ],
        ids=["MultiSteps", "after MultiSteps"],
    )
    def test_what_every_counts(self, tx, calls):
        assert [self.is_in_band(run(tx, PARAMS, number)[0]) for number in (calls - 1, calls)] == [False, True]

    def test_lookahead_bounds_its_fast_parameters_until_they_meet_the_slow_ones(self):
        tx = optax.lookahead(svb_jax.svb(SGD, EPSILON), sync_period=3, slow_step_size=0.5)
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = tx.init(params)
        seen = []
        for step in range(3):
            updates, state = tx.update(gradients(params.fast, step), state, params)
            params = optax.apply_updates(params, updates)
            seen.append(self.is_in_band(params.fast))
        assert seen == [True, True, False]


class TestTrees:
    def test_updates_are_matched_to_parameters_by_path(self):
        params = {name: 3 * jnp.eye(2) for name in ("a", "b", "c")}
        axes = {"a": None, "b": svb_jax.MatrixAxes(0, 1), "c": None}
        tx = svb_jax.bound_singular_values(EPSILON, dimension_numbers=axes)
        updates = {"a": None, "b": jnp.zeros((2, 2)), "c": jnp.zeros((2, 2))}
        landed, _ = tx.update(updates, tx.init(params), params)
        assert landed["a"] is None
        np.testing.assert_allclose(params["b"] + landed["b"], UPPER * np.eye(2), atol=1e-6)
        np.testing.assert_array_equal(landed["c"], 0)

    def test_what_has_no_update_is_frozen(self):
        params = {"a": {"kernel": 3 * jnp.eye(2)}, "b": {"kernel": 3 * jnp.eye(2)}}
        tx = svb_jax.bound_singular_values(EPSILON)
        landed, state = tx.update({"a": None, "b": {"kernel": jnp.zeros((2, 2))}}, tx.init(params), params)
        assert landed["a"] is None
        assert int(state.stats["svb"].num_values) == 2

    def test_a_step_that_moves_no_matrix_is_counted_and_no_more(self):
        params = {"a": {"kernel": 3 * jnp.eye(2)}, "bn": {"scale": jnp.array([1.0, 9.0])}}
        tx = svb_jax.bbn(svb_jax.svb(optax.identity(), EPSILON), 1.0)
        statistics = {"bn": {"var": jnp.ones(2)}}
        landed, state = tx.update({"a": None, "bn": None}, tx.init(params), params, batch_stats=statistics)
        assert jax.tree.leaves(landed) == []
        counts = [each.count for each in jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "stats"))]
        assert list(map(int, counts)) == [1, 1]

    def test_a_pattern_of_paths_selects(self):
        params = {"Conv_0": {"kernel": 3 * jnp.eye(2)}, "Dense_0": {"kernel": 3 * jnp.eye(2)}}
        landed, _ = run(svb_jax.svb(optax.sgd(0.0), EPSILON, where="Conv_0"), params, 1)
        np.testing.assert_allclose(landed["Conv_0"]["kernel"], UPPER * np.eye(2), atol=1e-6)
        np.testing.assert_array_equal(landed["Dense_0"]["kernel"], params["Dense_0"]["kernel"])

    def test_bands_by_path(self):
        params = {"Conv_0": {"kernel": 3 * jnp.eye(2)}, "Dense_0": {"kernel": 3 * jnp.eye(2)}}
        tx = svb_jax.svb(optax.sgd(0.0), {"Dense_0": lambda count: 0.1 * (count + 1), "*": 1.0}, every=2)
        landed, _ = run(tx, params, 2)
        np.testing.assert_allclose(landed["Conv_0"]["kernel"], 2.0 * np.eye(2), atol=1e-6)
        np.testing.assert_allclose(landed["Dense_0"]["kernel"], 1.2 * np.eye(2), atol=1e-6)
        projected = svb_jax.project(params, {"Dense_0": 0.1, "*": 1.0})
        np.testing.assert_allclose(projected["Dense_0"]["kernel"], 1.1 * np.eye(2), atol=1e-6)


class TestBadSchedules:
    @pytest.mark.parametrize("epsilon", [np.nan, np.inf, -np.inf])
    def test_a_band_that_is_not_finite_moves_nothing_and_is_counted(self, epsilon):
        landed, state = run(svb_jax.svb(optax.sgd(0.0), lambda count: jnp.float32(epsilon)), PARAMS, 1)
        np.testing.assert_array_equal(landed["0"]["kernel"], PARAMS["0"]["kernel"])
        assert int(svb_jax.projection_stats(state)["svb/skipped"]) == 1

    @pytest.mark.parametrize("epsilon", [-1.0, -2.0])
    def test_a_negative_band_counts_as_none(self, epsilon):
        landed, _ = run(svb_jax.svb(optax.sgd(0.0), lambda count: jnp.float32(epsilon)), PARAMS, 1)
        assert band_violation(landed["0"]["kernel"], 1.0, 1.0) < 5e-6

    @pytest.mark.parametrize("epsilon", [np.nan, -2.0])
    def test_scales_too(self, epsilon):
        tx = svb_jax.bound_batch_norm_scales(lambda count: jnp.float32(epsilon))
        zeros = jax.tree.map(jnp.zeros_like, start())
        updates, state = tx.update(zeros, tx.init(start()), start(), batch_stats=BATCH_STATS)
        landed = optax.apply_updates(start(), updates)["bn"]["scale"]
        assert np.isfinite(landed).all()
        assert (np.sign(landed) == np.sign(start()["bn"]["scale"])).all()
        assert int(state.stats["bbn"].num_skipped) == np.isnan(epsilon)


class TestCounter:
    @staticmethod
    def steps_due(tx, first, num_steps):
        state = tx.init(PARAMS)._replace(count=jnp.int32(first))
        due = []
        for _ in range(num_steps):
            updates, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
            due.append(bool(jnp.any(updates["0"]["kernel"] != 0)))
        return due

    @pytest.mark.parametrize("is_x64", [False, True])
    def test_numbers_beyond_the_counters_range(self, is_x64):
        with jax.enable_x64(is_x64):
            assert self.steps_due(svb_jax.bound_singular_values(EPSILON, until=2**31), 0, 2) == [True, True]
            assert self.steps_due(svb_jax.bound_singular_values(EPSILON, 2**32 + 1), 0, 2) == [False, False]

    def test_what_is_due_stays_due_when_the_counter_is_full(self):
        tx = svb_jax.bound_singular_values(EPSILON, every=3)
        last = 2**31 - 1
        expected = [(last - 2 + number) % 3 == 0 for number in range(1, 10)]
        assert self.steps_due(tx, last - 2, 9) == expected

    @pytest.mark.parametrize("name", ["where", "dimension_numbers"])
    def test_a_function_of_the_parameters_is_not_taken_for_a_schedule(self, name):
        function = {"where": svb_jax.paths("kernel"), "dimension_numbers": svb_jax.every_matrix}[name]
        make = optax.inject_hyperparams(svb_jax.bound_singular_values)
        with pytest.raises(TypeError, match="a number of steps in place of the parameters"):
            make(EPSILON, **{name: function}).init(PARAMS)


class TestDebuggingSwitches:
    # Contexts, since jax.config.update would put back for all tests what held in one test's context.
    @pytest.fixture(
        params=[
            lambda: jax.numpy_rank_promotion("raise"),
            lambda: jax.debug_nans(True),
            lambda: jax.debug_infs(True),
        ],
        ids=["rank_promotion", "debug_nans", "debug_infs"],
    )
    def switch(self, request):
        with request.param():
            yield

    @pytest.mark.parametrize("method", ["auto", "svd", "gram", "products"])
    def test_a_bounded_step_survives_them(self, switch, method):
        tx = svb_jax.bbn(svb_jax.svb(SGD, EPSILON, method=method), 1.0)
        for update in (tx.update, jax.jit(tx.update)):
            _, state = update(gradients(start(), 0), tx.init(start()), start(), batch_stats=BATCH_STATS)
        svb_jax.projection_stats(state)

    @pytest.mark.parametrize("method", ["auto", "svd", "gram", "products"])
    def test_strict_promotion_of_types(self, method):
        with jax.numpy_dtype_promotion("strict"):
            svb_jax.project(PARAMS, EPSILON, method=method)
            tx = svb_jax.svb(optax.identity(), EPSILON, method=method)
            tx.update(gradients(PARAMS, jnp.float32(0)), tx.init(PARAMS), PARAMS)

    def test_strict_promotion_of_half_types(self):
        params = {"kernel": 3 * jnp.eye(2, dtype=jnp.bfloat16)}
        with jax.numpy_dtype_promotion("strict"):
            assert svb_jax.project(params, EPSILON)["kernel"].dtype == jnp.bfloat16
            tx = svb_jax.svb(optax.identity(), EPSILON)
            landed, _ = tx.update(params, tx.init(params), params)
        assert landed["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: svb_jax.svb(0.5, optax.sgd(0.1)),
            "svb needs an optax optimizer first, then epsilon; got 0.5",
        ),
        (
            lambda: svb_jax.bbn(0.5, optax.sgd(0.1)),
            "bbn needs an optax optimizer first, then epsilon; got 0.5",
        ),
        (lambda: svb_jax.svb(optax.sgd(0.1), "wide"), "epsilon to be a number, got 'wide'"),
        (lambda: svb_jax.svb(optax.sgd(0.1), {"*": "wide"}), "epsilon to be a number, got 'wide'"),
    ],
)
def test_wrong_calls_are_told_what_is_needed(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()
