"""Where a run's numbers go besides its folder: TensorBoard, Weights & Biases, or a class of your own.

``metrics.jsonl`` in the run's folder is always written. A tracker that fails is reported once and dropped: it
never stops a run.
"""

import contextlib
import hashlib
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from svb_jax._src.extras import needs_extra
from svb_jax._src.suggestions import did_you_mean

NUM_BINS = 64
"""Of a histogram; as many as Weights & Biases has."""


class Tracker(Protocol):
    """What a tracker does.

    Subclass it and override the methods that you need; the others do nothing.

    Example:
      >>> class Printer(Tracker):
      ...     def scalars(self, step, values):
      ...         print(step, values)
      >>> Printer().scalars(391, {"test_error": 8.0})
      391 {'test_error': 8.0}
    """

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Begin, or continue, a run with this configuration."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of an epoch that ended with this step."""

    def spectrum(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Take every matrix's singular values by path: before the first step and after the last."""

    def finish(self) -> None:
        """End, however the run has ended."""


class TensorBoard(Tracker):
    """Writes event files for TensorBoard to the run's ``tensorboard/``, without TensorFlow."""

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Open a file, and write the configuration as text."""
        with needs_extra("svb_jax.training.TensorBoard", "tensorboard"):
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Not SummaryWriter, whose thread dies of a full disk, and lets whoever hands it more wait for ever.
        self._file = event_file_writer.EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # pyright cannot see what protobuf makes at run time.
        messages: Any = event_pb2
        self._make_event, self._summary = messages.Event, summary
        self._write(0, [summary.text("config", "\n".join(f"    {name}: {config[name]}" for name in config))])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write each number under its name."""
        self._write(step, [self._summary.scalar(name, value) for name, value in values.items()])

    def spectrum(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write a histogram per matrix, as ``spectrum/<path>``."""
        histogram = self._summary.histogram
        self._write(
            step,
            [
                histogram(f"spectrum/{path}", np.ravel(spectrum), NUM_BINS)
                for path, spectrum in values.items()
            ],
        )

    def _write(self, step: int, summaries: Sequence[Any]) -> None:
        for summary in summaries:
            self._file.write_event(self._make_event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


class WeightsAndBiases(Tracker):
    """Logs to Weights & Biases, by the user's own settings: ``WANDB_MODE=offline`` keeps it on this disk."""

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Begin a run, or continue the one of this folder."""
        with needs_extra("svb_jax.training.WeightsAndBiases", "wandb"):
            import wandb
        name = "-".join(run_dir.parts[-4:])
        self._histogram = wandb.Histogram
        settings = {"project": "svb_jax", "name": name, "config": dict(config)}
        self._run = wandb.init(id=_identifier(run_dir), resume="allow", dir=run_dir, **settings)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of an epoch."""
        self._run.log(dict(values), step=step)

    def spectrum(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Log a histogram per matrix, as ``spectrum/<path>``."""
        spectra = {
            f"spectrum/{path}": self._histogram(np.ravel(spectrum).tolist())
            for path, spectrum in values.items()
        }
        self._run.log(spectra, step=step)

    def finish(self) -> None:
        """Wait until everything is sent, or on disk."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """Make trackers by name: ``jsonl``, ``tensorboard``, ``wandb``, or ``module:Class`` for one of your own.

    Modules are found on ``sys.path`` and in the working directory.

    Raises:
      ValueError: There is no such tracker, or it cannot be imported or made.

    Example:
      >>> [type(tracker).__name__ for tracker in make_trackers(["jsonl", "tensorboard"])]
      ['TensorBoard']
    """
    # metrics.jsonl is part of the run's folder, whether asked for or not.
    return [_make(name) for name in names if name != "jsonl"]


def _make(name: str) -> Tracker:
    if name in TRACKERS:
        return TRACKERS[name]()
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        hint = did_you_mean(name, TRACKERS)
        raise ValueError(f"A tracker is jsonl, {', '.join(TRACKERS)} or module:Class, got {name!r}.{hint}")
    # A console script does not look where it was started. At the end: a user's file must not hide a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # A module and a class of the user's may raise anything.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"Tracker {name!r}: {module_name} cannot be imported: {_told(error)}") from error
    if not hasattr(module, class_name):
        raise ValueError(f"Tracker {name!r}: {_place(module)} has no class {class_name}.")
    try:
        return getattr(module, class_name)()
    except Exception as error:
        raise ValueError(f"Tracker {name!r}: {class_name}() failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _place(module: ModuleType) -> str:
    return f"{module.__name__} ({getattr(module, '__file__', None) or 'built in'})"


class SafeTrackers(Tracker):
    """Calls trackers one after the other; reports each that fails, and drops it.

    Args:
      trackers: Those to call.
      say: Shows a sentence to the user.
    """

    def __init__(self, trackers: Sequence[Tracker], say: Callable[[str], None]):
        self._trackers, self._say = list(trackers), say

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Start all."""
        self._call("start", config, run_dir)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Hand on the numbers that are known and finite."""
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._call("scalars", step, known)

    def spectrum(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Hand the singular values on."""
        self._call("spectrum", step, values)

    def finish(self) -> None:
        """Finish all."""
        self._call("finish")

    def _call(self, method: str, *arguments: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except KeyboardInterrupt:
                raise
            # Whatever else a library or a user's own class raises, sys.exit() too: training matters more.
            except BaseException as error:
                self._trackers.remove(tracker)
                self._say(f"{type(tracker).__name__} failed and is dropped: {_told(error)}")


@contextlib.contextmanager
def tracking(
    trackers: Sequence[Tracker], config: Mapping[str, Any], run_dir: Path, say: Callable[[str], None]
) -> Iterator[SafeTrackers]:
    """Start trackers, and finish them however the run ends."""
    safe = SafeTrackers(trackers, say)
    safe.start(config, run_dir)
    try:
        yield safe
    finally:
        safe.finish()


def _identifier(run_dir: Path) -> str:
    """Return a name that is the same when the run continues."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
