"""Small training runs as processes, to be stopped, continued and compared."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from svb_jax.training.checkpoint import load_newest, saved_steps

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


def start(run_dir: Path, **options: object) -> subprocess.Popen[str]:
    """Start a run, or continue it."""
    chosen = OPTIONS | {name.replace("_", "-"): value for name, value in options.items()}
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "experiments", "train", "--run-dir", str(run_dir), *words]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish_in_peace(folder: Path, **options: object) -> Path:
    """Run to the end what nothing happens to, and return its folder."""
    finish(start(folder / "peace", **options))
    return folder / "peace"


def finish(process: subprocess.Popen[str], timeout: float = 300) -> str:
    """Wait for a run to end well, and return what it said."""
    output, _ = process.communicate(timeout=timeout)
    if process.returncode != 0:
        raise RuntimeError(f"The run ended with {process.returncode}:\n{output}")
    return output


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout: float = 300) -> None:
    """Wait until a checkpoint of this step, or of a later one, is complete."""

    def is_saved() -> bool:
        return max(saved_steps(run_dir / "checkpoints"), default=-1) >= step

    wait_until(lambda: is_saved() or process.poll() is not None, timeout)
    if not is_saved():
        raise RuntimeError(f"The run ended before step {step}:\n{finish(process)}")


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
    assert _timeless(run_dir / "metrics.jsonl") == _timeless(reference / "metrics.jsonl")


def _timeless(metrics: Path) -> str:
    return re.sub(r'"(seconds|images_per_second)": [^,}]+', "", metrics.read_text())


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
