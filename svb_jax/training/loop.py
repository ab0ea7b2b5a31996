"""The training loop: epochs of steps, an evaluation after each, and a folder that can be continued."""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import svb_jax
from svb_jax.training.agreement import agree, agree_on_the_data, agree_on_the_end
from svb_jax.training.checkpoint import Checkpoint, saved_steps
from svb_jax.training.compilation import cached_compilation
from svb_jax.training.config import TrainConfig, to_fields
from svb_jax.training.hosts import leaving_on_failure
from svb_jax.training.memory import keep_freed_memory
from svb_jax.training.parallel import fetch
from svb_jax.training.progress import Display
from svb_jax.training.resuming import find_start, owned
from svb_jax.training.run_folder import Result, RunFolder, current_commit, describe_hardware
from svb_jax.training.saving import Checkpoints
from svb_jax.training.session import Session
from svb_jax.training.state import TrainState
from svb_jax.training.step import Batch, Report
from svb_jax.training.stopping import Interrupted, StopSignals
from svb_jax.training.timing import Clock, Throughput
from svb_jax.training.trackers import SafeTrackers, Tracker, tracking

RUN_AHEAD = 2
"""Steps that may be under way while the host prepares the next: enough to keep the devices busy."""


class Diverged(RuntimeError):  # noqa: N818 - what happened to the network, not to the program
    """The loss or the parameters are no longer finite."""


def train(config: TrainConfig, trackers: Sequence[Tracker] = ()) -> Result:
    """Train, evaluate after every epoch, and leave everything in the run's folder.

    A folder that holds an unfinished run is continued from its newest whole checkpoint, bit for bit as if
    it had not been interrupted; one that holds a complete run is only read.

    Args:
      config: The run.
      trackers: Where its numbers go beside its folder; one that fails does not stop the run.

    Returns:
      The result, as in ``result.json``.

    Raises:
      ValueError: The configuration cannot be run, or the folder holds another one.
      Diverged: The loss is no longer finite; the last good checkpoint is kept.
      Interrupted: SIGTERM or Ctrl-C; the state was saved.
      CheckpointError: A checkpoint could not be written, or none could be read.
      FolderInUse: Another process trains in the folder.
    """
    keep_freed_memory()
    with leaving_on_failure(Diverged, Interrupted):
        agree(config)
        folder = RunFolder(config)
        folder.check()
        result = folder.result()
        agree_on_the_end(folder.path, result is not None)
        return result or _train_in(folder, trackers)


