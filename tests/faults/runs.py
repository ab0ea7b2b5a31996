"""Small training runs: their options, and what must be true of them while they run and after."""

import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from svb_jax.training import TrainConfig
from svb_jax.training.checkpoint import load_newest, saved_steps

# No BatchNorm, no bounds, no convolution: a step that compiles in no time.
QUICK_OPTIONS = {
    "model": "deep_linear",
    "depth": 2,
    "epochs": 4,
    "learning_rate": 1e-5,
    "final_learning_rate": 1e-6,
    "learning_rate_stages": 2,
    "svb_epsilon": None,
    "bbn_epsilon": None,
}
QUICK = TrainConfig(**QUICK_OPTIONS, dataset="synthetic", image_size=8, first=64, batch_size=16, devices=1)

# A projection and four checkpoints an epoch: kills fall into every phase of a run.
OPTIONS = {
    "model": "convnet_8",
    "width": 0.125,
    "dataset": "synthetic",
    "image-size": 8,
    "first": 64,
    "batch-size": 16,
    "epochs": 12,
    "learning-rate": 0.05,
    "learning-rate-stages": 6,
    "svb-epsilon": 0.05,
    "bbn-epsilon": 0.05,
    "checkpoint-every-epochs": 0.25,
}


def to_words(run_dir: Path, options: Mapping[str, object]) -> list[str]:
    """Return the command line's words for a run with these options, the others as above."""
    chosen = OPTIONS | {name.replace("_", "-"): value for name, value in options.items()}
    return ["--run-dir", str(run_dir)] + [
        word for name, value in chosen.items() for word in (f"--{name}", str(value))
    ]


class Process(Protocol):
    """A run under way."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        ...


def wait_for_step(process: Process, run_dir: Path, step: int, timeout: float = 300) -> None:
    """Wait until a checkpoint of this step, or of a later one, is complete."""

    def is_saved() -> bool:
        return max(saved_steps(run_dir / "checkpoints"), default=-1) >= step

    wait_until(lambda: is_saved() or process.poll() is not None, timeout)
    if not is_saved():
        raise RuntimeError(f"The run ended with {process.poll()} before step {step}.")


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Wait for a condition, or raise after so many seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"Waited {timeout} s in vain.")
        time.sleep(0.02)


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Check that two finished runs are equal: every bit of the last state, and all metrics but the times."""
    ends = [load_newest(folder / "checkpoints")[0] for folder in (run_dir, reference)]
    arrays = [end.arrays for end in ends if end is not None]
    assert len(arrays) == 2
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][name], err_msg=name)
        assert array.dtype == arrays[1][name].dtype
    assert timeless(run_dir / "metrics.jsonl") == timeless(reference / "metrics.jsonl")


def timeless(metrics: Path) -> str:
    """Return a run's metrics without the times in them."""
    return re.sub(r'"(seconds|images_per_second)": [^,}]+', "", metrics.read_text())


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
