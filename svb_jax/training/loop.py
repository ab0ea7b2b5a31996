"""The training loop: epochs of steps, an evaluation after each, and a folder that can be continued."""

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import svb_jax
from svb_jax.training.checkpoint import Checkpoint, Checkpoints, load_newest, saved_steps, set_aside
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.config import TrainConfig
from svb_jax.training.hosts import leaving_on_failure
from svb_jax.training.parallel import fetch
from svb_jax.training.progress import Display
from svb_jax.training.run_folder import Result, RunFolder, current_commit, describe_hardware
from svb_jax.training.session import Session
from svb_jax.training.state import TrainState
from svb_jax.training.step import Batch, Report
from svb_jax.training.stopping import Interrupted, StopSignals
from svb_jax.training.timing import Clock, Throughput

RUN_AHEAD = 2
"""Steps that may be under way while the host prepares the next: enough to keep the devices busy."""


class Diverged(RuntimeError):  # noqa: N818 - what happened to the network, not to the program
    """The loss or the parameters are no longer finite."""


def train(config: TrainConfig) -> Result:
    """Train, evaluate after every epoch, and leave everything in the run's folder.

    A folder that holds an unfinished run is continued from its newest whole checkpoint, bit for bit as if
    it had not been interrupted; one that holds a complete run is only read.

    Args:
      config: The run.

    Returns:
      The result, as in ``result.json``.

    Raises:
      ValueError: The configuration cannot be run, or the folder holds another one.
      Diverged: The loss is no longer finite; the last good checkpoint is kept.
      Interrupted: SIGTERM or Ctrl-C; the state was saved.
      CheckpointError: A checkpoint could not be written, or none could be read.
    """
    with leaving_on_failure(Diverged, Interrupted):
        folder = RunFolder(config)
        folder.check()
        return folder.result() or _train_in(folder)


def _train_in(folder: RunFolder) -> Result:
    config = folder.config
    with cached_compilation(config.run_dir.parent / "compilation_cache"), StopSignals() as stop:
        session = Session(config)
        folder.create()
        with Display(session.span.total_steps, session.span.steps_per_epoch) as display:
            start = _find_start(folder, display)
            with Checkpoints(folder.checkpoints, config.keep_checkpoints) as checkpoints:
                run = _Run(session, folder, checkpoints, display, stop)
                run.begin(start)
                return run.finish()


