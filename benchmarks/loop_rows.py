"""Parts of a training run: its bare step, its input pipeline, and the loop around them."""

import contextlib
import functools
import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import jax

from benchmarks.workload import Task, Workload
from svb_jax.training import TrainConfig, train
from svb_jax.training.progress import Display
from svb_jax.training.saving import Checkpoints
from svb_jax.training.session import Session
from svb_jax.training.state import TrainState
from svb_jax.training.step import Batch, Report

EPOCHS = 2
"""Epochs of a run, of which the first is not counted: it compiles."""


def step(task: Task) -> Workload:
    """One step on a batch that lies ready in the host's memory, until it is finished."""
    session = _session(json.dumps(task))
    batch = next(session.feed.train(0))
    state = session.engine.replicate(session.initial_state())

    def run(_: None) -> None:
        # Each step takes the state of the one before, whose memory it uses.
        nonlocal state
        state, _report = session.step(state, batch, stop=False)
        jax.block_until_ready(state)

    return Workload(run, facts={"steps": 1})


def feed(task: Task) -> Workload:
    """The batches of an epoch: drawn, gathered and handed to the devices."""
    session = _session(json.dumps(task))
    steps = session.span.steps_per_epoch
    batches = session.feed.train(0)

    def run(_: None) -> None:
        for batch in itertools.islice(batches, steps):
            jax.block_until_ready(session.engine.shard(batch))

    return Workload(run, facts={"steps": steps})


def around(task: Task) -> Workload:
    """All that ``train`` does in an epoch beside its steps and its evaluation.

    Each step is waited for, and so is the checkpoint: a run goes on meanwhile, so this is the most it can be.
    """
    folder = Path(task["folder"])

    def run(run_dir: Path) -> float:
        parts = {"Session": _WatchedSession, "Checkpoints": _WaitingCheckpoints, "Display": _display_bar}
        with mock.patch.multiple("svb_jax.training.loop", **parts):
            train(_config(task, run_dir))
        first, second = _WatchedSession.epochs
        return (second.end - first.end) - (second.inside - first.inside)

    return Workload(
        run,
        fresh=lambda: Path(tempfile.mkdtemp(dir=folder)),
        facts={"steps": _session(json.dumps(task)).span.steps_per_epoch},
        seconds=float,
    )


class _Epoch(NamedTuple):
    end: float
    """When its evaluation ended."""
    inside: float
    """The seconds so far inside steps and evaluations."""


class _WatchedSession(Session):
    epochs: ClassVar[list[_Epoch]]
    """Of the newest session."""

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self._inside = 0.0
        _WatchedSession.epochs = []

    def step(self, state: TrainState, batch: Batch, stop: bool) -> tuple[TrainState, Report]:
        with self._watch():
            return jax.block_until_ready(super().step(state, batch, stop))

    def evaluate(self, params: Any, batch_stats: Any) -> dict[str, float]:
        with self._watch():
            errors = super().evaluate(params, batch_stats)
        self.epochs.append(_Epoch(time.perf_counter(), self._inside))
        return errors

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._inside += time.perf_counter() - begin


class _WaitingCheckpoints(Checkpoints):
    def save(self, state: TrainState, **notes: Any) -> None:
        super().save(state, **notes)
        self.wait()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _display_bar(total_steps: int, steps_per_epoch: int) -> Display:
    return Display(total_steps, steps_per_epoch, file=_Terminal())


# Rows of the same run share it: compiling takes longer than all that is measured.
@functools.lru_cache(maxsize=2)
def _session(task: str) -> Session:
    fields = json.loads(task)
    return Session(_config(fields, Path(fields["folder"])))


def _config(task: Task, run_dir: Path) -> TrainConfig:
    fields: dict[str, Any] = {name: value for name, value in task.items() if name != "folder"}
    fields["data_dir"] = Path(fields["data_dir"])
    # Numbers so small that no network diverges: they do not change the time.
    rates = {"learning_rate": 1e-6, "final_learning_rate": 1e-6}
    return TrainConfig(epochs=EPOCHS, devices=1, run_dir=run_dir, **rates, **fields)
