"""The files of a run that trains in one go: those of ``svb_jax.training.train``, without checkpoints."""

import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import jax
import numpy as np

from svb_jax.experiments.experiment import RunConfig
from svb_jax.training.durable import write_sums, write_whole
from svb_jax.training.lock import locked
from svb_jax.training.run_folder import current_commit, describe_hardware

Config = TypeVar("Config", bound=RunConfig)


def alone_in_its_folder(train: Callable[[Config], None]) -> Callable[[Config], None]:
    """Let a training keep every other process out of its run's folder while it lasts."""

    @functools.wraps(train)
    def train_alone(config: Config) -> None:
        with locked(config.run_dir):
            train(config)

    return train_alone


def write_run(
    config: RunConfig,
    entries: Sequence[Mapping[str, Any]],
    spectrum: Mapping[str, Any],
    result: Mapping[str, Any],
) -> None:
    """Write ``config.json``, ``metrics.jsonl``, ``spectrum.npz``, their sums and, last, ``result.json``.

    Args:
      config: The run.
      entries: One line an epoch.
      spectrum: Singular values by ``initial/<path>`` and ``final/<path>``.
      result: What came out; hardware, jax's version and the commit are added.
    """
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "hardware": describe_hardware(jax.devices()[:1]),
        "jax": jax.__version__,
        "commit": current_commit(),
    }
    arrays = io.BytesIO()
    np.savez_compressed(arrays, allow_pickle=False, **spectrum)
    contents = {
        "config.json": (json.dumps(asdict(config), default=str, indent=2) + "\n").encode(),
        "metrics.jsonl": "".join(json.dumps(entry) + "\n" for entry in entries).encode(),
        "spectrum.npz": arrays.getvalue(),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    completing = (json.dumps({**result, **origin}) + "\n").encode()
    write_sums(folder, {**contents, "result.json": completing})
    # The result comes last: its presence says that the run is complete.
    write_whole(folder / "result.json", completing)
