"""What a training run is: one frozen record, written beside its results and checked on resume."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run.

    The defaults are the paper's recipe for CIFAR-10; ``digits`` ships with the extra ``[train]``.
    """

    model: str = "convnet_20"
    """A name from ``svb_jax.models.MODELS``."""
    dataset: str = "digits"
    """``digits``, ``cifar10``, ``cifar100``, ``imagenet2012`` or ``synthetic``."""
    first: int | None = None
    """Train on the first so many images only."""
    image_size: int | None = None
    """Average the images down to this size."""
    width: float = 1.0
    """Multiplies every channel count of the model: for scaled-down studies and tests."""
    depth: int | None = None
    """The model's X in 6X + 2 layers; the model's own if not given."""

    epochs: int = 160
    batch_size: int = 128
    """Images a step, over all devices and hosts."""
    accumulate: int = 1
    """Micro-batches a step is split into: the same step in less memory."""
    learning_rate: float = 0.5
    final_learning_rate: float = 0.001
    learning_rate_stages: int = 80
    """Log-spaced values from the first to the final rate, each held for an equal number of epochs."""
    momentum: float = 0.9
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
    project_every_epochs: float = 1.0
    """Epochs between two projections; a fraction projects several times an epoch."""
    project_after_last_epoch: bool = False
    """The authors' code never projects after the last epoch."""
    method: Literal["auto", "svd", "gram", "polar"] = "auto"

    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The compute type; parameters and statistics stay float32."""
    engine: Literal["pmap", "shard_map"] = "pmap"
    devices: int | None = None
    """How many of this host's devices to use; all if not given."""

    run_dir: Path = field(default=Path("runs/train"))
    """Holds config.json, metrics.jsonl, result.json, spectrum.npz and checkpoints/."""
    data_dir: Path = field(default=Path("data"))
    checkpoint_every_epochs: float = 1.0
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep beside the best."""
