"""Section IV: which directions a deep linear network learns, with and without SVB.

    svb run deep_linear --seeds 0 1 2 3 4
    svb run deep_linear --scale smoke

Run time: about 10 seconds a run on two CPU cores; smoke, a second or two.

A network of 20 linear layers learns, from noisy samples of whitened inputs, a correlation whose 16 directions
have strengths from 2 to 1/2. The learning rate starts as high as the network bears and falls 500-fold, as in
the paper's recipe.

Result to expect: SGD learns the strong directions and loses weak ones for good: some layer has shrunk them to
nearly nothing, and neither signal nor error gets through. With SVB at ε of 0.05 or 0.2 all 16 are learned,
from orthogonal and from Gaussian weights; at 0.5, too wide for this depth, some are lost.
"""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import svb_jax
from svb_jax.experiments import direction_plots, directions
from svb_jax.experiments.directions import Directions
from svb_jax.experiments.experiment import Experiment, Metric
from svb_jax.experiments.run_files import alone_in_its_folder, write_run
from svb_jax.experiments.scales import SCALES

Params = Any
"""From a layer's name to its ``kernel``."""
LEARNED_WITHIN = 0.1


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A whole study of one deep linear network."""

    num_directions: int = 16
    hidden: int = 24
    """Wider than the directions: square orthogonal layers could never change their product's orientation."""
    layers: int = 20
    strongest: float = 2.0
    weakest: float = 0.5
    init: Literal["orthogonal", "gaussian"] = "orthogonal"
    """Gaussian weights keep a signal's mean square, but not that of every direction."""
    noise: float = 0.5
    """The standard deviation of the noise in each output."""
    batch_size: int = 32
    steps: int = 3000
    learning_rate: float = 0.01
    final_learning_rate: float = 2e-5
    momentum: float = 0.9
    svb_epsilon: float | None = None
    project_every: int = 50
    seed: int = 0
    run_dir: Path = Path("runs/deep_linear")


def make_directions(config: LinearConfig) -> Directions:
    """Draw the directions of the data, with strengths evenly spaced in their logarithm."""
    keys = jax.random.split(jax.random.key(config.seed))
    shape = (config.num_directions, config.num_directions)
    inputs, outputs = (np.asarray(jax.nn.initializers.orthogonal()(key, shape)) for key in keys)
    return Directions(inputs, outputs, np.geomspace(config.strongest, config.weakest, config.num_directions))


def make_params(config: LinearConfig) -> Params:
    """Draw the initial layers."""
    draw = {
        "orthogonal": jax.nn.initializers.orthogonal(),
        "gaussian": jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    }[config.init]
    widths = [config.num_directions, *[config.hidden] * (config.layers - 1), config.num_directions]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 1), config.layers)
    return {
        f"layer{number:02d}": {"kernel": draw(key, (widths[number], widths[number + 1]))}
        for number, key in enumerate(keys)
    }


def make_optimizer(config: LinearConfig) -> optax.GradientTransformation:
    """SGD with momentum down an exponential schedule, bounded if the row says so."""
    decay = config.final_learning_rate / config.learning_rate
    schedule = optax.exponential_decay(config.learning_rate, config.steps, decay)
    sgd = optax.sgd(schedule, momentum=config.momentum)
    if config.svb_epsilon is None:
        return sgd
    return svb_jax.svb(sgd, config.svb_epsilon, every=config.project_every)


def predict(params: Params, inputs: jax.Array) -> jax.Array:
    """Pass row vectors through all layers."""
    for name in sorted(params):
        inputs = inputs @ params[name]["kernel"]
    return inputs


@alone_in_its_folder
def train(config: LinearConfig) -> None:
    """Train, measure, and leave the files of a run in its folder."""
    start = time.monotonic()
    target, params = make_directions(config), make_params(config)
    spectrum = {f"initial/{path}": values for path, values in svb_jax.singular_values(params).items()}
    tx = make_optimizer(config)
    advance = _make_round(config, target, tx)
    state, entries = tx.init(params), []
    for number in range(config.steps // config.project_every):
        params, state = advance(params, state, number)
        entries.append(_entry(config, params, target, number + 1))
    spectrum |= {f"final/{path}": values for path, values in svb_jax.singular_values(params).items()}
    result = {**_measure(params, target), "seconds": time.monotonic() - start, "steps": config.steps}
    write_run(config, entries, spectrum, {**result, "parameters": _count(params)})


def _make_round(config: LinearConfig, target: Directions, tx: optax.GradientTransformation) -> Any:
    """A compiled function that takes the steps up to the next projection, which is the last of them."""
    correlation = jnp.asarray(target.inputs * target.sigma @ target.outputs.T, jnp.float32)

    def loss(params: Params, key: jax.Array) -> jax.Array:
        shape = (config.batch_size, config.num_directions)
        inputs, noise = (jax.random.normal(part, shape) for part in jax.random.split(key))
        errors = inputs @ correlation + config.noise * noise - predict(params, inputs)
        return 0.5 * jnp.mean(jnp.sum(errors**2, axis=1))

    def step(carry: tuple[Params, Any], key: jax.Array) -> tuple[tuple[Params, Any], None]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, key), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def advance(params: Params, state: Any, number: int) -> tuple[Params, Any]:
        key = jax.random.fold_in(jax.random.key(config.seed), number + 2)
        return jax.lax.scan(step, (params, state), jax.random.split(key, config.project_every))[0]

    return advance


