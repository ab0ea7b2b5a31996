"""A bound as a step of its own: after the optimizer's, on the parameters themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import svb_jax
from tests.prescribed import (
    BATCH_STATS,
    BBN_EPSILON,
    EPSILON,
    assert_same,
    band_violation,
    frame,
    gradients,
    kernels,
    run_by_hand,
    start,
)

SGD = optax.sgd(1.0)
SVB = svb_jax.bound_singular_values(EPSILON, every=2)
BBN = svb_jax.bound_batch_norm_scales(BBN_EPSILON, every=3)
PARAMS = kernels(frame(6, 4).matrix([3.0, 1.2, 0.9, 0.25]))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_run_by_hand(is_compiled):
    def step(params, opt_state, svb_state, bbn_state):
        updates, opt_state = SGD.update(gradients(), opt_state, params)
        params = optax.apply_updates(params, updates)
        params, svb_state = SVB.apply(params, svb_state)
        params, bbn_state = BBN.apply(params, bbn_state, batch_stats=BATCH_STATS)
        return params, opt_state, svb_state, bbn_state

    state = (start(), *(tx.init(start()) for tx in (SGD, SVB, BBN)))
    step = jax.jit(step, donate_argnums=(0, 1, 2, 3)) if is_compiled else step
    for expected in run_by_hand([1] * 6, svb_at=(2, 4, 6), bbn_at=(3, 6)):
        state = step(*state)
        assert_same(state[0], expected)
    figures = svb_jax.projection_stats(state)
    assert figures["svb/step"] == figures["bbn/step"] == 6
    assert 0 < figures["svb/share_clipped"] < 1


def test_where_is_kept_to():
    matrix = PARAMS["0"]["kernel"]
    both = {"0": {"kernel": matrix}, "1": {"kernel": matrix}}
    bound = svb_jax.bound_singular_values(EPSILON, where="1")
    params, _ = bound.apply(both, bound.init(both))
    assert (params["0"]["kernel"] == matrix).all()
    assert band_violation(params["1"]["kernel"]) < 5e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types_keep_their_type_and_are_rounded_once(dtype):
    bound = svb_jax.bound_singular_values(EPSILON)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    bounded, _ = bound.apply(params, bound.init(params))
    expected = svb_jax.project(params, EPSILON)
    assert bounded["0"]["kernel"].dtype == dtype
    assert (bounded["0"]["kernel"] == expected["0"]["kernel"]).all()


@pytest.mark.nan_inputs
def test_bad_matrices_stay_as_they_are():
    spoilt = {
        "a": {"kernel": jnp.full((3, 3), jnp.nan)},
        "b": {"kernel": jnp.full((3, 3), jnp.inf)},
        **PARAMS,
    }
    bound = svb_jax.bound_singular_values(EPSILON)
    params, state = jax.jit(bound.apply)(spoilt, bound.init(spoilt))
    for name in "ab":
        np.testing.assert_array_equal(params[name]["kernel"], spoilt[name]["kernel"])
    assert band_violation(params["0"]["kernel"]) < 5e-6
    assert int(svb_jax.projection_stats(state)["svb/skipped"]) == 2


def test_values_inside_the_band_stay_bit_for_bit():
    params = {"kernel": jnp.diag(jnp.array([1.2, 0.9, -1.0], jnp.float32)).at[0, 1].set(-0.0)}
    bound = svb_jax.bound_singular_values(EPSILON)
    bounded, _ = jax.jit(bound.apply)(params, bound.init(params))
    np.testing.assert_array_equal(bounded["kernel"].view(jnp.int32), params["kernel"].view(jnp.int32))


def test_sharded_parameters_keep_their_sharding():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    params = jax.device_put(PARAMS, jax.tree.map(lambda _: sharding, PARAMS))
    bound = svb_jax.bound_singular_values(EPSILON, shardings=jax.tree.map(lambda leaf: leaf.sharding, params))
    bounded, _ = jax.jit(bound.apply)(params, bound.init(params))
    assert bounded["0"]["kernel"].sharding.is_equivalent_to(sharding, 2)
    assert band_violation(bounded["0"]["kernel"]) < 5e-6


def test_it_is_an_optax_transformation():
    assert isinstance(SVB, optax.GradientTransformationExtraArgs)
    assert isinstance(svb_jax.bound_singular_values(EPSILON, where="*"), svb_jax.Bound)


def test_batch_norm_without_its_statistics_raises():
    with pytest.raises(ValueError, match="batch_stats"):
        BBN.apply(start(), BBN.init(start()))
