"""Bounded scales by hand, on plain trees and on the networks of Linen, NNX, Haiku and Equinox."""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from svb_jax import (
    bbn,
    bound_batch_norm_scales,
    paths,
    project_batch_norm,
    projection_stats,
    singular_values,
    svb,
)
from svb_jax._src.running_variances import find_scales
from tests.prescribed import bounded_scale, land

# With standard deviations 1, 2, 1/2 and 1 the ratios are 8, 1, 4 and 3, and their mean is 4. Within a factor
# of two that is 2 to 8, so that only the second moves: from 2 to 2 times 2.
SCALE = np.array([8.0, 2.0, 2.0, 3.0], np.float32)
VARIANCE = np.array([1.0, 4.0, 0.25, 1.0], np.float32)
BN_EPSILON = 1e-3

# (scale, variance, epsilon) and what must become of the scale.
BY_HAND = {
    "below": (SCALE, VARIANCE, 1.0, [8, 4, 2, 3]),
    "above": (SCALE, VARIANCE, 0.6, [6.4, 5, 2, 3]),
    "no room": (SCALE, VARIANCE, 0.0, [4, 8, 2, 4]),
    "wide": (SCALE, VARIANCE, 3.0, SCALE),
    "negative": ([9.0, -1.0], [1.0, 1.0], 1.0, [8, 2]),
    "one channel": ([0.3], [5.0], 0.0, [0.3]),
    "one layer a row": (
        [[8.0, 2, 2, 3], [1, 1, 1, 1]],
        [VARIANCE, [1, 1, 1, 1]],
        1.0,
        [[8, 4, 2, 3], [1, 1, 1, 1]],
    ),
}


def variance(values):
    """Return the running variance whose standard deviation, as BatchNorm computes it, is its root."""
    return jnp.asarray(values, jnp.float32) - BN_EPSILON


@pytest.mark.parametrize(("scale", "var", "epsilon", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_scales_are_bounded_around_their_mean(scale, var, epsilon, expected):
    params = {"bn": {"scale": jnp.asarray(scale), "bias": jnp.ones(4)}}
    statistics = {"bn": {"mean": jnp.ones(4), "var": variance(var)}}
    tx = bound_batch_norm_scales(epsilon, bn_epsilon=BN_EPSILON)
    after, state = land(tx, params, batch_stats=statistics)
    np.testing.assert_allclose(after["bn"]["scale"], expected, rtol=1e-5)
    np.testing.assert_array_equal(after["bn"]["bias"], params["bn"]["bias"])
    moved = np.asarray(expected, np.float32) != np.asarray(scale, np.float32)
    stats = projection_stats(state)
    np.testing.assert_allclose(stats["bbn/share_clipped"], np.mean(moved), rtol=1e-6)
    assert int(stats["bbn/skipped"]) == 0
    functional = project_batch_norm(params, statistics, epsilon, bn_epsilon=BN_EPSILON)
    np.testing.assert_allclose(functional["bn"]["scale"], expected, rtol=1e-5)


def test_layers_of_any_width_are_bounded_each_around_its_own_mean():
    names = ["below", "negative", "one channel", "one layer a row"]
    params, statistics, expected = {}, {}, {}
    for name in names:
        scale, var, _, expected[name] = BY_HAND[name]
        params[name], statistics[name] = {"scale": jnp.asarray(scale)}, {"var": variance(var)}
    tx = bound_batch_norm_scales(1.0, bn_epsilon=BN_EPSILON)
    after, state = land(tx, params, batch_stats=statistics)
    for name in names:
        np.testing.assert_allclose(after[name]["scale"], expected[name], rtol=1e-5)
    # One of four, both of two, none of one, one of eight.
    np.testing.assert_allclose(projection_stats(state)["bbn/share_clipped"], 4 / 15, rtol=1e-6)


def test_bn_epsilon_is_flaxs_by_default():
    after = project_batch_norm({"scale": jnp.array([1.0, 3.0])}, {"var": jnp.array([0.0, 9e-5])}, 0.0)
    # Standard deviations sqrt(1e-5) and sqrt(1e-4): ratios 100 sqrt(10) and 300, half their sum times each.
    mean = (100 * 10**0.5 + 300) / 2
    np.testing.assert_allclose(after["scale"], [mean * 1e-5**0.5, mean * 1e-2], rtol=1e-5)


TWO_NORMS = {
    "bn": {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])},
    "ln": {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])},
}
# Around their own mean of 3, a factor of two is 1.5 to 6.
RELATIVE = [6.0, 1.5, 1.5, 2.0]


