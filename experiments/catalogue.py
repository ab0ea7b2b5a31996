"""Every experiment by its name, and how a name typed by hand finds its experiment and rows."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import deep_linear, figure1, figure2, table1, table2, table3, table4
from experiments.experiment import Experiment

EXPERIMENTS: Mapping[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (figure1, figure2, table1, table2, table3, table4, deep_linear)
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
      experiments.catalogue.UnknownNameError: There is no experiment 'tabel1'; did you mean 'table1'?...
    """
    experiment_name, slash, row = name.partition("/")
    if experiment_name not in EXPERIMENTS:
        raise UnknownNameError(_suggestion("experiment", experiment_name, EXPERIMENTS))
    experiment = EXPERIMENTS[experiment_name]
    if not slash:
        return experiment, list(experiment.rows)
    if row not in experiment.rows:
        raise UnknownNameError(_suggestion(f"row of {experiment_name}", row, experiment.rows))
    return experiment, [row]


def _suggestion(what: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"There is no {what} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}."
