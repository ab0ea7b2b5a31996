"""A training step with and without SVB and BBN, beside spectral normalisation and PyTorch.

python -m benchmarks step --torch-python PATH    # an hour on two cores
python -m benchmarks step --models convnet_20 --batch 32 --rounds 5
python -m benchmarks step --models preact_resnet_20 --image-size 16 --rows sgd torch_sgd --compile-rounds 0
python -m benchmarks step --models convnet_38 --rows --no-convolutions    # only what it takes to compile
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measurement import Row, measure, say
from benchmarks.options import Options, choose
from benchmarks.processes import Pool
from benchmarks.tables import section
from svb_jax import models

# Rows of one framework share a process: differences of a percent are smaller than those between processes.
JAX = "jax"
TORCH = "torch"

STEPS = {
    "sgd": Row("SGD", "benchmarks.jax_steps:train", {"optimizer": "sgd"}, group=JAX),
    "off": Row("SVB+BBN, other steps", "benchmarks.jax_steps:train", {"optimizer": "svb+bbn"}, group=JAX),
    "projecting": Row(
        "SVB+BBN, projecting step",
        "benchmarks.jax_steps:train",
        {"optimizer": "svb+bbn", "projects": True},
        group=JAX,
    ),
    "spectral_norm": Row(
        "Flax SpectralNorm", "benchmarks.jax_steps:train", {"optimizer": "spectral_norm"}, group=JAX
    ),
    "forward": Row("of SGD: forward", "benchmarks.jax_steps:forward", group=JAX),
    "gradients": Row("of SGD: forward and backward", "benchmarks.jax_steps:gradients", group=JAX),
    "torch_sgd": Row("PyTorch SGD", "benchmarks.torch_steps:train", group=TORCH),
    "torch_projecting": Row(
        "PyTorch SGD, SVD per layer", "benchmarks.torch_steps:train", {"projects": True}, group=TORCH
    ),
    "torch_forward": Row("of PyTorch's: forward", "benchmarks.torch_steps:forward", group=TORCH),
    "torch_gradients": Row(
        "of PyTorch's: forward and backward", "benchmarks.torch_steps:gradients", group=TORCH
    ),
}
# The same three without the network: what they differ in is far less than the noise of a whole step.
UPDATES = {
    name: replace(STEPS[name], factory="benchmarks.jax_steps:update", group="updates")
    for name in ("sgd", "off", "projecting")
}
COMPILING = {
    name: Row(label, "benchmarks.jax_steps:compile_train", {"optimizer": optimizer})
    for name, label, optimizer in (
        ("sgd", "SGD", "sgd"),
        ("svb+bbn", "SVB+BBN in the chain", "svb+bbn"),
        ("after", "SVB+BBN after the optimizer's step", "svb+bbn after it"),
        ("svd", "SVB+BBN in the chain, by the route svd alone", "svb+bbn by svd"),
        ("by_hand", "SVB and BBN by hand, an SVD per layer", "by hand"),
        ("scaling", "weights halved at the same steps: no bound at all", "scaling"),
    )
}
CHANNELS = (16, 32, 64)
"""Those of the three stages of these networks, each of half the height of the one before."""
PARTS = {"forward": "forward", "input": "gradient of the input", "kernel": "gradient of the kernel"}


@dataclass(frozen=True, kw_only=True)
class Step(Options):
    """Take training steps with plain SGD, with SVB and BBN, and as PyTorch takes them."""

    rounds: int = 20
    """How often all rows are called in turn."""
    seconds: float = 0.001
    """How long a row is called in each round; at least once in any case."""
    limit: float = 120.0
    """Seconds after which a call is stopped and its row given up."""
    models: tuple[str, ...] = ("convnet_20", "convnet_38", "preact_resnet_68")
    """Networks of svb_jax.models, by name: plain ConvNets and pre-activation ResNets."""
    rows: tuple[str, ...] = tuple(STEPS)
    """Which rows to measure; none to see only how long it takes to compile."""
    width: float = 1.0
    """Multiplies every channel count of the networks."""
    batch: int = 128
    """Images in a batch."""
    image_size: int = 32
    """Height and width of the images."""
    compile_rounds: int = 3
    """How often each step is compiled anew; 0 for never."""
    convolutions: bool = True
    """Whether to time single convolutions and their gradients, to see where a step's time goes."""
    condition: float = 3.4
    """Largest singular value over the smallest, in the weights."""

    def measure(self, pool: Pool) -> Iterator[dict[str, Any]]:
        """Yield the sections of each network, then the one of single convolutions."""
        rows = choose("step", self.rows, STEPS)
        for model in self.models:
            yield from self._measure_network(pool, model, rows)
        if self.convolutions:
            yield section("Single convolutions", self._measure_convolutions(pool))

    def _measure_network(self, pool: Pool, model: str, chosen: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
        say(model)
        network = models.make(model)
        fields = ("width", "batch", "image_size", "condition")
        task = {name: getattr(self, name) for name in fields}
        task |= {"model": model, "family": type(network).__name__, "depth": network.depth}
        if chosen:
            rows = {name: row.given(**task).run_by(self.torch) for name, row in chosen.items()}
            steps = measure(pool, rows, self.plan)
            _check_equal(model, steps)
            yield section(f"{model}: a step", steps, median="sgd")
            updates = {name: row.given(**task) for name, row in UPDATES.items()}
            alone = measure(pool, updates, replace(self.plan, seconds=0.2))
            overheads = with_overheads(alone, steps.get("sgd", {}))
            yield section(f"{model}: the optimizer's update alone", overheads)
        if self.compile_rounds:
            compiling = {name: row.given(**task) for name, row in COMPILING.items()}
            compiled = measure(pool, compiling, replace(self.plan, rounds=self.compile_rounds))
            yield section(f"{model}: trace and compile, CPU time", compiled, median="sgd")

    def _measure_convolutions(self, pool: Pool) -> dict[str, Any]:
        rows = {}
        for stage, channels in enumerate(CHANNELS):
            size = self.image_size // 2**stage
            for part, label in PARTS.items():
                for framework in (JAX, TORCH):
                    task = {"size": size, "channels": channels, "part": part, "batch": self.batch}
                    factory = f"benchmarks.{framework}_steps:convolution"
                    row = Row(f"{framework} {size}x{size}x{channels} {label}", factory, task, group=framework)
                    rows[f"{framework}/{size}/{part}"] = row.run_by(self.torch)
        return measure(pool, rows, replace(self.plan, rounds=min(self.rounds, 5), seconds=0.1))


def with_overheads(updates: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Add what each update takes more than SGD's, as a part of SGD's whole step."""
    plain, whole = updates["sgd"].get("median"), step.get("median")
    return {
        name: row | {"more_than_sgd_share": (row["median"] - plain) / whole}
        if plain and whole and "median" in row
        else row
        for name, row in updates.items()
    }


def _check_equal(model: str, rows: dict[str, Any]) -> None:
    """Raise unless both frameworks trained a network of the same size."""
    counts = {rows[name].get("facts", {}).get("parameters") for name in ("sgd", "torch_sgd") if name in rows}
    if len(counts - {None}) > 1:
        raise RuntimeError(f"{model} has other parameters in PyTorch: {counts}.")
