"""The three main rows of ``convergence`` for the 20-layer pre-activation ResNet, on all of CIFAR-10.

    svb run convergence_resnet --scale medium --seeds 0 1 2 3 4     # 7 minutes a run on a CPU core
    svb run convergence_resnet --scale smoke

The learning rates are those that ``rates`` found for the ConvNet: it was not swept again for this network.
"""

from dataclasses import replace

from svb_jax.experiments.convergence import COLUMNS, LIMITS, ROWS, SGD_RATE, SVB_RATE
from svb_jax.experiments.experiment import Experiment
from svb_jax.experiments.plots import STANDARD_FIGURES

EXPERIMENT = Experiment(
    name="convergence_resnet",
    title="20-layer pre-activation ResNet on all of CIFAR-10",
    rows={row: replace(ROWS[row], model="preact_resnet_20") for row in ("sgd", "svb", "svb+bbn")},
    smoke_row="svb+bbn",
    seeds=5,
    reference="sgd",
    figures=STANDARD_FIGURES,
    columns=COLUMNS,
    shows_times=False,
    notes=(
        "All rows are compared with `sgd`.",
        LIMITS,
        f"First learning rates: {SGD_RATE:g} for `sgd` and {SVB_RATE:g} for the others, as chosen for the "
        "20-layer ConvNet on held-out training images (`rates`).",
        "ε is 0.5 and ε̃ is 1; projections come once an epoch.",
    ),
)
