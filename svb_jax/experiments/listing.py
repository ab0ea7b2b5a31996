"""``svb list``: what there is to run, what the paper found, and what it would cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import tyro
from rich.table import Table

from svb_jax import models
from svb_jax.ahead_of_time import find_target
from svb_jax.experiments import catalogue
from svb_jax.experiments.console import PlainConsole
from svb_jax.experiments.experiment import Experiment
from svb_jax.experiments.plans import format_hours, load_plan
from svb_jax.experiments.program import command
from svb_jax.training.config import TrainConfig
from svb_jax.training.sampling import steps_per_epoch

IMAGES: Mapping[str, int] = {"cifar10": 50_000, "cifar100": 50_000, "imagenet2012": 1_281_167}
CLASSES: Mapping[str, int] = {"cifar10": 10, "cifar100": 100, "imagenet2012": 1000}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a row costs at full scale, counted from its trace: nothing is computed or allocated."""

    parameters: int
    steps: int
    multiply_adds: int
    """Of one image's forward pass."""
    petaflops: float
    """Of the whole training: two operations per multiply-add, and twice as many backward as forward."""


def cost(config: TrainConfig) -> Cost:
    """Count what training costs.

    Example:
      >>> counted = cost(TrainConfig(model="convnet_20", dataset="cifar10"))
      >>> counted.parameters, counted.steps, counted.multiply_adds
      (269712, 62560, 40551040)
    """
    summary = _summary(config.model, CLASSES[config.dataset], config.width, config.depth)
    steps = config.epochs * steps_per_epoch(IMAGES[config.dataset], config.batch_size)
    operations = 6 * summary.multiply_adds * steps * config.batch_size
    return Cost(
        parameters=summary.parameters,
        steps=steps,
        multiply_adds=summary.multiply_adds,
        petaflops=operations / 1e15,
    )


@lru_cache
def _summary(model: str, num_classes: int, width: float, depth: int | None) -> models.Summary:
    return models.summary(model, num_classes=num_classes, width=width, depth=depth)


@dataclass(frozen=True, kw_only=True)
class List:
    """List the experiments, or the rows of those named."""

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="")
    ] = ()
    """Experiments whose rows to list."""
    costs: bool = False
    """Print what every row costs at full scale: parameters, steps, operations, memory and time."""
    target: str = "v5e-8"
    """The accelerator whose memory and time to print, where `compile --record` has planned for it."""

    def run(self) -> None:
        """Print a table of experiments, or of rows."""
        chosen = [catalogue.find(name)[0] for name in self.names] or list(catalogue.EXPERIMENTS.values())
        console = PlainConsole()
        if self.costs:
            console.print(costs_table(chosen, find_target(self.target).name))
            compiling = f"{command('compile')} NAME/ROW --target {self.target} --record"
            console.print("PFLOP: of the whole training, counted.")
            console.print(f"GB: memory a chip; hours: at least. Both by the compiler for {self.target}.")
            console.print(f"{compiling} adds a row's.", markup=False)
        elif self.names:
            for experiment in chosen:
                console.print(rows_table(experiment))
        else:
            console.print(experiments_table(chosen))
            console.print(f"{command('list')} NAME lists its rows.", markup=False)
            console.print(f"{command('run')} NAME --scale smoke tries it in seconds.", markup=False)


def experiments_table(experiments: list[Experiment[Any]]) -> Table:
    """Name, title and size of each experiment."""
    table = Table("name", "what it is", "rows", "runs per row in the paper")
    for experiment in experiments:
        runs = str(experiment.seeds) if experiment.paper else "-"
        table.add_row(experiment.name, experiment.title, str(len(experiment.rows)), runs)
    return table


def rows_table(experiment: Experiment[Any]) -> Table:
    """Every row with its bands and the paper's number."""
    table = Table(
        "row", "ε of SVB", "ε̃ of BBN", "error in the paper, %", title=f"{experiment.name}: {experiment.title}"
    )
    for row, config in experiment.rows.items():
        bands = [getattr(config, name, None) for name in ("svb_epsilon", "bbn_epsilon")]
        paper = str(experiment.paper[row]) if row in experiment.paper else "-"
        shown = ["-" if band is None else f"{band:g}" for band in bands]
        table.add_row(f"{experiment.name}/{row}", *shown, paper)
    return table


def costs_table(experiments: list[Experiment[Any]], target: str) -> Table:
    """What every row costs at full scale, and on a target for which it was compiled."""
    # No lines and little room between columns: the longest row's name must fit a terminal of 80.
    columns = ("row", "parameters", "steps", "PFLOP", "GB", "hours")
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))
    for experiment in experiments:
        for row, config in experiment.rows.items():
            if isinstance(config, TrainConfig):
                figures = costs(config, target)
            else:
                figures = "-", f"{config.steps:,}", "-", "-", "-"
            table.add_row(f"{experiment.name}/{row}", *figures)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def costs(config: TrainConfig, target: str) -> tuple[str, ...]:
    """Return a row's parameters, steps, PFLOP, and on the target GB a chip and hours, as they are printed."""
    counted, planned = cost(config), load_plan(config, target)
    memory = hours = "-"
    if planned is not None:
        memory = f"{planned.planned_bytes / 1e9:.2f}"
        if planned.step_seconds is not None:
            hours = format_hours(planned.step_seconds * counted.steps)
    return (
        f"{counted.parameters / 1e6:.2f}M",
        f"{counted.steps:,}",
        f"{counted.petaflops:,.1f}",
        memory,
        hours,
    )
