"""What a wrong call is told: which function, what it needs, what it got. Each test reads the sentence."""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import svb_jax
from svb_jax import MatrixAxes

KEY = jax.random.key(0)
KERNEL = {"dense": {"kernel": jnp.eye(3)}}
SCALES = {"bn": {"scale": jnp.ones(3)}, "ln": {"scale": jnp.ones(3)}}
VARIANCES = {"bn": {"var": jnp.ones(3)}}
STACK = {"blocks": {"kernel": jnp.ones((2, 3, 4))}}


def update(tx, params, **extra):
    return tx.update(params, tx.init(params), params, **extra)


def read_with(axes):
    return lambda: svb_jax.project(KERNEL, 0.5, dimension_numbers={"dense": {"kernel": axes}})


SVB, BBN = "bound_singular_values", "bound_batch_norm_scales"
EPSILON_NEED = "a finite epsilon >= 0, got"
COUNT_NEED = "to be a whole number, 1 or more, got"
NO_MATRIX = (
    "svb_jax found no weight matrix: it takes leaves called kernel, w or weight unless dimension_numbers= "
    "says otherwise (svb_jax.every_matrix takes all), and it saw "
)
AMBIGUOUS = (
    "a convolution over one axis, an attention projection and a stack of dense layers look alike. Say so "
    "with dimension_numbers=, for example svb_jax.attention, svb_jax.scan_stacks('module'), svb_jax.oihw or "
    "svb_jax.by_path({'blocks/kernel': svb_jax.MatrixAxes(...)}), with None there to leave it alone."
)
NO_STATISTICS = (
    "needs the running variances: pass batch_stats=batch_stats to update. A wrapper that drops extra "
    "arguments, such as optax.MultiSteps inside a chain, cannot hold it."
)
NO_PAIR = "found no BatchNorm: a parameter .../scale needs a running variance .../var in batch_stats."
UNREADABLE = "'dense/kernel' of shape (3, 3) cannot be read with"
NEEDS_MATRICES = (
    "clip_singular_values needs real floating-point matrices of 16 bits or more and of shape (..., m, n), got"
)
NEEDS_BAND = "clip_singular_values needs 0 <= lower <= upper < inf, got"

WRONG_NUMBERS = {
    f"{function}, {name} {value}": (lambda make=make, name=name, value=value: make(**{name: value}), told)
    for function, make in {
        SVB: lambda epsilon=0.5, **options: svb_jax.svb(optax.sgd(0.1), epsilon, **options),
        BBN: lambda epsilon=0.5, **options: svb_jax.bbn(optax.sgd(0.1), epsilon, **options),
    }.items()
    for name, value, told in [
        *(
            ("epsilon", value, f"{function} needs {EPSILON_NEED} {value}.")
            for value in (-0.1, jnp.inf, jnp.nan)
        ),
        *(("every", value, f"{function} needs every {COUNT_NEED} {value}.") for value in (0, -3, 1.5)),
        *(("until", value, f"{function} needs until {COUNT_NEED} {value}.") for value in (0, 2.5)),
    ]
}

