"""Every composition of optax and every way to run a step: the hand-built parameters, at the right calls."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from svb_jax import bbn, svb
from tests.compiled_program import assert_only_taken_branches_work
from tests.prescribed import BATCH_STATS, BBN_EPSILON, EPSILON, assert_same, gradients, run_by_hand, start

SGD = optax.sgd(1.0)


def with_svb(inner, epsilon=EPSILON, bbn_epsilon=BBN_EPSILON, method="svd", **options):
    del bbn_epsilon
    return svb(inner, epsilon, every=2, method=method, **options)


def with_bbn(inner, epsilon=EPSILON, bbn_epsilon=BBN_EPSILON):
    del epsilon
    return bbn(inner, bbn_epsilon, every=3)


def with_both(inner, epsilon=EPSILON, bbn_epsilon=BBN_EPSILON):
    return with_bbn(with_svb(inner, epsilon), bbn_epsilon=bbn_epsilon)


TRANSFORMATIONS = {"svb": with_svb, "bbn": with_bbn, "both": with_both}


class Composition(NamedTuple):
    """Where a transformation stands, and what six calls with the same gradients must do then."""

    build: Callable[[Any], Any]
    moves: tuple[int, ...] = (1, 1, 1, 1, 1, 1)
    svb_at: tuple[int, ...] = (2, 4, 6)
    bbn_at: tuple[int, ...] = (3, 6)
    free: tuple[str, ...] = ()
    nan_at: tuple[int, ...] = ()


def all_but_dense(params):
    return {name: name != "dense" for name in params}


COMPOSITIONS = {
    "alone": Composition(lambda wrap: wrap(SGD)),
    "chain": Composition(lambda wrap: optax.chain(optax.trace(0.0), SGD, wrap(optax.identity()))),
    "named_chain": Composition(
        lambda wrap: optax.named_chain(("sgd", SGD), ("bound", wrap(optax.identity())))
    ),
    "masked": Composition(
        lambda wrap: optax.chain(SGD, optax.masked(wrap(optax.identity()), all_but_dense)), free=("dense",)
    ),
    "partition": Composition(
        lambda wrap: optax.partition(
            {"bound": wrap(SGD), "free": SGD}, {"conv": "bound", "dense": "free", "bn": "bound"}
        ),
        free=("dense",),
    ),
    # Inside, it sees optimizer steps: the second and third of them are calls 4 and 6.
    "inside MultiSteps": Composition(
        lambda wrap: optax.MultiSteps(wrap(SGD), every_k_schedule=2), (0, 1, 0, 1, 0, 1), (4,), (6,)
    ),
    # Around, it sees every call, those too in which nothing moves.
    "around MultiSteps": Composition(
        lambda wrap: wrap(optax.MultiSteps(SGD, every_k_schedule=2).gradient_transformation()),
        (0, 1, 0, 1, 0, 1),
    ),
    # A call that is turned down does not count.
    "apply_if_finite": Composition(
        lambda wrap: optax.apply_if_finite(wrap(SGD), 3), (1, 0, 1, 1, 1, 1), (3, 5), (4,), nan_at=(2,)
    ),
    "inject_hyperparams": Composition(
        lambda wrap: optax.inject_hyperparams(lambda epsilon, bbn_epsilon: wrap(SGD, epsilon, bbn_epsilon))(
            EPSILON, optax.constant_schedule(BBN_EPSILON)
        )
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMATIONS)
@pytest.mark.parametrize("composition", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_compositions_bound_at_the_right_calls(composition, kind):
    tx = composition.build(TRANSFORMATIONS[kind])
    expected = run_by_hand(
        composition.moves,
        composition.svb_at if kind != "bbn" else (),
        composition.bbn_at if kind != "svb" else (),
        composition.free,
    )

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, batch_stats=BATCH_STATS)
        return optax.apply_updates(params, updates), state

    params, grads = start(), gradients()
    spoilt = jax.tree.map(lambda g: g * jnp.nan, grads)
    state = tx.init(params)
    for call, after in enumerate(expected, 1):
        params, state = step(params, state, spoilt if call in composition.nan_at else grads)
        assert_same(params, after)


def test_bbn_raises_where_multi_steps_would_lose_the_statistics():
    tx = optax.chain(optax.MultiSteps(with_bbn(SGD), every_k_schedule=2).gradient_transformation())
    params = start()
    with pytest.raises(ValueError, match=r"needs the running variances.*optax\.MultiSteps inside a chain"):
        tx.update(gradients(), tx.init(params), params, batch_stats=BATCH_STATS)


# Where the parameters of a run on eight devices lie: whole on each, or in eight parts.
REPLICATED = jax.tree.map(lambda _: P(), start())
SHARDED = {
    "conv": {"kernel": P(None, None, None, "d")},
    "dense": {"kernel": P("d")},
    "bn": {"scale": P("d"), "bias": P("d")},
}
CALLS, EXPECTED = 3, run_by_hand((1, 1, 1), svb_at=(2,), bbn_at=(3,))[-1]


def make_step(method="auto", **options):
    """Return the start of a run and its step, with SVB due at the second call and BBN at the third."""
    tx = with_bbn(with_svb(SGD, method=method, **options))

    def step(params, state, grads, batch_stats):
        updates, state = tx.update(grads, state, params, batch_stats=batch_stats)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def run(step, params, state, grads):
    """Compile the step, check what it does when nothing is due, and take three."""
    compiled = step.lower(params, state, grads, BATCH_STATS).compile()
    assert_only_taken_branches_work(compiled.as_text())
    for _ in range(CALLS):
        params, state = compiled(params, state, grads, BATCH_STATS)
    return params


def run_eager():
    init, step = make_step()
    params, state = start(), init(start())
    for _ in range(CALLS):
        params, state = step(params, state, gradients(), BATCH_STATS)
    return params


def run_jit():
    init, step = make_step()
    return run(jax.jit(step), start(), init(start()), gradients())


def run_donated():
    init, step = make_step()
    given = start(), init(start())
    result = run(jax.jit(step, donate_argnums=(0, 1)), *given, gradients())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    return result


def run_pmap(axis_name):
    init, step = make_step(axis_name=axis_name)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), start())
    step = jax.pmap(step, axis_name="d", in_axes=(0, 0, None, None))
    return only_one_of(run(step, params, jax.pmap(init)(params), gradients()))


def only_one_of(replicas):
    """Return one of eight trees that must all be equal."""
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, leaf[:1].repeat(8, axis=0)), replicas)
    return jax.tree.map(lambda leaf: leaf[0], replicas)


def run_ensemble():
    """Run a network on each device that shard_map takes for another than its neighbours."""
    init, step = make_step()

    def own_step(params, state, grads, batch_stats):
        own = jax.tree.map(lambda leaf: leaf[0], (params, state, grads))
        return jax.tree.map(lambda leaf: leaf[None], step(*own, batch_stats))

    own = P("d")
    mapped = jax.shard_map(own_step, mesh=MESHES["auto"], in_specs=(own, own, own, P()), out_specs=own)
    given = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), (start(), init(start()), gradients()))
    return only_one_of(run(jax.jit(mapped), *jax.device_put(given, NamedSharding(MESHES["auto"], own))))


def run_shard_map(axis_name, check_vma):
    init, step = make_step(axis_name=axis_name)
    step = jax.shard_map(step, mesh=MESHES["auto"], in_specs=P(), out_specs=P(), check_vma=check_vma)
    # Laid out as the step will return it, or the second call would be compiled anew.
    placed = jax.device_put((start(), init(start())), NamedSharding(MESHES["auto"], P()))
    return run(jax.jit(step), *placed, gradients())


def run_sharded(types, specs, is_shared):
    mesh = MESHES[types]
    init, step = make_step(mesh=mesh if is_shared else None)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, grads = jax.device_put((start(), gradients()), (shardings, shardings))
    state = jax.device_put(init(params), NamedSharding(mesh, P()))
    result = run(jax.jit(step), params, state, grads)
    for leaf, sharding in zip(jax.tree.leaves(result), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return result


MESHES = {
    "auto": jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)),
    "explicit": jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,)),
}
MODES = {
    "eager": run_eager,
    "donated jit": run_donated,
    "shard_map, a network on each device": run_ensemble,
    **{f"pmap, shared {name}": partial(run_pmap, name) for name in (None, "d")},
    **{
        f"shard_map, check_vma {check}, shared {name}": partial(run_shard_map, name, check)
        for name, check in product((None, "d"), (True, False))
    },
    **{
        f"jit, {types}, {placed}, shared {is_shared}": partial(run_sharded, types, specs, is_shared)
        for types, (placed, specs), is_shared in product(
            MESHES, {"replicated": REPLICATED, "sharded": SHARDED}.items(), (False, True)
        )
    },
}


@pytest.fixture(scope="module")
def on_one_device():
    return run_jit()


def test_a_step_under_jit_is_the_one_by_hand(on_one_device):
    assert_same(on_one_device, EXPECTED)


@pytest.mark.parametrize("run_mode", MODES.values(), ids=MODES)
def test_modes_agree_with_one_device_and_with_the_run_by_hand(run_mode, on_one_device):
    result = jax.device_get(run_mode())
    assert_same(result, EXPECTED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), result, on_one_device)
