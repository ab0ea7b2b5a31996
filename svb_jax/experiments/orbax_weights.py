"""Reads the arrays of an Orbax checkpoint, whoever saved it and on whatever devices."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from svb_jax._src.regular_files import read_regular
from svb_jax.training.checkpoint import load_checkpoint, load_newest, saved_steps

ITEMS = ("default", "params", "state", "model")
"""What checkpoints of several items mostly call the one with the weights; ``default`` if it has no name."""


def read_folder(path: Path) -> Any:
    """Return the tree of arrays of a checkpoint; of the newest one, if the folder holds several."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if saved_steps(path):
        return _read_steps(path)
    return _read_step(path)


def _read_steps(path: Path) -> Any:
    steps = saved_steps(path)
    if not _is_ours(path / str(steps[-1])):
        return _read_step(path / str(steps[-1]))
    newest, _ = load_newest(path)
    return {} if newest is None else newest.arrays


def _read_step(path: Path) -> Any:
    if _is_ours(path):
        return load_checkpoint(path).arrays
    if _has_arrays(path):
        return _restore(path.absolute())
    items = sorted(item for item in path.iterdir() if _has_arrays(item))
    usual = [path / name for name in ITEMS if path / name in items]
    if usual or len(items) == 1:
        return _restore((usual or items)[0].absolute())
    if items:
        names = ", ".join(str(item) for item in items)
        raise FileNotFoundError(f"it holds several checkpoints; name one of them: {names}")
    found = ", ".join(sorted(item.name for item in path.iterdir())[:10])
    if not found:
        raise FileNotFoundError("it is empty")
    raise FileNotFoundError(f"it holds no safetensors, no Orbax checkpoint and no run, but {found}")


def _has_arrays(path: Path) -> bool:
    return (path / "_METADATA").is_file()


def _is_ours(path: Path) -> bool:
    """Return whether ``svb train`` saved this checkpoint, with the sums by which it is checked."""
    notes = path / "meta" / "metadata"
    if not (notes.is_file() and (path / "state").is_dir()):
        return False
    try:
        saved = json.loads(read_regular(notes))
    except (OSError, ValueError, RecursionError):
        # Perhaps ours, damaged.
        return True
    # Others call their items state and meta too.
    return isinstance(saved, dict) and saved.keys() >= {"checksum", "notes"}


def _restore(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        # As NumPy arrays: the devices that they were saved on may not be here.
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, restore_args=plain)