WRONG_OPTIONS = {
    "method": (
        lambda: svb_jax.bound_singular_values(0.5, method="qr"),
        "bound_singular_values needs method to be one of auto, svd, gram, products, got 'qr'.",
    ),
    "kind": (
        lambda: svb_jax.bound_batch_norm_scales(0.5, kind="absolute"),
        "bound_batch_norm_scales needs kind to be one of bbn, relative, got 'absolute'.",
    ),
    "scale": (
        lambda: svb_jax.bound_singular_values(0.5, centre=0.0),
        "bound_singular_values needs a positive, finite centre, got 0.0.",
    ),
    "two ways to share": (
        lambda: svb_jax.bound_singular_values(0.5, axis_name="d", mesh=jax.make_mesh((8,), ("d",))),
        "bound_singular_values takes axis_name (inside pmap or shard_map), or mesh and shardings (under "
        "jit), not both.",
    ),
    "project, epsilon": (
        lambda: svb_jax.project(KERNEL, -1.0),
        "project needs a finite epsilon >= 0, got -1.0.",
    ),
    "project, method": (
        lambda: svb_jax.project(KERNEL, 0.5, method="qr"),
        "project needs method to be one of auto, svd, gram, products, got 'qr'.",
    ),
    "project, scale": (
        lambda: svb_jax.project(KERNEL, 0.5, centre=-1.0),
        "project needs a positive, finite centre, got -1.0.",
    ),
    "project, two ways to share": (
        lambda: svb_jax.project(KERNEL, 0.5, axis_name="d", mesh=jax.make_mesh((8,), ("d",))),
        "project takes axis_name (inside pmap or shard_map), or mesh and shardings (under jit), not both.",
    ),
    "project_batch_norm, epsilon": (
        lambda: svb_jax.project_batch_norm(SCALES, VARIANCES, jnp.nan),
        "project_batch_norm needs a finite epsilon >= 0, got nan.",
    ),
    "project_batch_norm, kind": (
        lambda: svb_jax.project_batch_norm(SCALES, VARIANCES, 0.5, kind="absolute"),
        "project_batch_norm needs kind to be one of bbn, relative, got 'absolute'.",
    ),
    "clip_singular_values, rank": (
        lambda: svb_jax.clip_singular_values(jnp.ones(3), 0.5, 2.0),
        f"{NEEDS_MATRICES} float32 of shape (3,).",
    ),
    "clip_singular_values, type": (
        lambda: svb_jax.clip_singular_values(jnp.ones((3, 3), jnp.int32), 0.5, 2.0),
        f"{NEEDS_MATRICES} int32 of shape (3, 3).",
    ),
    "clip_singular_values, complex": (
        lambda: svb_jax.clip_singular_values(jnp.ones((3, 3), jnp.complex64), 0.5, 2.0),
        f"{NEEDS_MATRICES} complex64 of shape (3, 3).",
    ),
    "clip_singular_values, band": (
        lambda: svb_jax.clip_singular_values(jnp.eye(3), 2.0, 0.5),
        f"{NEEDS_BAND} lower=2.0 and upper=0.5.",
    ),
    "clip_singular_values, negative": (
        lambda: svb_jax.clip_singular_values(jnp.eye(3), -1.0, 0.5),
        f"{NEEDS_BAND} lower=-1.0 and upper=0.5.",
    ),
    "clip_singular_values, method": (
        lambda: svb_jax.clip_singular_values(jnp.eye(3), 0.5, 2.0, method="qr"),
        "clip_singular_values needs method to be one of auto, svd, gram, products, got 'qr'.",
    ),
}