def _kernels(params: Params) -> list[np.ndarray]:
    return [np.asarray(params[name]["kernel"], np.float64) for name in sorted(params)]


def _entry(config: LinearConfig, params: Params, target: Directions, number: int) -> dict[str, float]:
    spectra = [np.linalg.svd(kernel, compute_uv=False) for kernel in _kernels(params)]
    return {
        "step": number * config.project_every,
        "epoch": number,
        "energy": float(directions.energies(_kernels(params), target).sum()),
        "sigma_min": float(min(values.min() for values in spectra)),
        "sigma_max": float(max(values.max() for values in spectra)),
    }


def _measure(params: Params, target: Directions) -> dict[str, Any]:
    """Everything that section IV speaks of, at the end of training."""
    kernels = _kernels(params)
    strength, gain = directions.strengths(kernels, target), directions.gains(kernels, target)
    blends = [directions.mixing(lower, upper) for lower, upper in pairwise(kernels)]
    errors = directions.error_components(kernels, target)
    return {
        "energy": float(directions.energies(kernels, target).sum()),
        "directions_learned": int((np.abs(strength - target.sigma) < LEARNED_WITHIN * target.sigma).sum()),
        # The paper's necessary condition for the least energy in a very deep network.
        "directions_straddling_one": int(((gain.max(axis=1) > 1) & (gain.min(axis=1) < 1)).sum()),
        "weakest_error_at_input": float(errors[0].min()),
        "strongest_mixing": float(max(blend.max() for blend in blends)),
        "sigma": target.sigma.round(5).tolist(),
        "strengths": strength.round(5).tolist(),
        "gains": gain.round(4).tolist(),
        "error_components": [[float(f"{value:.4g}") for value in line] for line in errors],
        "mixing": blends[len(blends) // 2].round(4).tolist(),
    }


def _count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def smoke(config: LinearConfig) -> LinearConfig:
    """Fewer steps of a shallower network."""
    return replace(config, layers=6, hidden=8, num_directions=4, steps=200)


def same(config: LinearConfig) -> LinearConfig:
    """The study is small as it is."""
    return config


BASE = LinearConfig()
# Gaussian weights bear no more than half the rate.
GAUSSIAN = LinearConfig(init="gaussian", learning_rate=0.005, final_learning_rate=1e-5)

ROWS = {
    "sgd": BASE,
    "svb-0.05": replace(BASE, svb_epsilon=0.05),
    "svb-0.2": replace(BASE, svb_epsilon=0.2),
    "svb-0.5": replace(BASE, svb_epsilon=0.5),
    "gaussian-sgd": GAUSSIAN,
    "gaussian-svb-0.2": replace(GAUSSIAN, svb_epsilon=0.2),
}

EXPERIMENT = Experiment(
    name="deep_linear",
    title="Directions that a 20-layer linear network learns",
    rows=ROWS,
    smoke_row="svb-0.2",
    panels={
        "orthogonal initial weights": [row for row in ROWS if not row.startswith("gaussian")],
        "Gaussian initial weights": [row for row in ROWS if row.startswith("gaussian")],
    },
    figures=direction_plots.FIGURES,
    metric=Metric(key="energy", label="energy", unit="", form=".3g"),
    columns={
        "directions learned": "directions_learned",
        "s_max > 1 > s_min": "directions_straddling_one",
        "weakest error at the input": "weakest_error_at_input",
        "strongest mixing": "strongest_mixing",
    },
    scales={**dict.fromkeys(SCALES, same), "smoke": smoke},
    train=train,
    notes=(
        "The paper has no experiment in this section: this one measures what it argues. Energy is the sum "
        "over directions of half the squared gap between σ and the network's strength.",
        "A direction counts as learned within a tenth of its σ; s is a layer's gain along the direction.",
        "One epoch is the 50 steps between two projections.",
    ),
)
