"""Every experiment by its name, and how a name typed by hand finds its experiment and rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from svb_jax._src.suggestions import did_you_mean
from svb_jax.experiments import (
    convergence,
    convergence_resnet,
    deep_linear,
    figure1,
    figure2,
    rates,
    table1,
    table2,
    table3,
    table4,
    transformer,
)
from svb_jax.experiments.experiment import Experiment

EXPERIMENTS: Mapping[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        convergence,
        convergence_resnet,
        rates,
        figure1,
        figure2,
        table1,
        table2,
        table3,
        table4,
        deep_linear,
        transformer,
    )
}


class UnknownNameError(ValueError):
    """A name that no experiment or row has; the message suggests the nearest."""


def find(name: str) -> tuple[Experiment[Any], Sequence[str]]:
    """The experiment and the rows that ``NAME`` or ``NAME/ROW`` stands for.

    Example:
      >>> experiment, rows = find("table1/svb")
      >>> experiment.name, rows
      ('table1', ['svb'])
      >>> find("tabel1")
      Traceback (most recent call last):
          ...
      svb_jax.experiments.catalogue.UnknownNameError: There is no experiment 'tabel1'. Did you mean ...
    """
    experiment_name, slash, row = name.partition("/")
    if experiment_name not in EXPERIMENTS:
        raise UnknownNameError(_suggestion("There is no experiment", experiment_name, EXPERIMENTS))
    experiment = EXPERIMENTS[experiment_name]
    if not slash:
        return experiment, list(experiment.rows)
    if row not in experiment.rows:
        raise UnknownNameError(_suggestion(f"{experiment_name} has no row", row, experiment.rows))
    return experiment, [row]


def _suggestion(problem: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    return f"{problem} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
