"""Does SVB still help once the learning rate is down? ConvNet-20 on all of CIFAR-10, each method at its rate.

    svb run convergence --scale medium --seeds 0 1 2 3 4     # 6 minutes a run on a CPU core
    svb run convergence/sgd convergence/svb-0.05 --scale long    # half an hour a run
    svb run convergence --scale smoke

The paper trains everything at a first rate of 0.5. A baseline that suffers from that rate proves little: here
SGD has the rate that is best for itself (``rates``), and the paper's in a row of its own. The other rows ask
what the paper leaves open: the authors' second rule for BatchNorm, a projection every 10 steps instead of
once an epoch, and strictly orthogonal weights (ε = 0).
"""

from dataclasses import replace

from svb_jax.experiments.experiment import STANDARD_COLUMNS, Experiment
from svb_jax.experiments.plots import STANDARD_FIGURES
from svb_jax.training.config import TrainConfig

SGD_RATE = 0.05
SVB_RATE = 0.05

STEPS_PER_EPOCH = 391

LIMITS = (
    "The learning rate goes all the way down, but the 15 epochs of `medium`, at 16 x 16 pixels, are too few "
    "to fit the images: training error (of augmented images, averaged over the last epoch) and test error "
    "end close together, and over the last five epochs both still fall by 0.2 to 0.8 points an epoch. At the "
    "end of the 40 epochs of `long` it is 0.1 to 0.2 points."
)

# How far test and training errors are apart tells whether a network fits its images too well or not enough.
COLUMNS = {"train error": "train_error", **STANDARD_COLUMNS}

BASE = TrainConfig(model="convnet_20", dataset="cifar10")
SVB = replace(BASE, learning_rate=SVB_RATE, svb_epsilon=0.5)

ROWS = {
    "sgd": replace(BASE, learning_rate=SGD_RATE),
    "svb": SVB,
    "svb+bbn": replace(SVB, bbn_epsilon=1.0),
    "sgd-0.5": replace(BASE, learning_rate=0.5),
    "svb-0.05": replace(SVB, svb_epsilon=0.05),
    "svb+relative-bbn": replace(SVB, bbn_epsilon=1.0, bbn_kind="relative"),
    "svb-every-10": replace(SVB, project_every_epochs=10 / STEPS_PER_EPOCH),
    "svb-0": replace(SVB, svb_epsilon=0.0),
}

EXPERIMENT = Experiment(
    name="convergence",
    title="20-layer ConvNet on all of CIFAR-10, each method at its own learning rate",
    rows=ROWS,
    smoke_row="svb+bbn",
    seeds=5,
    reference="sgd",
    figures=STANDARD_FIGURES,
    columns=COLUMNS,
    shows_times=False,
    notes=(
        "All rows are compared with `sgd`.",
        LIMITS,
        f"First learning rates: {SGD_RATE:g} for `sgd`, {SVB_RATE:g} for all rows with SVB, the best "
        "on held-out training images (`rates`); the paper's 0.5 for `sgd-0.5`.",
        "`svb` has ε = 0.5 and projects once an epoch, `svb-every-10` every 10 steps. ε̃ is 1 where BatchNorm "
        "is bounded.",
    ),
)