@pytest.mark.parametrize(
    ("where", "batch_stats"),
    [(None, {"bn": {"var": jnp.array([7.0, 1.0, 3.0, 2.0])}}), ({"bn": True, "ln": False}, None)],
    ids=["by batch_stats", "by where"],
)
def test_the_relative_kind_needs_no_variance_only_to_know_its_layers(where, batch_stats):
    tx = bound_batch_norm_scales(1.0, kind="relative", where=where)
    after, _ = land(tx, TWO_NORMS, batch_stats=batch_stats)
    functional = project_batch_norm(TWO_NORMS, batch_stats, 1.0, kind="relative", where=where)
    for params in (after, functional):
        np.testing.assert_allclose(params["bn"]["scale"], RELATIVE, rtol=1e-6)
        np.testing.assert_array_equal(params["ln"]["scale"], TWO_NORMS["ln"]["scale"])


def test_the_paired_kind_obeys_where_too():
    layers = {name: {"scale": jnp.array([8.0, 1.0, 1.0, 2.0])} for name in "ab"}
    statistics = {name: {"var": jnp.full(4, 1 - 1e-5)} for name in "ab"}
    after, _ = land(
        bound_batch_norm_scales(1.0, where={"a": True, "b": False}), layers, batch_stats=statistics
    )
    np.testing.assert_allclose(after["a"]["scale"], RELATIVE, rtol=1e-6)
    np.testing.assert_array_equal(after["b"]["scale"], layers["b"]["scale"])


