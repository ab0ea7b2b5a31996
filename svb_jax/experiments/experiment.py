"""What an experiment is: named rows, each a whole training run, with the paper's numbers beside them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from svb_jax.experiments.scales import SCALES
from svb_jax.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from svb_jax.experiments.record import Record, Runs

RUNS = Path("runs")


class RunConfig(Protocol):
    """What every row's configuration can say: a frozen dataclass with a seed and a folder."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int:
        """Decides the initial weights, the order of the data and their augmentation."""
        ...

    @property
    def run_dir(self) -> Path:
        """Where the run keeps its files."""
        ...


Config = TypeVar("Config", bound=RunConfig)

STANDARD_COLUMNS = {
    # The lowest error of any epoch, which the authors chose on the test set.
    "best epoch": "best_test_error",
    # The authors' code never projects after the last epoch, so the error as trained is the paper's.
    "after a last projection": "test_error_projected",
}


# Those of the paper's figure 2 and of its tables' curves; figure 1 alone has others.
METHOD_COLOURS = {"sgd": "blue", "svb": "red", "svb+bbn": "black"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """Error rates in percent, as the paper prints them.

    Example:
      >>> str(Printed(error=6.22, std=0.14, best=6.10))
      '6.10 (6.22 ± 0.14)'
      >>> str(Printed(error=8.03, of="best of five ε"))
      '8.03 (best of five ε)'
    """

    error: float
    """The only number printed, or the mean of several runs."""
    std: float | None = None
    best: float | None = None
    top5: float | None = None
    of: str = ""
    """What the number stands for, where the paper does not give one for this very row."""

    def __str__(self) -> str:
        text = f"{self.error:.2f}"
        if self.std is not None:
            text = f"{self.best:.2f} ({text} ± {self.std:.2f})"
        if self.top5 is not None:
            text = f"{text} / {self.top5:.2f}"
        return f"{text} ({self.of})" if self.of else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorArt:
    """A row of a table that the paper quotes from elsewhere; None where it prints a dash."""

    method: str
    cifar10: float | None
    cifar100: float | None = None
    layers: int | None = None
    parameters: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """The number that a run is judged by: a key of its result and of its metrics, the smaller the better.

    Example:
      >>> loss = Metric(key="validation_loss", unit=" nats", form=".3f", limit=9.0)
      >>> loss.show(2.0), loss.show_difference(2.0), loss.show(None), loss.has_diverged(1e9)
      ('2.000', '+2.000', '-', True)
    """

    key: str = "test_error"
    label: str = "test error"
    unit: str = " %"
    form: str = ".2f"
    limit: float = math.inf
    """A run that ends above it has diverged: its value says nothing, and must not enter a mean."""
    resolution: float | None = None
    """A difference worth knowing: reports say how many seeds an interval of plus or minus this takes."""

    @property
    def difference_unit(self) -> str:
        """Differences of percentages are points."""
        return self.unit.replace("%", "points")

    def has_diverged(self, value: float | None) -> bool:
        """Whether a run that ended with this value counts as diverged; None stands for not finite."""
        return value is None or not math.isfinite(value) or value > self.limit

    def num_diverged(self, records: Sequence["Record"]) -> int:
        """How many of the runs have diverged."""
        return sum(self.has_diverged(record.result[self.key]) for record in records)

    def show(self, value: float | None) -> str:
        """The value as a reader wants it, without its unit; a dash if there is none."""
        return self._format(value, self.form)

    def show_difference(self, value: float | None) -> str:
        """The same with its sign."""
        return self._format(value, f"+{self.form}")

    def _format(self, value: float | None, form: str) -> str:
        return "-" if value is None or math.isnan(value) else format(value, form)


TEST_ERROR = Metric(resolution=0.5)


def train_network(config: TrainConfig) -> object:
    """Train a network, or continue it."""
    # The loop brings all that training needs with it, which to list experiments or to report does not.
    from svb_jax.training.loop import train

    return train(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Generic[Config]):
    """A figure or a table of the paper.

    Example:
      >>> from svb_jax.experiments import table1
      >>> config = table1.EXPERIMENT.configure("svb+bbn", scale="small", seed=2)
      >>> config.svb_epsilon, config.epochs, config.run_dir.as_posix()
      (0.5, 10, 'runs/table1/svb+bbn/small/seed2')
    """

    name: str
    title: str
    rows: Mapping[str, Config]
    """The paper's settings; smaller scales are made from these."""
    smoke_row: str
    """The row that exercises the most, for the quickest test of the whole experiment."""
    reference: str | None = None
    """The row that all others are compared with; if not given, each with the same run unbounded."""
    seeds: int = 1
    """How many runs of each row the paper reports."""
    paper: Mapping[str, Printed] = dataclasses.field(default_factory=dict)
    prior_art: Sequence[PriorArt] = ()
    notes: Sequence[str] = ()
    """Where paper, the authors' code and this experiment differ, and what the paper leaves open."""
    small: str = ""
    """What the scale ``small`` makes of the networks."""
    colours: Mapping[str, str] = dataclasses.field(default_factory=lambda: METHOD_COLOURS)
    """Method to colour: the same in all figures."""
    paper_colours: Mapping[str, str] = dataclasses.field(default_factory=lambda: METHOD_COLOURS)
    """The same as the paper draws it."""
    panels: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Titles of the panels that curves are drawn in, and their rows; one panel with all rows if empty."""
    figures: Sequence[Callable[["Experiment[Any]", "Runs"], "Figure"]] = ()
    """What draws the figures from the runs; the first line of each one's docstring is its caption."""
    metric: Metric = TEST_ERROR
    columns: Mapping[str, str] = dataclasses.field(default_factory=lambda: STANDARD_COLUMNS)
    """Further columns of the table: heading and key of the result, shown as a mean over the seeds."""
    scales: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=lambda: SCALES)
    shows_times: bool = True
    """Off where runs shared their machine with others, so that their times say nothing about the rows."""
    train: Callable[[Any], object] = train_network

    def configure(self, row: str, *, scale: str, seed: int, runs: Path = RUNS, **settings: Any) -> Config:
        """The configuration of one run: a row at a scale, with a seed and a folder of its own."""
        run_dir = runs / self.name / row / scale / f"seed{seed}"
        config = self.scales[scale](self.rows[row])
        # A purely numerical row has no data set or devices to be told of.
        known = {key: value for key, value in settings.items() if key in config.__dataclass_fields__}
        return dataclasses.replace(config, seed=seed, run_dir=run_dir, **known)

    def baseline(self, row: str) -> str | None:
        """The row to compare with: the reference, or the one that only lacks this one's SVB and BBN."""
        if self.reference is not None:
            return self.reference if row != self.reference else None
        plain = unbounded(self.rows[row])
        matches = (name for name, config in self.rows.items() if config == plain and name != row)
        return next(matches, None)

    def notes_at(self, scale: str) -> list[str]:
        """The notes on runs at this scale."""
        return [*self.notes, *([f"Small scale: {self.small}"] if self.small and scale == "small" else [])]

    def band(self, row: str) -> tuple[float, float] | None:
        """The interval that SVB keeps a row's singular values in; None without SVB."""
        epsilon = getattr(self.rows[row], "svb_epsilon", None)
        return None if epsilon is None else (1 / (1 + epsilon), 1 + epsilon)

    def method(self, row: str) -> str:
        """``sgd``, ``svb`` or ``svb+bbn``."""
        config = self.rows[row]
        bounds = [name for name in ("svb", "bbn") if getattr(config, f"{name}_epsilon", None) is not None]
        return "+".join(bounds) or "sgd"


def unbounded(config: Config) -> Config:
    """The same run without SVB and BBN."""
    fields = [name for name in ("svb_epsilon", "bbn_epsilon") if name in config.__dataclass_fields__]
    return dataclasses.replace(config, **dict.fromkeys(fields))
