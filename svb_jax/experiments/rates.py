"""Which learning rates suit SGD and SVB, and which band, judged on images held out of the training set.

    svb run rates --scale medium      # eleven runs of 2 to 4 minutes on a CPU core
    svb run rates --scale smoke

The last 5,000 training images are kept out of training and take the place of the test set, which is not
looked at. The same four rates, √10 apart, for both methods. At ``medium``, runs have 5 epochs where
``convergence`` has 15: enough that every rate goes all the way down and most of the error's way is gone, and
what so many more runs can cost. A rate that only pays in a longer training can be missed by it.
``convergence`` uses the best of each. At SVB's best rate the ``band`` rows try other ε than the paper's 0.5.
"""

from dataclasses import replace

from svb_jax.experiments import scales
from svb_jax.experiments.experiment import Experiment, Metric
from svb_jax.experiments.plots import curves
from svb_jax.training.config import TrainConfig

HOLDOUT = 5_000
RATES = (0.016, 0.05, 0.16, 0.5)
BANDS = (0.0, 0.05, 0.2)
BAND_RATE = 0.05
MEDIUM_EPOCHS = 5

BASE = TrainConfig(model="convnet_20", dataset="cifar10", holdout=HOLDOUT)
BOUNDED = replace(BASE, svb_epsilon=0.5)

ROWS = {f"sgd-{rate:g}": replace(BASE, learning_rate=rate) for rate in RATES} | {
    f"svb-{rate:g}": replace(BOUNDED, learning_rate=rate) for rate in RATES
}
ROWS |= {f"band-{e:g}": replace(BASE, learning_rate=BAND_RATE, svb_epsilon=e) for e in BANDS}


def medium(config: TrainConfig) -> TrainConfig:
    """A third of the epochs, of all but the held-out images."""
    return replace(scales.medium(config), epochs=MEDIUM_EPOCHS)


def smoke(config: TrainConfig) -> TrainConfig:
    """As everywhere, with fewer images held out than there are digits."""
    return replace(scales.smoke(config), holdout=256)


EXPERIMENT = Experiment(
    name="rates",
    title="Learning rates and bands on held-out training images, 20-layer ConvNet, CIFAR-10",
    rows=ROWS,
    smoke_row="svb-0.5",
    metric=Metric(label="held-out error"),
    figures=(curves,),
    scales={**scales.SCALES, "medium": medium, "smoke": smoke},
    shows_times=False,
    notes=(
        "Errors are on the last 5,000 training images, which are not trained on; the test set is not used.",
        "Only the best rate of each method matters here, 0.05 for both. It rests on one seed: whether "
        "its neighbours are as good is not decided, and differences at equal rates mean little.",
        "All rates fall to 0.001.",
        f"`band` rows are named by their ε and train at {BAND_RATE:g}, as `svb-0.05` does with ε = 0.5.",
    ),
)
