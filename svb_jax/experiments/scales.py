"""Five sizes of every experiment, from ``full``, as the paper ran it, down to ``smoke``, seconds on a CPU.

``medium`` is what one CPU core can train: all 50,000 images, averaged down to 16 × 16, for 15 epochs in which
the learning rate goes all the way from its first value to its last.

- 16 × 16, because 32 × 32 takes four times as long: four seeds instead of one.
- 15 epochs, because a table of three rows and five seeds must fit into a few hours of a core. They end the
  schedule, not the learning: with ConvNet-20 the training error still falls by 0.05 to 0.8 points an epoch
  over the last five, and the test error is within a point of it. More epochs and more pixels, of which the
  paper has 160 and four times as many, would lower both: errors are to be compared with each other only.
- Projections come once an epoch, the paper's rule, so 14 in all, the last epoch being left alone.

``long`` is ``medium`` with 40 epochs, for what remains when training has had its time: by then the training
error falls by 0.1 to 0.2 points an epoch.

A pilot on one core of an AMD EPYC (Zen 5) took 24 s for an epoch of ConvNet-20, and 27 s of the 20-layer
ResNet.

A scale is a pure function from a row's configuration to a smaller one. It never touches what the row is
about: the bands of SVB and BBN, the learning rates, the momentum, the weight decay.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from svb_jax.training.config import TrainConfig

Scale = Callable[[TrainConfig], TrainConfig]

# Depth is the X of 6X + 2 layers; the plain ConvNets are narrow enough to keep theirs.
SMALL_NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "preact_resnet_68": {"depth": 3},
    "wrn_28_10_authors": {"depth": 1, "width": 0.2},
    "wrn_28_16_authors": {"depth": 1, "width": 0.2},
    "inception_resnet_cifar": {"depth": 1, "width": 0.125},
    "inception_resnet_imagenet": {"model": "inception_resnet_cifar", "depth": 1, "width": 0.125},
}
MEDIUM_EPOCHS = 15
LONG_EPOCHS = 40
SMALL_DATA = {"imagenet2012": "cifar10"}

# Both Wide ResNets come out as the same network, and so do both plain ones: compiled once for all tables.
SMOKE_WIDTHS: Mapping[str, float] = {
    "wrn_28_10_authors": 0.05,
    "wrn_28_16_authors": 0.03125,
    "inception_resnet_cifar": 0.005,
}


def full(config: TrainConfig) -> TrainConfig:
    """As the paper and the authors' code have it; an accelerator's work."""
    return config


def medium(config: TrainConfig) -> TrainConfig:
    """All CIFAR images at half the size, for 15 epochs: 6 minutes a run on a CPU core."""
    return replace(
        config,
        **SMALL_NETWORKS.get(config.model, {}),
        dataset=SMALL_DATA.get(config.dataset, config.dataset),
        image_size=16,
        epochs=MEDIUM_EPOCHS,
    )


def long(config: TrainConfig) -> TrainConfig:
    """As ``medium``, for 40 epochs: half an hour a run on a CPU core."""
    return replace(medium(config), epochs=LONG_EPOCHS)


def small(config: TrainConfig) -> TrainConfig:
    """Real CIFAR images, fewer and at half the size, for 10 epochs: minutes a run on a CPU core.

    The learning rate falls once an epoch instead of once in two, so that it still takes its whole way
    from the first rate to the last.
    """
    return replace(
        config,
        **SMALL_NETWORKS.get(config.model, {}),
        dataset=SMALL_DATA.get(config.dataset, config.dataset),
        first=6_400,
        image_size=16,
        epochs=10,
        learning_rate_stages=10,
    )


def smoke(config: TrainConfig) -> TrainConfig:
    """The embedded digits and a narrow, shallow network for two epochs: seconds, to see that it all works."""
    config = small(config)
    return replace(
        config,
        dataset="digits",
        first=256,
        image_size=8,
        width=SMOKE_WIDTHS.get(config.model, 0.25),
        depth=1,
        batch_size=64,
        epochs=2,
        learning_rate_stages=2,
        devices=1,
    )


SCALES: Mapping[str, Scale] = {
    "full": full,
    "long": long,
    "medium": medium,
    "small": small,
    "smoke": smoke,
}
