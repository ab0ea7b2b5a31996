"""What a training run is: one frozen record, written beside its results and checked on resume."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

MAY_DIFFER = {
    "run_dir",
    "data_dir",
    "workers",
    "engine",
    "devices",
    "checkpoint_every_epochs",
    "keep_checkpoints",
}
"""What a continued run may change: where and on what it runs, not what it computes."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run.

    The defaults are the paper's recipe for CIFAR-10; ``digits`` ships with the extra ``[train]``.

    Examples:
      >>> TrainConfig(batch_size=64, accumulate=3)
      Traceback (most recent call last):
      ValueError: TrainConfig needs a batch_size that accumulate divides, got 64 and 3.
    """

    model: str = "convnet_20"
    """The network: convnet_8, convnet_20, preact_resnet_68, wrn_28_10 or another of svb_jax.models.MODELS."""
    dataset: str = "digits"
    """digits, cifar10, cifar100, imagenet2012 or synthetic."""
    first: int | None = None
    """Train on the first so many images only."""
    image_size: int | None = None
    """Average the images down to this size (ImageNet: crop to this size)."""
    width: float = 1.0
    """Multiplies every channel count of the model: for scaled-down studies and tests."""
    depth: int | None = None
    """The model's X in 6X + 2 layers; the model's own if not given."""

    epochs: int = 160
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all devices and hosts."""
    accumulate: int = 1
    """Micro-batches a step is split into: the same step in less memory."""
    learning_rate: float = 0.5
    """The first learning rate."""
    final_learning_rate: float = 0.001
    """The last learning rate."""
    learning_rate_stages: int = 80
    """Log-spaced values from the first to the final rate, each held for an equal share of the run."""
    momentum: float = 0.9
    """SGD's momentum."""
    nesterov: bool = True
    """As in the authors' code; the paper only says momentum."""
    weight_decay: float = 1e-4
    """Coupled L2, on every parameter, as in the authors' code."""
    augment: bool = True
    """Pad 4, random crop, horizontal flip (random-resized crop and flip for ImageNet)."""

    svb_epsilon: float | None = None
    """SVB's band is [1 / (1 + epsilon), 1 + epsilon]; no SVB if not given."""
    bbn_epsilon: float | None = None
    """BBN's band around the mean; no BBN if not given."""
    bbn_kind: Literal["bbn", "relative"] = "bbn"
    """Around the mean of scale over deviation; or, relative, around the mean scale."""
    project_every_epochs: float = 1.0
    """Epochs between two projections; a fraction projects several times an epoch."""
    project_after_last_epoch: bool = False
    """The authors' code never projects after the last epoch."""
    method: Literal["auto", "svd", "gram", "polar"] = "auto"
    """How SVB computes the projection."""

    seed: int = 0
    """Decides initialisation, order and augmentation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The compute type; parameters and statistics stay float32."""
    engine: Literal["pmap", "shard_map"] = "pmap"
    """What runs the step on the devices."""
    devices: int | None = None
    """How many of this host's devices to use; all if not given."""
    workers: int = 2
    """Processes that read and augment ImageNet; the other data sets live in memory and need none."""

    run_dir: Path = field(default=Path("runs/train"))
    """Holds config.json, metrics.jsonl, result.json, spectrum.npz and checkpoints/."""
    data_dir: Path = field(default=Path("data"))
    """Holds the data sets that do not come with this package."""
    checkpoint_every_epochs: float = 1.0
    """Epochs between two checkpoints; a fraction saves several times an epoch."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep beside the best."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "learning_rate_stages", "keep_checkpoints"):
            _need(getattr(self, name) >= 1, f"{name} of at least 1", getattr(self, name))
        for name in (
            "learning_rate",
            "final_learning_rate",
            "project_every_epochs",
            "checkpoint_every_epochs",
        ):
            _need(0 < getattr(self, name) < float("inf"), f"a positive {name}", getattr(self, name))
        for name in ("svb_epsilon", "bbn_epsilon"):
            epsilon = getattr(self, name)
            _need(epsilon is None or 0 <= epsilon < float("inf"), f"{name} of at least 0", epsilon)
        _need(self.devices is None or self.devices >= 1, "devices of at least 1", self.devices)
        _need(self.seed >= 0, "a seed of at least 0", self.seed)
        if self.batch_size % self.accumulate:
            _need(False, "a batch_size that accumulate divides", f"{self.batch_size} and {self.accumulate}")


def to_json(config: TrainConfig) -> str:
    """Return the configuration as indented JSON.

    Examples:
      >>> from_json(to_json(TrainConfig(svb_epsilon=0.5))).svb_epsilon
      0.5
    """
    return json.dumps(asdict(config), indent=2, default=str) + "\n"


def from_json(text: str) -> TrainConfig:
    """Return the configuration that ``to_json`` wrote."""
    fields = json.loads(text)
    return TrainConfig(**{**fields, **{name: Path(fields[name]) for name in ("run_dir", "data_dir")}})


def differences(saved: TrainConfig, asked: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which a run differs from the one it would continue, with both values.

    Examples:
      >>> differences(TrainConfig(seed=1), TrainConfig(seed=2, engine="shard_map"))
      {'seed': (1, 2)}
    """
    saved_fields, asked_fields = asdict(saved), asdict(asked)
    return {
        name: (saved_fields[name], asked_fields[name])
        for name in saved_fields
        if name not in MAY_DIFFER and saved_fields[name] != asked_fields[name]
    }


def _need(holds: bool, need: str, got: object) -> None:
    if not holds:
        raise ValueError(f"TrainConfig needs {need}, got {got}.")
