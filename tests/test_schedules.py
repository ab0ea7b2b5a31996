import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from svb_jax import staircase_schedule


def test_paper_recipe_holds_each_of_80_log_spaced_values_for_two_epochs():
    schedule = staircase_schedule(0.5, 0.001, num_stages=80, steps_per_stage=782)
    expected = np.repeat(np.geomspace(0.5, 0.001, 80), 782)
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.arange(80 * 782)), expected, rtol=1e-6)


def test_both_ends_are_exact_and_the_last_stays():
    schedule = staircase_schedule(0.5, 0.001, num_stages=80, steps_per_stage=3)
    assert schedule(0) == schedule(2) == jnp.float32(0.5)
    assert schedule(3) < jnp.float32(0.5)
    assert schedule(79 * 3 - 1) > jnp.float32(0.001)
    assert schedule(79 * 3) == schedule(80 * 3) == schedule(10**9) == jnp.float32(0.001)


def test_may_climb():
    schedule = staircase_schedule(0.01, 1.0, num_stages=3, steps_per_stage=1)
    np.testing.assert_allclose([schedule(count) for count in range(4)], [0.01, 0.1, 1.0, 1.0], rtol=1e-6)


def test_a_single_stage_stays_at_the_start():
    schedule = staircase_schedule(0.5, 0.001, num_stages=1, steps_per_stage=4)
    assert [float(schedule(count)) for count in (0, 3, 4, 100)] == [0.5] * 4


def test_ends_may_be_traced():
    @jax.jit
    def value(start, end, count):
        return staircase_schedule(start, end, num_stages=3, steps_per_stage=2)(count)

    np.testing.assert_allclose(value(4.0, 1.0, 2), 2.0, rtol=1e-6)


def test_drives_an_optimizer():
    tx = optax.sgd(staircase_schedule(1.0, 0.25, num_stages=3, steps_per_stage=1))
    state = tx.init(jnp.array(0.0))
    steps = []
    for _ in range(4):
        update, state = tx.update(jnp.array(1.0), state)
        steps.append(float(update))
    assert steps == [-1.0, -0.5, -0.25, -0.25]


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["start", "end"])
def test_refuses_ends_without_a_logarithm(name, bad):
    arguments = {"start": 0.5, "end": 0.001, "num_stages": 2, "steps_per_stage": 1, name: bad}
    with pytest.raises(ValueError, match=rf"staircase_schedule needs a positive, finite {name}, got {bad}"):
        staircase_schedule(**arguments)


@pytest.mark.parametrize("bad", [0, -1, 1.5])
@pytest.mark.parametrize("name", ["num_stages", "steps_per_stage"])
def test_refuses_stages_that_are_not_whole(name, bad):
    arguments = {"start": 0.5, "end": 0.001, "num_stages": 2, "steps_per_stage": 1, name: bad}
    with pytest.raises(
        ValueError, match=f"staircase_schedule needs {name} to be a whole number, .* got {bad}"
    ):
        staircase_schedule(**arguments)
