"""A network of today: a small GPT trained with AdamW, with and without a band on all its matrices.

    svb run transformer --seeds 0 1 2
    svb run transformer/band-0.016 --seeds 0
    svb run transformer --scale smoke

Run time: about a quarter of a minute a run on a CPU core; smoke, seconds.

Three questions. Does a hard two-sided bound let the learning rate be higher? Does it replace LayerNorm? Is
the network less sensitive, that is: has the Jacobian of its logits a smaller norm? Every matrix is bounded,
attention's as well, each as the map of features to all heads together; the embeddings, which are looked up,
are not.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import svb_jax
from svb_jax.experiments import characters, plots
from svb_jax.experiments.experiment import Experiment, Metric
from svb_jax.experiments.gpt import GPT
from svb_jax.experiments.run_files import alone_in_its_folder, write_run
from svb_jax.experiments.scales import SCALES
from svb_jax.experiments.sensitivity import jacobian_norms
from svb_jax.training.memory import keep_freed_memory

Params = Any


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A whole training run of a GPT."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 32
    normalizes: bool = True
    """Whether there are LayerNorms."""
    batch_size: int = 16
    rounds: int = 15
    """How often the validation loss is measured: the epochs of the records."""
    steps_a_round: int = 20
    learning_rate: float = 0.004
    """The highest: reached after a tenth of the training, and followed by a cosine down to zero."""
    weight_decay: float = 0.01
    svb_epsilon: float | None = None
    """The band is [1 / (1 + epsilon), 1 + epsilon]; none if not given."""
    project_every: int = 10
    text_length: int | None = None
    validation_windows: int = 64
    seed: int = 0
    run_dir: Path = Path("runs/transformer")

    @property
    def steps(self) -> int:
        """How many steps the whole training has."""
        return self.rounds * self.steps_a_round


def make_model(config: GPTConfig, vocabulary: int) -> GPT:
    """Return the network."""
    return GPT(vocabulary, config.width, config.layers, config.heads, config.context, config.normalizes)


def make_optimizer(config: GPTConfig, learning_rate: ArrayLike) -> optax.GradientTransformation:
    """AdamW, whose result is bounded if the row says so.

    Args:
      config: The run.
      learning_rate: The highest, possibly traced: runs that differ in it share what is compiled.
    """
    steps = config.steps
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    adamw = optax.adamw(lambda count: learning_rate * shape(count), weight_decay=config.weight_decay)
    if config.svb_epsilon is None:
        return adamw
    return svb_jax.svb(
        adamw, config.svb_epsilon, every=config.project_every, dimension_numbers=svb_jax.attention
    )


@alone_in_its_folder
def train(config: GPTConfig) -> None:
    """Train, measure, and leave the files of a run in its folder."""
    keep_freed_memory()
    start = time.monotonic()
    text = characters.load(config.text_length)
    model = make_model(config, text.vocabulary)
    tokens = jnp.zeros((1, config.context), jnp.int32)
    params = model.init(jax.random.key(config.seed), tokens)["params"]
    spectrum = _named("initial", params)
    state = make_optimizer(config, config.learning_rate).init(params)
    advance, validate = _make_round(config, model, text), _make_validation(config, model, text)
    entries = []
    for number in range(config.rounds):
        params, state, loss = advance(params, state, config.learning_rate, config.seed, number)
        entries.append(_entry(config, number + 1, params, float(loss), float(validate(params))))
    result = {
        "validation_loss": entries[-1]["validation_loss"],
        **_jacobian(config, model, params, text),
        "sigma_min": entries[-1]["sigma_min"],
        "sigma_max": entries[-1]["sigma_max"],
        "seconds": time.monotonic() - start,
        "steps": config.steps,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "text_sha256": text.sha256,
    }
    write_run(config, entries, {**spectrum, **_named("final", params)}, result)


def _make_round(config: GPTConfig, model: GPT, text: characters.Characters) -> Any:
    """A compiled function that takes the steps up to the next validation."""
    train_text = jnp.asarray(text.train)

    def loss(params: Params, key: jax.Array) -> jax.Array:
        starts = jax.random.randint(key, (config.batch_size, 1), 0, len(train_text) - config.context)
        return _loss(model, params, train_text[starts + jnp.arange(config.context + 1)])

    @jax.jit
    def advance(
        params: Params, state: Any, learning_rate: ArrayLike, seed: ArrayLike, number: ArrayLike
    ) -> tuple[Params, Any, jax.Array]:
        tx = make_optimizer(config, learning_rate)

        def step(carry: tuple[Params, Any], key: jax.Array) -> tuple[tuple[Params, Any], jax.Array]:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, key)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        key = jax.random.fold_in(jax.random.key(seed), number + 1)
        keys = jax.random.split(key, config.steps_a_round)
        (params, state), losses = jax.lax.scan(step, (params, state), keys)
        return params, state, losses.mean()

    return advance


def _make_validation(config: GPTConfig, model: GPT, text: characters.Characters) -> Any:
    windows = jnp.asarray(_windows(config, text))
    return jax.jit(lambda params: _loss(model, params, windows))


def _windows(config: GPTConfig, text: characters.Characters) -> np.ndarray:
    """Pieces of the validation text at equal distances."""
    last = len(text.validation) - config.context - 1
    starts = np.linspace(0, last, config.validation_windows).astype(int)
    return text.validation[starts[:, None] + np.arange(config.context + 1)]


def _loss(model: GPT, params: Params, windows: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next character, in nats."""
    logits: Any = model.apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def _entry(config: GPTConfig, number: int, params: Params, loss: float, validation: float) -> dict[str, Any]:
    spectra = svb_jax.singular_values(params, dimension_numbers=svb_jax.attention).values()
    values = np.concatenate([spectrum.ravel() for spectrum in spectra])
    # JSON has no NaN, which a training that diverged is full of.
    numbers = {
        "train_loss": loss,
        "validation_loss": validation,
        "sigma_min": float(values.min()),
        "sigma_max": float(values.max()),
    }
    finite = {name: value if np.isfinite(value) else None for name, value in numbers.items()}
    return {"step": number * config.steps_a_round, "epoch": number, **finite}