@dataclass
class _Run:
    """A run under way."""

    session: Session
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    stop: StopSignals
    step: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The epochs' metrics."""
    under_way: deque[tuple[int, Report]] = field(default_factory=deque)
    """The steps that may not be finished yet, and what they will report."""
    throughput: Throughput = field(default_factory=lambda: Throughput(0))
    must_stop: bool = False
    """Whether a finished step reported that some host was asked to stop: known to all hosts alike."""

    def begin(self, start: Checkpoint | None) -> None:
        """Place the first state, or the saved one, on the devices."""
        if start is None:
            state = self.session.initial_state()
            self.clock = Clock()
            self._record_spectrum("initial", state.params)
        else:
            state = start.fill(jax.eval_shape(self.session.initial_state))
            self.clock, self.step = Clock(start.seconds), start.step
        self.state: TrainState = self.session.engine.replicate(state)
        self.folder.rewind_metrics(self.step)
        self.lines = [line for line in self.folder.metrics() if line["step"] <= self.step]

    def finish(self) -> Result:
        """Train to the end, and write the result."""
        per_epoch = self.session.span.steps_per_epoch
        with contextlib.closing(self.session.feed.train(self.step)) as batches:
            for epoch in range(self.step // per_epoch, self.session.config.epochs):
                self._train_until((epoch + 1) * per_epoch, batches)
                self._end_epoch(epoch + 1)
        self.checkpoints.wait()
        self._record_spectrum("final", fetch(self.state.params))
        result = self._result()
        self.folder.write_result(result)
        return result

    def _train_until(self, end: int, batches: Iterator[Batch]) -> None:
        self.throughput = Throughput(self.session.config.batch_size)
        while self.step < end:
            self._take_step(next(batches))
            if self.step < end and (self.must_stop or self._is_checkpoint_due()):
                self._save()

    def _take_step(self, batch: Batch) -> None:
        self.state, report = self.session.step(self.state, batch, self.stop.requested)
        self.step += 1
        self.under_way.append((self.step, report))
        if len(self.under_way) > RUN_AHEAD:
            self._look_back()

    def _look_back(self) -> dict[str, jax.Array]:
        """Wait for the oldest step under way: the host runs ahead of the devices, but not far."""
        step, report = self.under_way.popleft()
        loss, num_stopping = np.asarray(report.pulse)
        if not math.isfinite(loss):
            raise self._diverged(f"The loss is {loss} at step {step}")
        self.must_stop = self.must_stop or num_stopping > 0
        self.throughput.finish_step()
        if self.display.wants_step():
            self.display.step(step, {**report.details, "images_per_second": self.throughput.rate()})
        return report.details

    def _catch_up(self) -> dict[str, jax.Array]:
        """Wait for every step under way, and return the newest report."""
        details = {}
        while self.under_way:
            details = self._look_back()
        return details

    def _end_epoch(self, epoch: int) -> None:
        details = self._catch_up()
        errors = self.session.evaluate(self.state.params, self.state.batch_stats)
        numbers = {**fetch(details), **errors, "images_per_second": self.throughput.rate()}
        line = {"step": self.step, "epoch": epoch, "seconds": self.clock.seconds()}
        # JSON has no NaN, which the statistics of a projection hold before the first one.
        line |= {name: float(value) if _is_finite(value) else None for name, value in numbers.items()}
        self.lines.append(line)
        # The line before the checkpoint: whoever continues from the checkpoint finds it written.
        self.folder.add_metrics(line)
        self.display.epoch(line)
        if self.must_stop or epoch == self.session.config.epochs or self._is_checkpoint_due():
            self._save(errors["test_error"])

    def _is_checkpoint_due(self) -> bool:
        span, epochs = self.session.span, self.session.config.checkpoint_every_epochs
        # Fractions count from each epoch's start, so that its evaluated end is always among them.
        step = self.step if epochs >= 1 else self.step % span.steps_per_epoch
        return step % span.every(epochs) == 0

    def _save(self, test_error: float | None = None) -> None:
        """Save the state; if some host was asked to stop, wait until it is saved and stop."""
        self._catch_up()
        try:
            self.checkpoints.save(self.state, seconds=self.clock.seconds(), test_error=test_error)
        except FloatingPointError as error:
            raise self._diverged(f"The network diverged: {error}") from error
        if self.must_stop:
            self.checkpoints.wait()
            raise Interrupted(
                f"Asked to stop: step {self.step} of {self.session.span.total_steps} is saved in "
                f"{self.folder.path}. The same command continues from there."
            )

    def _diverged(self, what: str) -> Diverged:
        self.checkpoints.wait()
        saved = saved_steps(self.folder.checkpoints)
        good = (
            f"The last good checkpoint is {self.folder.checkpoints / str(saved[-1])}"
            if saved
            else "None is saved"
        )
        return Diverged(
            f"{what}. {good}. A smaller learning rate may help (now {self.session.config.learning_rate})."
        )

    def _record_spectrum(self, when: str, params: Any) -> None:
        if self.folder.is_writer:
            self.folder.add_spectrum(when, svb_jax.singular_values(params))

    def _result(self) -> Result:
        session, last = self.session, self.lines[-1]
        projects = session.config.svb_epsilon is not None
        rates = [line["images_per_second"] for line in self.lines if line["images_per_second"]]
        return Result(
            test_error=last["test_error"],
            test_error_projected=session.evaluate_projected(self.state)["test_error"] if projects else None,
            best_test_error=min(line["test_error"] for line in self.lines),
            test_error_top5=last["test_error_top5"],
            train_error=last["train_error"],
            seconds=self.clock.seconds(),
            steps=self.step,
            parameters=session.num_parameters(self.state),
            images_per_second=sum(rates) / len(rates) if rates else None,
            hardware=describe_hardware(session.engine.devices),
            jax=jax.__version__,
            commit=current_commit(),
        )


def _find_start(folder: RunFolder, display: Display) -> Checkpoint | None:
    """Return the newest whole checkpoint, if any, and say what was found."""
    start, damaged = load_newest(folder.checkpoints)
    for step, reason in damaged.items():
        if folder.is_writer:
            place = set_aside(folder.checkpoints, step)
            display.say(f"The checkpoint of step {step} {reason}; it is now in {place}.")
    if start is not None:
        display.say(f"Continuing the run in {folder.path} from step {start.step}.")
    return start


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
