"""Figure 1: what training does to the singular values of a 38-layer ConvNet, CIFAR-10.

    svb run figure1                  # as the paper: two runs on one accelerator
    svb run figure1 --scale small
    svb run figure1 --scale smoke

Run time: full, 2 runs of 62,560 steps, 4 PFLOP each (7 minutes of an accelerator that sustains 10 TFLOP/s;
not timed here); small, minutes a run on a CPU core; smoke, seconds.

Result to expect: both start with all singular values at one. SGD ends with values spread from near zero to
several times one; SVB stays within its band; the error with SVB is lower. ``report --paper-colours`` draws
SGD red and SVB blue, as the paper does.
"""

from dataclasses import replace

from svb_jax.experiments.experiment import Experiment, Printed
from svb_jax.experiments.plots import curves, sigma_range, spectra
from svb_jax.training.config import TrainConfig

BASE = TrainConfig(model="convnet_38", dataset="cifar10")

ROWS = {
    "sgd": BASE,
    "svb": replace(BASE, svb_epsilon=0.5),
}

PAPER = {
    "sgd": Printed(error=12.08),
    "svb": Printed(error=9.90, of="best of five ε"),
}

EXPERIMENT = Experiment(
    name="figure1",
    title="Singular values of a 38-layer ConvNet after training, CIFAR-10",
    rows=ROWS,
    paper=PAPER,
    smoke_row="svb",
    # This figure alone draws SGD red and SVB blue.
    paper_colours={"sgd": "red", "svb": "blue"},
    figures=(spectra, curves, sigma_range),
    notes=(
        "The paper does not print this figure's ε; 0.5 is what it uses in every table.",
        "The errors are those of section V-A, which trains the same network.",
        "Lower, middle and higher layers are the first, second and last third of the layers.",
        "At `small`, training has hardly begun. `convergence`, at `long`, has these histograms of a 20-layer "
        "ConvNet after 40 epochs, three seeds.",
    ),
)