def _jacobian(config: GPTConfig, model: GPT, params: Params, text: characters.Characters) -> dict[str, float]:
    """The norm of the Jacobian from embeddings to logits, at eight pieces of validation text."""
    variables = {"params": params}
    tokens = jnp.asarray(_windows(replace(config, validation_windows=8), text)[:, :-1])
    features: Any = model.apply(variables, tokens, method="embed")

    def logits(x: jax.Array) -> Any:
        return model.apply(variables, x[None], method="decode")

    norms = jacobian_norms(logits, features)
    return {"jacobian_norm": float(norms.mean()), "jacobian_norm_max": float(norms.max())}


def _named(moment: str, params: Params) -> dict[str, np.ndarray]:
    values = svb_jax.singular_values(params, dimension_numbers=svb_jax.attention)
    return {f"{moment}/{path}": array for path, array in values.items()}


def same(config: GPTConfig) -> GPTConfig:
    """The study is small as it is."""
    return config


def smoke(config: GPTConfig) -> GPTConfig:
    """A few steps of a narrow network."""
    return replace(config, width=16, layers=1, context=16, rounds=2, text_length=20_000, validation_windows=8)


RATES = (0.001, 0.004, 0.016, 0.064)
PLAIN = {f"{rate:g}": GPTConfig(learning_rate=rate) for rate in RATES}
NORM = {f"adamw-{name}": config for name, config in PLAIN.items()} | {
    f"band-{name}": replace(config, svb_epsilon=0.5) for name, config in PLAIN.items()
}
ROWS = NORM | {f"no-norm-{name}": replace(config, normalizes=False) for name, config in NORM.items()}

EXPERIMENT = Experiment(
    name="transformer",
    title="A small GPT on characters, AdamW with and without a band on all matrices",
    rows=ROWS,
    smoke_row="band-0.004",
    seeds=3,
    panels={
        "with LayerNorm": [row for row in ROWS if not row.startswith("no-norm")],
        "without normalisation": [row for row in ROWS if row.startswith("no-norm")],
    },
    figures=(plots.curves, plots.spectra, plots.sigma_range),
    metric=Metric(
        key="validation_loss",
        label="validation loss",
        unit=" nats",
        form=".3f",
        # Twice what guessing costs, all characters being equally likely.
        limit=2 * math.log(len(characters.NEWLINE_AND_PRINTABLE)),
        resolution=0.02,
    ),
    columns={
        "norm of the Jacobian": "jacobian_norm",
        "smallest σ": "sigma_min",
        "largest σ": "sigma_max",
    },
    scales={**dict.fromkeys(SCALES, same), "smoke": smoke},
    train=train,
    shows_times=False,
    notes=(
        "Rows are named by their highest learning rate; each is compared with AdamW at the same rate.",
        "The text is Python's own help topics, 465,000 characters, the last tenth for validation; a record "
        "has the SHA-256 of the text.",
        "The Jacobian is that of the logits of 32 characters with respect to their embeddings: its norm, by "
        "power iteration, averaged over eight pieces of validation text.",
    ),
)
