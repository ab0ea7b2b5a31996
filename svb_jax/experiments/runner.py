"""``svb run``: runs rows of experiments, each once, each picked up where it was left."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from svb_jax.experiments import catalogue, record
from svb_jax.experiments.experiment import RUNS, Experiment, train_network
from svb_jax.experiments.program import command, given
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.loop import Diverged, train
from svb_jax.training.trackers import Tracker, make_trackers

# Seconds of the embedded digits are a check that all works, not a result to keep.
UNRECORDED_SCALE = "smoke"

# One line for each piece of memory that this process has mapped, on Linux; its usual limit is 65,530.
MAPPED = Path("/proc/self/maps")
MOST_MAPPED = 20_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run experiments of the paper, or rows of them.

    What has finished before is skipped, what was interrupted goes on from its last checkpoint.
    """

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME[/ROW] ...", help_behavior_hint="")
    ] = ()
    """NAME or NAME/ROW, as `list` prints them: figure2, table1/svb+bbn."""
    scale: Literal["full", "long", "medium", "small", "smoke"] = "full"
    """full: as in the paper, for accelerators. medium: all images at half the size, for a CPU core.
    long: the same, for more epochs.
    small: 6,400 images. smoke: seconds."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each of these."""
    runs: Path = RUNS
    """Where the runs keep their checkpoints and logs."""
    results: Path = field(default=record.RESULTS)
    """Where the record of each finished run is kept; runs that have one are skipped."""
    data_dir: Path = Path("data")
    """Where the data sets are, as `data import` left them."""
    devices: int | None = None
    """How many of this host's devices to use; all if not given (smoke: one)."""
    tracker: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """Where to send the numbers besides metrics.jsonl: tensorboard, wandb, or your own module:Class."""

    def run(self) -> None:
        """Run every row with every seed, seed by seed, so that rows can be compared early."""
        if not self.names:
            raise ValueError(f"run needs the name of an experiment; `{command('list')}` prints them.")
        odd = [seed for seed in self.seeds if not 0 <= seed < 2**32]
        if odd:
            raise ValueError(f"run needs seeds of at least 0 and below 2**32, got {odd[0]}.")
        found = [catalogue.find(name) for name in self.names]
        for experiment, _ in found:
            if self.tracker and experiment.train is not train_network:
                raise ValueError(
                    f"run --tracker does not work with {experiment.name}, whose loop is its own."
                )
        runs = [(experiment, row, seed) for seed in self.seeds for experiment, rows in found for row in rows]
        diverged = [label for label in (self._run_once(*run) for run in runs) if label]
        if diverged:
            raise Diverged(f"These runs diverged, the others are done: {'; '.join(diverged)}.")
        print(f"Next: {command('report', **given(self, 'runs', 'results'))}")

    def _run_once(self, experiment: Experiment[Any], row: str, seed: int) -> str | None:
        """Run a row with a seed unless its record is there; returns its label if it diverged."""
        label = f"{experiment.name}/{row}, {self.scale}, seed {seed}"
        kept = record.path_of(experiment.name, row, self.scale, seed, self.results)
        if kept.is_file():
            print(f"{label}: skipped, its record is {kept}")
            return None
        settings = {"data_dir": self.data_dir} | ({} if self.devices is None else {"devices": self.devices})
        try:
            finished = ensure_run(
                experiment,
                row,
                trackers=make_trackers(self.tracker),
                scale=self.scale,
                seed=seed,
                runs=self.runs,
                **settings,
            )
        except Diverged as error:
            # A setting that cannot be trained is a finding, and the others still have to run.
            print(f"{label}: {error}", file=sys.stderr)
            return label
        metric = experiment.metric
        if metric.key not in finished.result:
            raise ValueError(
                f"run needs {metric.key} in the result of {label}, got none. "
                f"To run it again, delete its folder in {self.runs}."
            )
        if self.scale != UNRECORDED_SCALE:
            record.save(finished, self.results)
        print(f"{label}: {metric.label} {metric.show(finished.result[metric.key])}{metric.unit}")
        return None


def release_programs() -> None:
    """Let go of all compiled programs before the process has more memory mapped than Linux lets it have.

    On CPU each run's programs keep about a thousand pieces mapped, and a process that exceeds the limit
    crashes; what the next run needs again it has to compile or load again, so this waits until it must.
    """
    if MAPPED.is_file() and len(MAPPED.read_bytes().splitlines()) > MOST_MAPPED:
        jax.clear_caches()


def ensure_run(
    experiment: Experiment[Any], row: str, *, runs: Path, trackers: Sequence[Tracker] = (), **settings: Any
) -> record.Record:
    """Run a row, or continue it, unless it is complete already; and read what came out.

    Only experiments that train by ``svb_jax.training.train`` take trackers.
    """
    config = experiment.configure(row, runs=runs, **settings)
    if record.is_complete(config.run_dir):
        try:
            finished = record.read_run(config.run_dir)
            print(f"{config.run_dir} is complete already; delete it to run it again.", file=sys.stderr)
            return finished
        except record.DamagedRunError as damage:
            print(f"{damage} It is run again, or mended from its checkpoint.", file=sys.stderr)
    print(f"Running {experiment.name}/{row} in {config.run_dir}", file=sys.stderr)
    # Rows that differ in a number only are compiled once: epsilon enters the step as an argument.
    with cached_compilation(runs / "compilation_cache"):
        try:
            if trackers:
                train(config, trackers)
            else:
                experiment.train(config)
        finally:
            release_programs()
    return record.read_run(config.run_dir)
