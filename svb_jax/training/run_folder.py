"""A run's folder: its configuration, its metrics, its result and its spectrum."""

import io
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np

from svb_jax._src.npz import load_npz
from svb_jax._src.regular_files import read_regular
from svb_jax.training.checkpoint import CheckpointError, load_notes, saved_steps
from svb_jax.training.cifar_binary import Origin
from svb_jax.training.config import TrainConfig, describe, differences, to_fields
from svb_jax.training.durable import (
    DAMAGED,
    RUN_FILES,
    altered,
    check_folder,
    naming,
    set_aside,
    write_sums,
    write_whole,
)


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
    data_origin: Origin | None = None
    """Whether the data set is the official one, a modified one, or one that could not be verified."""


class RunFolder:
    """The files of one run; on many hosts, only the first one writes."""

    def __init__(self, config: TrainConfig):
        self.path = config.run_dir
        self.checkpoints = self.path / "checkpoints"
        self.config = config
        self.is_writer = jax.process_index() == 0
        self._spectra: dict[str, np.ndarray] = {}
        """What belongs into ``spectrum.npz``, which something may damage while the run goes on."""

    def check(self) -> None:
        """Check that a run which the folder may hold is this one.

        Raises:
          ValueError: It is another one; the message names the fields that differ. Or Orbax would
            misread the folder's path.
          NotADirectoryError: There is something else in place of one of its folders.
        """
        # Orbax looks for files by patterns, and TensorStore takes a backslash for a slash: both would leave
        # checkpoints that nobody can read.
        path = str(self.path.absolute())
        if set("*?[\\") & set(path):
            raise ValueError(
                rf"train needs a run_dir without *, ?, [ and \ in its path, for Orbax, got {path!r}. "
                "A link to the folder will do."
            )
        for folder in (self.path, self.checkpoints, self.path / DAMAGED):
            check_folder(folder)
        found = _read_object(self.path / "config.json")
        if found and "run_dir" not in found and not saved_steps(self.checkpoints):
            raise ValueError(
                f"train needs a run_dir of its own, got {self.path}, whose config.json is of something else."
            )
        self.check_config(self._saved_config())

    def check_config(self, saved: Mapping[str, Any]) -> None:
        """Check that a configuration which was found in the folder is this run's.

        Args:
          saved: The fields of what was found; none if nothing was.

        Raises:
          ValueError: It is another one; the message names the fields that differ.
        """
        different = differences(saved, to_fields(self.config)) if saved else {}
        if different:
            raise ValueError(
                f"train cannot continue the run in {self.path} with another configuration: it has "
                f"{describe(different)}. Ask for what it has, or give another run_dir."
            )

    def create(self) -> None:
        """Create the folder and write ``config.json``."""
        if self.is_writer:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write("config.json", _to_json(to_fields(self.config)))

    def result(self) -> Result | None:
        """Return the result, if the run is complete and none of its files was altered since."""
        return None if altered(self.path, RUN_FILES) else self._read_result()

    def set_damaged_aside(self, say: Callable[[str], None]) -> None:
        """Make room for the files of a complete run that something has damaged; they are made anew.

        Args:
          say: Told of each of them.

        Raises:
          CheckpointError: There is no checkpoint to make them anew from.
        """
        if not (self.path / "result.json").exists() or self.result() is not None:
            return
        damaged = altered(self.path, RUN_FILES) or ["result.json"]
        if not saved_steps(self.checkpoints):
            raise CheckpointError(
                f"{', '.join(damaged)} in {self.path} is damaged, and there is no checkpoint to make it anew "
                "from. Move the folder away to start over."
            )
        # With the result goes the claim that the run is complete, until all is made anew.
        for name in (name for name in RUN_FILES if name in damaged or name == "result.json"):
            if self.is_writer and (self.path / name).exists():
                place = set_aside(self.path / name, self.path)
                reason = "is damaged, and is made anew" if name in damaged else "is made anew with them"
                say(f"{self.path / name} {reason}; the old one is now {place}.")

    def write_result(self, result: Result) -> None:
        """Write ``result.json``: from here on, the run is complete."""
        if self.is_writer:
            # What somebody has edited meanwhile is not what was run.
            self.create()
            content = _to_json(asdict(result))
            others = {name: (self.path / name).read_bytes() for name in RUN_FILES if name != "result.json"}
            # The sums first: a result without them would be one that nobody can check.
            write_sums(self.path, {**others, "result.json": content})
            self._write("result.json", content)

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``, and wait until it is on disk."""
        if self.is_writer:
            path = self.path / "metrics.jsonl"
            with naming(path), path.open("ab") as file:
                file.write(_to_line(line))
                file.flush()
                os.fsync(file.fileno())

    def restore_metrics(self, history: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> None:
        """Let ``metrics.jsonl`` hold exactly what the run knows: it will write the rest again.

        Args:
          history: The metrics of the epochs so far.
          say: Told if the file has lost or altered any of them.
        """
        if not self.is_writer:
            return
        path, content = self.path / "metrics.jsonl", b"".join(map(_to_line, history))
        if history and not (path.is_file() and path.read_bytes().startswith(content)):
            say(f"{path} is damaged or gone, and is made anew.")
            if path.exists():
                set_aside(path, self.path)
        self._write("metrics.jsonl", content)

    def has_spectrum(self, when: str) -> bool:
        """Return whether ``spectrum.npz`` can be read and holds this moment."""
        self._spectra = self._read_spectra()
        return any(name.startswith(f"{when}/") for name in self._spectra)

    def add_spectrum(self, when: str, values: Mapping[str, np.ndarray]) -> None:
        """Write each matrix's singular values to ``spectrum.npz``, beside those of other moments."""
        if self.is_writer:
            self._spectra |= {f"{when}/{path}": np.asarray(array) for path, array in values.items()}
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **self._spectra)
            self._write("spectrum.npz", content.getvalue())

    def _read_spectra(self) -> dict[str, np.ndarray]:
        try:
            return load_npz(self.path / "spectrum.npz")
        except (FileNotFoundError, ValueError):
            return {}

    def _saved_config(self) -> Mapping[str, Any]:
        """Return what the newest checkpoint says, whose notes have a sum; or else config.json."""
        for step in reversed(saved_steps(self.checkpoints)):
            try:
                return load_notes(self.checkpoints / str(step)).config
            except CheckpointError:
                continue
        # Without a checkpoint or a result there is nothing to continue, nor to lose.
        return _read_object(self.path / "config.json") if self._read_result() else {}

    def _read_result(self) -> Result | None:
        try:
            result = Result(**_read_object(self.path / "result.json"))
        except TypeError:
            return None
        hints = get_type_hints(Result)
        return result if all(_fits(value, hints[name]) for name, value in vars(result).items()) else None

    def _write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, an empty one if it does not."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON is what a field is declared to be."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, one) for one in get_args(hint))
    # JSON writes a whole float as an integer, and in Python a boolean is one.
    return isinstance(value, int | float if hint is float else hint) and not isinstance(value, bool)


def _to_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def _to_line(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields) + "\n").encode()


def describe_hardware(devices: Sequence[Any]) -> str:
    """Return the devices in words, such as ``2 x TPU v4`` or ``1 x cpu (x86_64, 2 cores)``."""
    kind = devices[0].device_kind
    words = f"{len(devices)} x {kind}"
    cores = _num_cores()
    return f"{words} ({platform.machine()}, {cores} core{'s' * (cores != 1)})" if kind == "cpu" else words


def _num_cores() -> int | None:
    """Return how many cores this process may use: XLA splits sums among them, so they change the rounding."""
    # macOS and Windows do not tell.
    usable = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() if usable is None else len(usable(0))


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
