"""Parts of a training run: its bare step, its input pipeline, its evaluation, and whole epochs of it."""

import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.workload import Task, Workload
from svb_jax.training import TrainConfig, train
from svb_jax.training.session import Session

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


def evaluation(task: Task) -> Workload:
    """The evaluation that ends an epoch."""
    session = _session(json.dumps(task))
    state = session.engine.replicate(session.initial_state())
    return Workload(
        lambda _: session.evaluate(state.params, state.batch_stats),
        facts={"steps": session.span.steps_per_epoch},
    )


def epoch(task: Task) -> Workload:
    """An epoch of ``train``: from its first step to the next epoch's, checkpoint and evaluation included."""
    folder = Path(task["folder"])

    def run(run_dir: Path) -> float:
        train(_config(task, run_dir))
        # A run notes when each epoch's evaluation ends: from one to the next is all that an epoch takes.
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        first, *_, last = [json.loads(line)["seconds"] for line in lines]
        return (last - first) / (EPOCHS - 1)

    return Workload(
        run,
        fresh=lambda: Path(tempfile.mkdtemp(dir=folder)),
        facts={"steps": _session(json.dumps(task)).span.steps_per_epoch},
        seconds=float,
    )


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
