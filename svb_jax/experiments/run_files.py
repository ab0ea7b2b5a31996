"""The files of a run that trains in one go: those of ``svb_jax.training.train``, without checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from svb_jax.experiments.experiment import RunConfig
from svb_jax.training.run_folder import current_commit, describe_hardware


def write_run(
    config: RunConfig,
    entries: Sequence[Mapping[str, Any]],
    spectrum: Mapping[str, Any],
    result: Mapping[str, Any],
) -> None:
    """Write ``config.json``, ``metrics.jsonl``, ``spectrum.npz`` and, last, ``result.json``.

    Args:
      config: the run.
      entries: one line an epoch.
      spectrum: singular values by ``initial/<path>`` and ``final/<path>``.
      result: what came out; hardware, jax's version and the commit are added.
    """
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(config), default=str, indent=2) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    np.savez_compressed(folder / "spectrum.npz", **spectrum)
    origin = {
        "hardware": describe_hardware(jax.devices()[:1]),
        "jax": jax.__version__,
        "commit": current_commit(),
    }
    # The result comes last: its presence says that the run is complete.
    (folder / "result.json").write_text(json.dumps({**result, **origin}) + "\n")