WRONG_TREES = {
    "no matrix": (
        lambda: svb_jax.svb(optax.sgd(0.1), 0.5).init(
            {"bn": {"scale": jnp.ones(3)}, "x": [jnp.ones((2, 2))]}
        ),
        f"{NO_MATRIX}bn/scale (3,), x/0 (2, 2).",
    ),
    "nothing at all": (lambda: svb_jax.project({}, 0.5), f"{NO_MATRIX}nothing."),
    "everything masked": (
        lambda: svb_jax.bound_singular_values(0.5, where={"dense": False}).init(KERNEL),
        f"{NO_MATRIX}nothing.",
    ),
    "axes for other leaves": (
        lambda: svb_jax.project(KERNEL, 0.5, dimension_numbers={"conv": {"kernel": MatrixAxes(0, 1)}}),
        f"{NO_MATRIX}dense/kernel (3, 3).",
    ),
    "rank three": (
        lambda: svb_jax.svb(optax.sgd(0.1), 0.5).init(STACK),
        f"svb_jax cannot tell how 'blocks/kernel' of shape (2, 3, 4) is a matrix: {AMBIGUOUS}",
    ),
    "stacked Equinox layers": (
        lambda: svb_jax.project(
            jax.vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(jax.random.split(KEY)), 0.5
        ),
        "svb_jax cannot tell how 'weight' of shape (2, 3, 2) is a matrix: a Linear has a weight of rank 2, "
        "unless stacked.",
    ),
    "integers": (
        lambda: svb_jax.project({"kernel": jnp.ones((3, 3), jnp.int8)}, 0.5),
        "'kernel' must be real floating point, of 16 bits or more, to bound its singular values, got int8.",
    ),
    "axes that repeat": (
        read_with(MatrixAxes((0, 1), 1)),
        f"{UNREADABLE} MatrixAxes(reduction=(0, 1), output=1, groups=1): axes repeat or are missing.",
    ),
    "axes that are missing": (
        read_with(MatrixAxes((), 1)),
        f"{UNREADABLE} MatrixAxes(reduction=(), output=1, groups=1): axes repeat or are missing.",
    ),
    "axes that are not there": (
        read_with(MatrixAxes(0, 2)),
        "svb_jax got axes (2,) for 'dense/kernel', which has rank 2.",
    ),
    "groups that do not divide": (
        read_with(MatrixAxes(0, 1, groups=2)),
        "'dense/kernel' has 3 outputs, which 2 groups do not divide.",
    ),
    "no groups": (
        read_with(MatrixAxes(0, 1, groups=0)),
        "'dense/kernel' has 3 outputs, which 0 groups do not divide.",
    ),
    "a grouped kernel that is not there": (
        lambda: svb_jax.grouped_convolutions({"conv/kernel": 2})(KERNEL),
        "grouped_convolutions found no leaf that 'conv/kernel' matches; the nearest: 'dense/kernel'.",
    ),
    "a stack that is not there": (
        lambda: svb_jax.scan_stacks("layers", "blocks")(STACK),
        "scan_stacks found no leaf that 'layers' matches; the nearest: 'blocks/kernel'.",
    ),
}

WRONG_UPDATES = {
    "svb without params": (
        lambda: (tx := svb_jax.bound_singular_values(0.5)).update(KERNEL, tx.init(KERNEL)),
        "bound_singular_values needs the parameters: call tx.update(grads, state, params).",
    ),
    "updates of other names": (
        lambda: (tx := svb_jax.bound_singular_values(0.5)).update(STACK, tx.init(KERNEL), KERNEL),
        "bound_singular_values matches updates and parameters by path, and found no path that both have: "
        "\"['blocks']['kernel']\" is in the updates alone.",
    ),
    "an update of another shape": (
        lambda: (tx := svb_jax.bound_singular_values(0.5)).update(
            {"dense": {"kernel": jnp.ones(3)}}, tx.init(KERNEL), KERNEL
        ),
        "bound_singular_values needs updates of the parameters' shapes, got (3,) for ['dense']['kernel'] of "
        "shape (3, 3).",
    ),
    "layers without parameters": (
        lambda: optax.tree_map_params(
            tx := svb_jax.bound_singular_values(0.5, per_layer=True), lambda leaf: leaf, tx.init(KERNEL)
        ),
        "bound_singular_values needs the parameters to know its layers: with per_layer=True",
    ),
    "bbn without params": (
        lambda: (tx := svb_jax.bound_batch_norm_scales(0.5)).update(SCALES, tx.init(SCALES)),
        "bound_batch_norm_scales needs the parameters: call tx.update(grads, state, params).",
    ),
    "no statistics": (
        lambda: update(svb_jax.bbn(optax.sgd(0.1), 0.5), SCALES),
        f"bound_batch_norm_scales {NO_STATISTICS}",
    ),
    "no statistics, only a mask": (
        lambda: update(svb_jax.bound_batch_norm_scales(0.5, where={"bn": True, "ln": False}), SCALES),
        f"bound_batch_norm_scales {NO_STATISTICS}",
    ),
    "relative, neither statistics nor a mask": (
        lambda: update(svb_jax.bound_batch_norm_scales(0.5, kind="relative"), SCALES),
        f"bound_batch_norm_scales {NO_STATISTICS}",
    ),
    "statistics of other layers": (
        lambda: update(svb_jax.bound_batch_norm_scales(0.5), SCALES, batch_stats={"norm": VARIANCES["bn"]}),
        f"bound_batch_norm_scales {NO_PAIR} Scales: bn/scale, ln/scale; layers with variances: norm.",
    ),
    "statistics without variances": (
        lambda: svb_jax.project_batch_norm({"bias": jnp.ones(3)}, {"sn": {"sigma": jnp.ones(())}}, 0.5),
        f"project_batch_norm {NO_PAIR} Scales: none; layers with variances: none.",
    ),
    "functional, no statistics": (
        lambda: svb_jax.project_batch_norm(SCALES, None, 0.5),
        "project_batch_norm needs the running variances",
    ),
}