def _train_in(folder: RunFolder, trackers: Sequence[Tracker]) -> Result:
    config = folder.config
    with cached_compilation(config.run_dir.parent / "compilation_cache"), StopSignals() as stop:
        session = Session(config)
        agree_on_the_data(config.dataset, session.feed.digest)
        with (
            Display(session.span.total_steps, session.span.steps_per_epoch) as display,
            owned(folder, display.say),
        ):
            if session.feed.origin == "modified":
                display.say(
                    f"The {config.dataset} in {config.data_dir} is not the official one, but modified."
                )
            start = find_start(folder, session.feed.digest, display.say)
            folder.create()
            keep = config.keep_checkpoints
            mine = trackers if folder.is_writer else ()
            with (
                Checkpoints(folder.checkpoints, keep, to_fields(config), session.feed.digest) as checkpoints,
                tracking(mine, to_fields(config), folder.path, display.say) as tracked,
            ):
                run = _Run(session, folder, checkpoints, display, stop, tracked)
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
    trackers: SafeTrackers
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
        if start is None or not self.folder.has_spectrum("initial"):
            state = self.session.initial_state()
            self._record_spectrum("initial", state.params)
        else:
            state = jax.eval_shape(self.session.initial_state)
        self.clock = Clock()
        if start is not None:
            state = start.fill(state)
            self.clock, self.step = Clock(start.notes.seconds), start.step
            self.lines = [dict(line) for line in start.notes.history]
        self.state: TrainState = self.session.engine.place(state)
        self.folder.restore_metrics(self.lines, self.display.say)

    def finish(self) -> Result:
        """Train to the end, and write the result."""
        per_epoch = self.session.span.steps_per_epoch
        with contextlib.closing(self.session.feed.train(self.step)) as batches:
            for epoch in range(self.step // per_epoch, self.session.config.epochs):
                self._train_until((epoch + 1) * per_epoch, batches)
                self._end_epoch(epoch + 1)
        self.checkpoints.wait()
        # Somebody may have moved or altered it meanwhile; what is written now is final.
        self.folder.restore_metrics(self.lines, self.display.say)
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
        found = {**_known(fetch(details)), **self._project_after_evaluation(epoch)}
        numbers = {
            **found,
            **self._sigma_range(found),
            **errors,
            "images_per_second": self.throughput.rate(),
        }
        line = {"step": self.step, "epoch": epoch, "seconds": self.clock.seconds()}
        line |= {name: float(value) if _is_finite(value) else None for name, value in numbers.items()}
        self.lines.append(line)
        # The line before the checkpoint: whoever continues from the checkpoint finds it written.
        self.folder.add_metrics(line)
        self.display.epoch(line)
        self.trackers.scalars(self.step, line)
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
            self.checkpoints.save(
                self.state, seconds=self.clock.seconds(), test_error=test_error, history=self.lines
            )
        except FloatingPointError as error:
            raise self._diverged(f"The network diverged: {error}") from error
        if self.must_stop:
            self.checkpoints.wait()
            raise Interrupted(
                f"Asked to stop: step {self.step} of {self.session.span.total_steps} is saved in "
                f"{self.folder.path}. The same command continues from there.",
                self.stop.signal,
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

    def _project_after_evaluation(self, epoch: int) -> dict[str, float]:
        """Project where the step does not, unless this is the last epoch; and say what was found."""
        config = self.session.config
        is_due = epoch % config.project_every_epochs == 0
        is_left_out = epoch == config.epochs and not config.project_after_last_epoch
        if config.evaluate == "after" or not is_due or is_left_out:
            return {}
        self.state, found = self.session.project(self.state)
        return {name: value for name, value in found.items() if not name.endswith("/step")}

    def _error_projected(self) -> float:
        state, _ = self.session.project(self.state)
        return self.session.evaluate(state.params, state.batch_stats)["test_error"]

    def _sigma_range(self, found: dict[str, Any]) -> dict[str, float]:
        """The extreme singular values of all matrices, where no projection of this epoch found them."""
        last_projection = found.get("svb/step", self.step) if "svb/sigma_min" in found else None
        if last_projection and last_projection > self.step - self.session.span.steps_per_epoch:
            return {}
        spectra = svb_jax.singular_values(
            fetch(self.state.params), dimension_numbers=svb_jax.by_name
        ).values()
        values = np.concatenate([spectrum.ravel() for spectrum in spectra])
        return {"sigma_min": float(values.min()), "sigma_max": float(values.max())}

    def _record_spectrum(self, when: str, params: Any) -> None:
        if self.folder.is_writer:
            values = svb_jax.singular_values(params, dimension_numbers=svb_jax.by_name)
            self.folder.add_spectrum(when, values)
            self.trackers.spectrum(self.step, values)

    def _result(self) -> Result:
        session, last = self.session, self.lines[-1]
        projects = session.config.svb_epsilon is not None
        rates = [line["images_per_second"] for line in self.lines if line["images_per_second"]]
        return Result(
            test_error=last["test_error"],
            test_error_projected=self._error_projected() if projects else None,
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
            data_origin=session.feed.origin,
        )


def _known(details: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of a projection as unknown before the first one; JSON has no NaN for it."""
    bounds = {name: details.get(f"{name.partition('/')[0]}/step") for name in details}
    return {name: None if bounds[name] == 0 else value for name, value in details.items()}


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
