"""A run's folder: its configuration, its metrics, its result and its spectrum."""

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from svb_jax.training.checkpoint import saved_steps
from svb_jax.training.config import TrainConfig, differences, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a complete run leaves in ``result.json``; errors in percent."""

    test_error: float
    """As trained, after the last step."""
    test_error_projected: float | None
    """After one more projection by the run's own bounds; None without SVB."""
    best_test_error: float
    """The lowest over all epochs: chosen on the test set, as the paper does."""
    test_error_top5: float
    train_error: float
    seconds: float
    steps: int
    parameters: int
    images_per_second: float | None
    """The mean over the epochs; None if they are too short to tell."""
    hardware: str
    jax: str
    commit: str | None


class RunFolder:
    """The files of one run; on many hosts, only the first one writes."""

    def __init__(self, config: TrainConfig):
        self.path = config.run_dir
        self.checkpoints = self.path / "checkpoints"
        self.config = config
        self.is_writer = jax.process_index() == 0

    def check(self) -> None:
        """Check that a run which the folder may hold is this one.

        Raises:
          ValueError: It is another one; the message names the fields that differ.
        """
        saved = self.path / "config.json"
        # With nothing saved there is nothing to continue, nor to lose.
        if not saved.exists() or not (saved_steps(self.checkpoints) or self.result()):
            return
        different = differences(from_json(saved.read_text()), self.config)
        if different:
            fields = ", ".join(f"{name}={old!r}, not {new!r}" for name, (old, new) in different.items())
            raise ValueError(
                f"train cannot continue the run in {self.path} with another configuration: it has {fields}. "
                "Ask for what it has, or give another run_dir."
            )

    def create(self) -> None:
        """Create the folder and write ``config.json``."""
        if self.is_writer:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write("config.json", to_json(self.config).encode())

    def result(self) -> Result | None:
        """Return the result, if the run is complete."""
        file = self.path / "result.json"
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def write_result(self, result: Result) -> None:
        """Write ``result.json``: from here on, the run is complete."""
        if self.is_writer:
            self._write("result.json", (json.dumps(asdict(result), indent=2) + "\n").encode())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, up to the first one that a crash cut short."""
        lines = []
        file = self.path / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return lines

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``, and wait until it is on disk."""
        if self.is_writer:
            path = self.path / "metrics.jsonl"
            with _named(path), path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def rewind_metrics(self, step: int) -> None:
        """Forget the lines after a step: the run will write them again."""
        if self.is_writer:
            kept = [line for line in self.metrics() if line["step"] <= step]
            self._write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())

    def add_spectrum(self, when: str, values: dict[str, np.ndarray]) -> None:
        """Write each matrix's singular values to ``spectrum.npz``, beside those of other moments."""
        if self.is_writer:
            file = self.path / "spectrum.npz"
            others = dict(np.load(file)) if file.exists() else {}
            new = {f"{when}/{path}": np.asarray(array) for path, array in values.items()}
            partial = file.with_suffix(".partial.npz")
            with _named(file):
                np.savez_compressed(partial, **{**others, **new})
            partial.replace(file)

    def _write(self, name: str, content: bytes) -> None:
        """Write a file so that a crash leaves the old one or the new one, never half of one."""
        partial = self.path / f"{name}.partial"
        with _named(self.path / name), partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / name)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in a failure to write it: the system says no more than that some disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise


def describe_hardware(devices: Sequence[Any]) -> str:
    """Return the devices in words, such as ``2 x TPU v4`` or ``1 x cpu (x86_64, 2 cores)``."""
    kind = devices[0].device_kind
    words = f"{len(devices)} x {kind}"
    return f"{words} ({platform.machine()}, {os.cpu_count()} cores)" if kind == "cpu" else words


def current_commit() -> str | None:
    """Return the commit that this package runs from, marked if files differ; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