WRONG_PLACES = {
    "shardings of nothing": (
        lambda: svb_jax.project(KERNEL, 0.5, shardings={}),
        "svb_jax needs shardings= to be a tree of NamedSharding like the parameters",
    ),
    "shardings of one device": (
        lambda: svb_jax.project(KERNEL, 0.5, shardings=jax.tree.map(lambda leaf: leaf.sharding, KERNEL)),
        "it has SingleDeviceSharding(",
    ),
    "shardings inside pmap": (
        lambda: svb_jax.svb(optax.sgd(0.1), 0.5, axis_name="d", shardings=KERNEL),
        "takes axis_name (inside pmap or shard_map), or mesh and shardings (under jit), not both.",
    ),
    "a mask that is a word": (
        lambda: svb_jax.project(KERNEL, 0.5, where=lambda params: "dense"),
        "a function from the parameters to such a tree, got str with 'dense' in it.",
    ),
    "no patterns": (lambda: svb_jax.project(KERNEL, 0.5, where=[]), "got list with nothing in it."),
    "no bands": (lambda: svb_jax.svb(optax.sgd(0.1), {}), "needs epsilon for at least one pattern of paths"),
    "a centre below zero": (
        lambda: svb_jax.project(KERNEL, 0.5, centre=lambda outputs, inputs: -1.0),
        "svb_jax needs a positive, finite centre, got -1.0 for 'dense/kernel'.",
    ),
    "float8": (
        lambda: svb_jax.clip_singular_values(jnp.ones((2, 2), jnp.float8_e4m3fn), 0.5, 2.0),
        "clip_singular_values needs real floating-point matrices of 16 bits or more",
    ),
    "a negative bn_epsilon": (
        lambda: svb_jax.bound_batch_norm_scales(0.5, bn_epsilon=-1.0),
        "bound_batch_norm_scales needs a finite bn_epsilon >= 0, got -1.0.",
    ),
}

WRONG_CALLS = WRONG_NUMBERS | WRONG_OPTIONS | WRONG_TREES | WRONG_UPDATES | WRONG_PLACES


@pytest.mark.parametrize(("call", "told"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_told_what_is_wrong(call, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        call()


def test_axes_of_another_type_are_refused_by_name():
    with pytest.raises(TypeError, match=r"dimension_numbers for 'dense/kernel' must be a svb_jax.MatrixAxes"):
        svb_jax.project(KERNEL, 0.5, dimension_numbers={"dense": {"kernel": "io"}})


def test_a_stock_train_state_is_told_of_the_statistics_it_cannot_pass():
    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=True)])
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=svb_jax.bbn(optax.sgd(0.1), 0.5))
    with pytest.raises(ValueError, match=r"pass batch_stats=batch_stats to update"):
        state.apply_gradients(grads=params)


def test_numbers_that_are_traced_are_not_judged():
    @jax.jit
    def project(epsilon):
        return svb_jax.project({"kernel": jnp.diag(jnp.array([3.0, 1.0]))}, epsilon, method="svd")

    assert float(project(1.0)["kernel"][0, 0]) == pytest.approx(2.0, abs=1e-6)
