"""What the last projection saw, read out of any nested state."""

import jax
import numpy as np
import optax
import pytest

from svb_jax import bound_batch_norm_scales, bound_singular_values, projection_stats, svb
from tests.prescribed import (
    BATCH_STATS,
    BBN_EPSILON,
    EPSILON,
    SCALE,
    assert_same,
    bounded_scale,
    frame,
    gradients,
    kernels,
    land,
    start,
)

SGD = optax.sgd(1.0)


class TestStats:
    """Values 3, 1.2, 0.9 and 0.25 in one matrix, 1.4, 1, 0.7 and 0.7 in another: two of eight are clipped."""

    PARAMS = kernels(frame(6, 4).matrix([3.0, 1.2, 0.9, 0.25]), frame(6, 4, 1).matrix([1.4, 1.0, 0.7, 0.7]))

    @pytest.mark.parametrize(("method", "exact"), [("svd", 2), ("gram", 0), ("auto", 1), ("products", None)])
    def test_figures_are_of_the_matrices_before(self, method, exact):
        after, state = land(svb(SGD, EPSILON, method=method), self.PARAMS)
        stats = projection_stats(state)
        assert set(stats) == {
            "svb/step",
            "svb/sigma_min",
            "svb/sigma_max",
            "svb/share_clipped",
            "svb/exact",
            "svb/missed",
            "svb/skipped",
        }
        # The products estimate extremes by power steps.
        tolerance = 1e-3 if method == "products" else 5e-6
        extremes = [stats["svb/sigma_min"], stats["svb/sigma_max"]]
        np.testing.assert_allclose(extremes, [0.25, 3.0], rtol=0, atol=tolerance)
        assert float(stats["svb/share_clipped"]) == 2 / 8
        assert [int(stats[f"svb/{name}"]) for name in ("step", "missed", "skipped")] == [1, 0, 0]
        if method != "products":
            assert int(stats["svb/exact"]) == exact
        bounded = [[1.5, 1.2, 0.9, 2 / 3], [1.4, 1.0, 0.7, 0.7]]
        assert_same(after, kernels(frame(6, 4).matrix(bounded[0]), frame(6, 4, 1).matrix(bounded[1])))

    def test_auto_takes_the_exact_route_where_the_condition_asks_for_it(self):
        _, state = land(svb(SGD, EPSILON), kernels(frame(6, 4).matrix([3.0, 1.2, 0.9, 0.01]), np.eye(6, 4)))
        assert int(projection_stats(state)["svb/exact"]) == 1

    def test_before_the_first_projection_all_are_zero(self):
        assert all(figure == 0 for figure in projection_stats(svb(SGD, EPSILON).init(self.PARAMS)).values())

    def test_layers_have_figures_of_their_own_on_request(self):
        _, state = land(svb(SGD, EPSILON, method="svd", per_layer=True), self.PARAMS)
        stats = projection_stats(state)
        np.testing.assert_allclose(stats["svb/0/kernel/sigma_max"], 3.0, atol=5e-6)
        np.testing.assert_allclose(stats["svb/1/kernel/sigma_max"], 1.4, atol=5e-6)
        assert float(stats["svb/0/kernel/share_clipped"]) == 2 / 4
        assert float(stats["svb/1/kernel/share_clipped"]) == 0

    def test_bounds_go_by_their_names(self):
        first = bound_singular_values(EPSILON, name="wide")
        _, state = land(optax.chain(SGD, first, bound_singular_values(0.1, name="narrow")), self.PARAMS)
        assert {key.partition("/")[0] for key in projection_stats(state)} == {"wide", "narrow"}

    def test_the_state_has_named_fields(self):
        _, state = land(bound_singular_values(EPSILON), self.PARAMS)
        assert int(state.stats["svb"].num_values) == 8
        assert int(state.stats["svb"].num_clipped) == 2

    def test_figures_stay_until_the_next_projection(self):
        tx = svb(SGD, EPSILON, every=2, method="svd")
        step = jax.jit(tx.update)
        state, seen = tx.init(start()), []
        for _ in range(5):
            _, state = step(gradients(), state, start())
            stats = projection_stats(state)
            seen.append((int(stats["svb/step"]), int(stats["svb/exact"])))
        assert seen == [(0, 0), (2, 2), (2, 2), (4, 2), (4, 2)]

    def test_several_bounds_in_a_nested_state_are_told_apart(self):
        bands = {
            "conv": bound_singular_values(EPSILON, where=lambda p: jax.tree.map(lambda _: True, p)),
            "rest": optax.chain(bound_singular_values(0.0, every=3), bound_batch_norm_scales(BBN_EPSILON)),
        }
        labels = {"conv": "conv", "dense": "rest", "bn": "rest"}
        tx = optax.MultiSteps(optax.chain(SGD, optax.multi_transform(bands, labels)), 1)
        _, state = land(tx, start(), batch_stats=BATCH_STATS)
        stats = projection_stats(state)
        assert [int(stats[key]) for key in ("svb.0/step", "svb.1/step", "bbn/step")] == [1, 0, 1]
        moved = np.mean(bounded_scale(SCALE) != SCALE)
        assert float(stats["bbn/share_clipped"]) == moved
        assert "svb/step" not in stats

    def test_a_state_without_bounds_has_none(self):
        assert projection_stats(optax.adam(1e-3).init(start())) == {}