@pytest.mark.nan_inputs
@pytest.mark.parametrize("bad", [[1.0, -3.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_a_layer_whose_mean_is_no_positive_number_is_left_alone_and_counted(bad):
    params = {"good": {"scale": jnp.array([9.0, 1.0])}, "bad": {"scale": jnp.array(bad)}}
    statistics = {name: {"var": jnp.full(2, 1 - 1e-5)} for name in params}
    after, state = land(bound_batch_norm_scales(0.5), params, batch_stats=statistics)
    np.testing.assert_array_equal(after["bad"]["scale"], bad)
    np.testing.assert_allclose(after["good"]["scale"], [7.5, 5 / 1.5], rtol=1e-6)
    stats = projection_stats(state)
    assert int(stats["bbn/skipped"]) == 1
    assert float(stats["bbn/share_clipped"]) == 2 / 4


def test_rows_of_a_stack_are_left_alone_one_by_one():
    params = {"scale": jnp.array([[1.0, -3.0], [9.0, 1.0]])}
    after, state = land(bound_batch_norm_scales(0.5), params, batch_stats={"var": jnp.full((2, 2), 1 - 1e-5)})
    np.testing.assert_allclose(after["scale"], [[1, -3], [7.5, 5 / 1.5]], rtol=1e-6)
    assert int(projection_stats(state)["bbn/skipped"]) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types_store_the_exact_bound_rounded_once(dtype):
    params = {"scale": jnp.array([9.0, 1.0], dtype)}
    after, _ = land(bound_batch_norm_scales(0.5), params, batch_stats={"var": jnp.full(2, 1 - 1e-5)})
    np.testing.assert_array_equal(after["scale"], jnp.array([7.5, 5 / 1.5], dtype))


class Network(nn.Module):
    """Every norm there is: only the BatchNorm with a scale has one to bound."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, name="bn")(x)
        x = nn.BatchNorm(use_running_average=not train, use_scale=False, name="without_scale")(x)
        x = nn.GroupNorm(2, name="gn")(nn.LayerNorm(name="ln")(x))
        return nn.SpectralNorm(nn.Dense(2, name="dense"), name="sn")(x, update_stats=train)


STEPPED = jnp.array([8.0, 1.0, 1.5, 2.0])


def batch():
    return jax.random.normal(jax.random.key(1), (16, 4)) * jnp.array([1.0, 2.0, 3.0, 4.0])


def after_bounding(running_variance):
    return bounded_scale(np.asarray(STEPPED, float), 1.0, np.sqrt(np.asarray(running_variance, float) + 1e-5))


def test_linen_scales_meet_the_statistics_as_the_step_updated_them():
    variables = jax.jit(Network().init, static_argnames="train")(jax.random.key(0), batch(), train=False)
    train = jax.jit(lambda variables, x: Network().apply(variables, x, train=True, mutable="batch_stats"))
    _, updated = train(variables, batch())
    params, statistics = variables["params"], updated["batch_stats"]
    assert {"without_scale", "sn"} < set(statistics)
    # One step of gradient descent takes every scale to the same place, then the bound acts.
    grads = jax.tree.map(jnp.zeros_like, params)
    for norm in ("bn", "ln", "gn"):
        grads[norm]["scale"] = params[norm]["scale"] - STEPPED
    tx = optax.chain(optax.sgd(1.0), bound_batch_norm_scales(1.0))
    updates, _ = tx.update(grads, tx.init(params), params, batch_stats=statistics)
    after = optax.apply_updates(params, updates)
    expected = after_bounding(statistics["bn"]["var"])
    assert np.sum(expected != STEPPED) >= 2
    np.testing.assert_allclose(after["bn"]["scale"], expected, rtol=2e-6)
    for norm in ("ln", "gn"):
        np.testing.assert_array_equal(after[norm]["scale"], STEPPED)
    np.testing.assert_array_equal(after["dense"]["kernel"], params["dense"]["kernel"])


class NormedLayer(nnx.Module):
    def __init__(self, rngs):
        self.ln = nnx.LayerNorm(4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)


def test_nnx_optimizers_pass_the_statistics_on():
    model = NormedLayer(nnx.Rngs(0))
    model.bn(batch())
    tx = optax.chain(optax.sgd(1.0), bound_batch_norm_scales(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    for norm in ("bn", "ln"):
        grads[norm]["scale"] = grads[norm]["scale"].replace(1 - STEPPED)
    optimizer.update(model, grads, batch_stats=nnx.state(model, nnx.BatchStat))
    expected = after_bounding(model.bn.var[...])
    assert np.sum(expected != STEPPED) >= 2
    np.testing.assert_allclose(model.bn.scale[...], expected, rtol=2e-6)
    np.testing.assert_array_equal(model.ln.scale[...], STEPPED)


def test_haikus_state_holds_the_statistics():
    def network(x):
        x = hk.LayerNorm(-1, True, True)(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        return hk.nets.MLP([4])(x)

    params, state = hk.transform_with_state(network).init(jax.random.key(0), batch())
    params["batch_norm"]["scale"] = params["layer_norm"]["scale"] = STEPPED[None]
    average = state["batch_norm/~/var_ema"]["average"] = jnp.array([[1.0, 0.5, 2.0, 4.0]])
    after, _ = land(bound_batch_norm_scales(1.0), params, batch_stats=state)
    expected = after_bounding(average)
    assert np.sum(expected != STEPPED) >= 2
    np.testing.assert_allclose(after["batch_norm"]["scale"], expected, rtol=2e-6)
    np.testing.assert_array_equal(after["layer_norm"]["scale"], STEPPED[None])


class NormedEquinox(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    bn: eqx.nn.BatchNorm

    def __init__(self, mode):
        self.linear, self.norm = eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.LayerNorm(4)
        self.bn = eqx.nn.BatchNorm(4, "batch", mode=mode)


def equinox_network(mode):
    model, state = eqx.nn.make_with_state(NormedEquinox)(mode)
    model = eqx.tree_at(lambda m: (m.bn.weight, m.norm.weight), model, (STEPPED, STEPPED))
    _, state = jax.vmap(model.bn, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch(), state)
    return model, state


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_equinoxs_state_holds_the_statistics(mode):
    model, state = equinox_network(mode)
    params = eqx.filter(model, eqx.is_inexact_array)
    after, _ = land(bound_batch_norm_scales(1.0), params, batch_stats=state)
    # What BatchNorm itself divides by at inference: the response to a unit input has no shift but its own.
    frozen = eqx.tree_at(lambda m: m.bn.weight, eqx.nn.inference_mode(model), jnp.ones(4)).bn
    std = 1 / (frozen(jnp.ones(4), state)[0] - frozen(jnp.zeros(4), state)[0])
    expected = bounded_scale(np.asarray(STEPPED, float), 1.0, np.asarray(std, float))
    assert np.sum(expected != STEPPED) >= 2
    np.testing.assert_allclose(after.bn.weight, expected, rtol=1e-5)
    np.testing.assert_array_equal(after.norm.weight, STEPPED)
    np.testing.assert_array_equal(after.linear.weight, model.linear.weight)


def test_the_relative_kind_finds_equinoxs_scales_through_where():
    params = eqx.filter(equinox_network("batch")[0], eqx.is_inexact_array)
    tx = bound_batch_norm_scales(1.0, kind="relative", where=paths("bn", "linear"))
    after, _ = land(tx, params)
    np.testing.assert_allclose(after.bn.weight, bounded_scale(np.asarray(STEPPED, float), 1.0, np.ones(4)))
    for name in ("norm", "linear"):
        np.testing.assert_array_equal(getattr(after, name).weight, getattr(params, name).weight)


def test_other_trees_name_their_pairs():
    params = {"a": {"gamma": jnp.ones(3)}, "b": {"gamma": jnp.ones(2)}, "ln": {"gamma": jnp.ones(2)}}
    statistics = {"a": {"moving": jnp.full(3, 2.0)}}
    for pairs in ({"a/gamma": "a/moving", "b/gamma": jnp.zeros(2)}, [("a/gamma", "a/moving")]):
        scales = find_scales("bbn", params, statistics, "bbn", is_masked=False, pairs=pairs)
        assert [scale[:2] for scale in scales] == [(0, "a/gamma"), (1, "b/gamma")][: len(pairs)]
        np.testing.assert_array_equal(scales[0].variance, statistics["a"]["moving"])
    (scale,) = find_scales("bbn", params, None, "bbn", is_masked=False, pairs={"ln/gamma": jnp.zeros(2)})
    assert scale.position == 2
    with pytest.raises(ValueError, match="bbn found no 'a/variance' of its pairs; the nearest: 'a/moving'"):
        find_scales("bbn", params, statistics, "bbn", is_masked=False, pairs={"a/gamma": "a/variance"})


def test_named_pairs_are_bounded():
    params = {"bn": {"gamma": jnp.asarray(SCALE)}, "ln": {"gamma": jnp.asarray(SCALE)}}
    statistics = {"bn": {"moving": variance(VARIANCE)}}
    pairs = {"bn/gamma": "bn/moving"}
    after, _ = land(
        bound_batch_norm_scales(1.0, bn_epsilon=BN_EPSILON, pairs=pairs), params, batch_stats=statistics
    )
    functional = project_batch_norm(params, statistics, 1.0, bn_epsilon=BN_EPSILON, pairs=pairs)
    for bounded in (after, functional):
        np.testing.assert_allclose(bounded["bn"]["gamma"], [8, 4, 2, 3], rtol=1e-5)
        np.testing.assert_array_equal(bounded["ln"]["gamma"], SCALE)


WRONG_SCALES = {
    "variances of another size": (
        {"a": {"scale": jnp.ones(2)}, "b": {"scale": jnp.ones(3)}},
        {"a": {"var": jnp.ones(3)}, "b": {"var": jnp.ones(2)}},
        "needs a running variance for each scale, got shape (3,) for 'a/scale' of shape (2,).",
    ),
    "integers": (
        {"scale": jnp.array([1, 9])},
        {"var": jnp.ones(2)},
        "needs scales in floating point, of 16 bits or more, got int32 at 'scale'.",
    ),
    "float8": (
        {"scale": jnp.ones(2, jnp.float8_e4m3fn)},
        {"var": jnp.ones(2)},
        "needs scales in floating point, of 16 bits or more, got float8_e4m3fn at 'scale'.",
    ),
}


@pytest.mark.parametrize(("params", "statistics", "told"), WRONG_SCALES.values(), ids=WRONG_SCALES)
def test_scales_that_cannot_be_bounded_raise(params, statistics, told):
    with pytest.raises(ValueError, match=re.escape(f"project_batch_norm {told}")):
        project_batch_norm(params, statistics, 0.5)


def test_a_scale_of_rank_zero_is_its_own_mean():
    params = {"one": {"scale": jnp.float32(3)}, "more": {"scale": jnp.array([9.0, 1.0])}}
    statistics = {"one": {"var": jnp.float32(1)}, "more": {"var": jnp.full(2, 1 - 1e-5)}}
    after = project_batch_norm(params, statistics, 0.5)
    assert float(after["one"]["scale"]) == 3
    np.testing.assert_allclose(after["more"]["scale"], [7.5, 5 / 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("epsilon", "expected", "skipped"),
    [(-2.0, [5, 5], 0), (np.nan, [9, 1], 1), (np.inf, [9, 1], 1)],
    ids=["negative", "nan", "inf"],
)
def test_a_schedule_that_gives_no_epsilon_does_not_harm(epsilon, expected, skipped):
    tx = bound_batch_norm_scales(lambda count: jnp.float32(epsilon))
    after, state = land(tx, {"scale": jnp.array([9.0, 1.0])}, batch_stats={"var": jnp.full(2, 1 - 1e-5)})
    np.testing.assert_allclose(after["scale"], expected, rtol=1e-6)
    assert int(projection_stats(state)["bbn/skipped"]) == skipped


def test_scanned_layers_are_bounded_one_by_one():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.BatchNorm(use_running_average=True)(x), None

    stack = nn.scan(
        Layer, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=2
    )
    variables = stack().init(jax.random.key(0), jnp.ones((1, 4)), None)
    params, statistics = variables["params"], variables["batch_stats"]
    assert params["BatchNorm_0"]["scale"].shape == (2, 4)
    rows = np.array([[8.0, 1.0, 1.0, 2.0], [0.3, 0.1, 0.1, 0.1]])
    stds = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 0.5, 0.5]])
    params["BatchNorm_0"]["scale"] = jnp.asarray(rows, jnp.float32)
    statistics["BatchNorm_0"]["var"] = jnp.asarray(stds**2 - 1e-5, jnp.float32)
    after = project_batch_norm(params, statistics, 0.5)["BatchNorm_0"]["scale"]
    expected = [bounded_scale(row, 0.5, std) for row, std in zip(rows, stds, strict=True)]
    np.testing.assert_allclose(after, expected, rtol=2e-6)


def test_a_haiku_network_trains_within_both_bounds():
    def network(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=True)
        return hk.Linear(2)(jax.nn.relu(x))

    haiku = hk.without_apply_rng(hk.transform_with_state(network))
    params, state = haiku.init(jax.random.key(0), batch())
    tx = bbn(svb(optax.sgd(1.0), 0.1, method="svd"), 0.1)

    @jax.jit
    def step(params, state, opt_state):
        def loss(params):
            out, new_state = haiku.apply(params, state, batch())
            return (out**2).mean(), new_state

        grads, state_after = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params, batch_stats=state_after)
        return optax.apply_updates(params, updates), state_after, opt_state

    params, state, _ = step(params, state, tx.init(params))
    std = np.sqrt(np.asarray(state["batch_norm/~/var_ema"]["average"], float) + 1e-5)
    assert std.max() / std.min() > 2
    ratios = np.asarray(params["batch_norm"]["scale"], float) / std
    # The mean that the band stands around is that of before the clip.
    assert ratios.max() / ratios.min() <= 1.1**2 * (1 + 1e-5)
    for values in singular_values(params).values():
        assert values.min() > 1 / 1.1 - 1e-5
        assert values.max() < 1.1 + 1e-5
