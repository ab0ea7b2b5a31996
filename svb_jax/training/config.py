"""What a training run is: one frozen record, written beside its results and checked on resume."""

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

MAY_DIFFER = {
    "run_dir",
    "data_dir",
    "workers",
    "engine",
    "fsdp",
    "devices",
    "checkpoint_every_epochs",
    "keep_checkpoints",
}
"""What a continued run may change: where and on what it runs, not what it computes."""


_COUNTS = (
    "epochs",
    "batch_size",
    "accumulate",
    "learning_rate_stages",
    "keep_checkpoints",
    "devices",
    "first",
    "image_size",
    "depth",
)
_POSITIVE = (
    "learning_rate",
    "final_learning_rate",
    "project_every_epochs",
    "checkpoint_every_epochs",
    "width",
)


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
    """Train on only this many images, the first ones."""
    holdout: int | None = None
    """Hold out this many training images, the last ones, and test on them instead: for choosing settings."""
    image_size: int | None = None
    """Average the images down to this size (ImageNet: crop to this size)."""
    width: float = 1.0
    """Multiplies every channel count of the model: for scaled-down studies and tests."""
    depth: int | None = None
    """The model's X in 6X + 2 layers; the model's own if not given."""

    epochs: int = 160
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step, over all devices and hosts."""
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
    evaluate: Literal["after", "before"] = "after"
    """Whether an epoch's errors are measured after its projection, or before, as the authors' code does."""
    method: Literal["auto", "svd", "gram", "products"] = "auto"
    """How SVB computes the projection."""

    seed: int = 0
    """Decides initialisation, order and augmentation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The compute type; parameters and statistics stay float32."""
    engine: Literal["pmap", "shard_map", "jit"] = "pmap"
    """What runs the step on the devices."""
    fsdp: bool = False
    """Whether parameters and optimizer state are sharded over the devices; needs the engine ``jit``."""
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
        for name in _COUNTS:
            count = getattr(self, name)
            _need(count is None or count >= 1, f"{name} of at least 1", count)
        for name in _POSITIVE:
            _need(0 < getattr(self, name) < float("inf"), f"a positive {name}", getattr(self, name))
        for name in ("svb_epsilon", "bbn_epsilon", "weight_decay"):
            value = getattr(self, name)
            _need(value is None or 0 <= value < float("inf"), f"{name} of at least 0", value)
        _need(0 <= self.momentum < 1, "a momentum of at least 0 and below 1", self.momentum)
        _need(self.workers >= 0, "workers of at least 0", self.workers)
        # The step takes it as 32 bits.
        _need(0 <= self.seed < 2**32, "a seed of at least 0 and below 2**32", self.seed)
        # So are Path(""), "x/.." and links to it.
        is_here = os.path.realpath(self.run_dir) == os.path.realpath(Path())
        _need(not is_here, "a run_dir of its own", f"{str(self.run_dir)!r}, the current folder")
        _need(_is_text(self.run_dir), "a run_dir in UTF-8, for Orbax", repr(str(self.run_dir)))
        for name in ("run_dir", "data_dir"):
            path = getattr(self, name)
            _need(not _is_address(path), f"{name} in a file system (mount the bucket)", repr(str(path)))
        if self.evaluate == "before" and self.project_every_epochs % 1:
            _need(False, "whole project_every_epochs to evaluate before", self.project_every_epochs)
        _need(self.engine == "jit" or not self.fsdp, 'the engine "jit" for fsdp', repr(self.engine))
        if self.batch_size % self.accumulate:
            _need(False, "a batch_size that accumulate divides", f"{self.batch_size} and {self.accumulate}")


def to_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as JSON has it: paths are strings.

    Examples:
      >>> to_fields(TrainConfig(svb_epsilon=0.5))["svb_epsilon"]
      0.5
    """
    return json.loads(json.dumps(asdict(config), default=str))


def differences(
    saved: Mapping[str, Any], asked: Mapping[str, Any], may_differ: Collection[str] = MAY_DIFFER
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two runs differ, with both values.

    Args:
      saved: The fields of one, from ``to_fields``.
      asked: Those of the other.
      may_differ: The fields that need not agree.

    Returns:
      From the name of a field to the first one's value and the second one's.

    Examples:
      >>> differences(to_fields(TrainConfig(seed=1)), to_fields(TrainConfig(seed=2, engine="shard_map")))
      {'seed': (1, 2)}
    """
    # A field that did not exist when a run was saved had its default in effect.
    defaults = to_fields(TrainConfig())
    saved, asked = defaults | dict(saved), defaults | dict(asked)
    return {
        name: (saved.get(name), asked.get(name))
        for name in saved | asked
        if name not in may_differ and saved.get(name) != asked.get(name)
    }


def describe(different: Mapping[str, tuple[Any, Any]]) -> str:
    """Return differences in words.

    Examples:
      >>> describe({"seed": (1, 2), "svb_epsilon": (0.5, None)})
      'seed=1, not 2, svb_epsilon=0.5, not None'
    """
    return ", ".join(f"{name}={one!r}, not {other!r}" for name, (one, other) in different.items())


def _is_text(path: Path) -> bool:
    """Return whether a path can be written as UTF-8: Python keeps other bytes as halves of a pair."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_address(path: Path | str) -> bool:
    """Return whether a path was meant as gs://bucket/run, of which Path makes a local folder called gs:."""
    return re.match(r"[a-z][a-z0-9+.-]+:(/|$)", Path(path).as_posix()) is not None


def _need(holds: bool, need: str, got: object) -> None:
    if not holds:
        raise ValueError(f"TrainConfig needs {need}, got {got}.")
