"""``svb demo``: SGD, SVB and SVB with BBN on handwritten digits, in a minute or two.

Trains a plain ConvNet of 14 layers three times on the digits that come with scikit-learn: nothing to
download, no accelerator needed. Prints a comparison and writes one HTML page.

Run time: one to two minutes on two CPU cores, a good part of which is compilation.

Result to expect: SGD 14 to 15 % error, SVB and SVB with BBN 7 to 10 %, since the number of cores changes the
rounding; SGD's singular values drift away from one, those of the others stay in the band.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from svb_jax.experiments import record, report
from svb_jax.experiments.console import PlainConsole
from svb_jax.experiments.experiment import RUNS, Experiment
from svb_jax.experiments.plots import STANDARD_FIGURES
from svb_jax.experiments.runner import ensure_run
from svb_jax.experiments.tables import results_table
from svb_jax.training.config import TrainConfig

BASE = TrainConfig(
    model="convnet_20",
    dataset="digits",
    image_size=8,
    # Eight epochs are too few to learn shifted digits as well.
    augment=False,
    depth=2,
    width=0.5,
    epochs=8,
    learning_rate_stages=8,
    checkpoint_every_epochs=4,
)

ROWS = {
    "sgd": BASE,
    "svb": replace(BASE, svb_epsilon=0.5),
    "svb+bbn": replace(BASE, svb_epsilon=0.5, bbn_epsilon=1.0),
}

EXPERIMENT = Experiment(
    name="demo",
    title="SVB and BBN on handwritten digits",
    rows=ROWS,
    smoke_row="svb+bbn",
    figures=STANDARD_FIGURES,
    scales={"full": lambda config: config},
    # Most of such a short run is compilation.
    shows_times=False,
    notes=(
        "1,437 images of 8 x 8 pixels to train on, 360 to test: half a point of error is two images.",
        "Singular values start at one. SVB puts them back into [1/1.5, 1.5] after every epoch but the last.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train SGD, SVB and SVB with BBN on handwritten digits: nothing to download, a minute or two.

    Prints a comparison and writes one self-contained HTML page.
    """

    seed: int = 0
    """The seed of all three runs."""
    runs: Path = RUNS
    """Where the runs and the report go."""

    def run(self) -> None:
        """Train what has not been trained yet, compare, and say where the page is."""
        records = [
            ensure_run(EXPERIMENT, row, scale="full", seed=self.seed, runs=self.runs, devices=1)
            for row in ROWS
        ]
        chapters = report.chapters_of([EXPERIMENT], records)
        print_comparison(chapters[0].runs)
        page, _ = report.write(chapters, self.runs / EXPERIMENT.name, title="Singular Value Bounding: a demo")
        print(f"Curves and spectra: {page}")


def print_comparison(runs: record.Runs) -> None:
    """Print the report's table, as far as a terminal has room for it."""
    console = PlainConsole()
    full = results_table(EXPERIMENT, runs)
    shown = ("row", "test error %", "best epoch", "after a last projection")
    table = Table(*shown)
    for cells in full.rows:
        by_name = dict(zip(full.header, cells, strict=True))
        table.add_row(*(by_name[name].replace("*", "").strip("`") for name in shown))
    console.print(table)
