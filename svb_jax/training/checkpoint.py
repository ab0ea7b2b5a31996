"""Checkpoints that are whole or not used: read back, and checked by our own sums."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from svb_jax._src.regular_files import check_regular, read_regular

REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN),
)
"""What passes: no permission, too many open files, no memory, a file server that is away."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or none that could be read."""


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a checkpoint says beside its arrays."""

    seconds: float
    """How long the run had taken."""
    test_error: float | None
    """None if the state was not evaluated."""
    config: Mapping[str, Any]
    """The run's configuration, as in ``config.json``."""
    history: Sequence[Mapping[str, Any]]
    """The metrics of every epoch so far, as in ``metrics.jsonl``."""
    checksums: Mapping[str, str]
    """The SHA-256 of every array."""
    data: str | None = None
    """The SHA-256 of the images and labels; None if it was not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the notes with a sum of their own, so that no bit of them can change unseen."""
        return {"notes": vars(self), "checksum": _sum_of(vars(self))}


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a step."""

    step: int
    arrays: dict[str, np.ndarray]
    """Every leaf of the state by its path, such as ``params/conv_1/kernel``."""
    notes: Notes

    def fill(self, like: Any) -> Any:
        """Return a state of the same structure as ``like``, with the saved arrays."""
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [name_of(path) for path, _ in paths]
        if set(names) != set(self.arrays):
            odd = sorted(set(names) ^ set(self.arrays))
            raise CheckpointError(
                f"Step {self.step} was saved by another version: {', '.join(odd[:5])} do not match."
            )
        return jax.tree.unflatten(structure, [self.arrays[name] for name in names])


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint of one step and check every array of it.

    Args:
      folder: Such as ``runs/train/checkpoints/391``.

    Returns:
      The checkpoint.

    Raises:
      CheckpointError: A file is missing, cut or altered.
      OSError: The system lets nobody read it now; it may be whole.
      MemoryError: It does not fit into memory.
    """
    notes = load_notes(folder)
    try:
        arrays = _read_arrays(folder / "state")
        step = int(arrays["step"])
        sums = {name: checksum(array) for name, array in arrays.items()}
    # Orbax meets damage with whatever its layers raise: ValueError, KeyError, OSError, bare Exception.
    except Exception as error:
        _raise_refusal(error, folder)
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if sums != notes.checksums:
        odd = [name for name, value in notes.checksums.items() if sums.get(name) != value]
        raise CheckpointError(f"is damaged (wrong checksum: {', '.join(odd[:3]) or 'unknown arrays'})")
    return Checkpoint(step, arrays, notes)


def load_notes(folder: Path) -> Notes:
    """Read what a checkpoint says beside its arrays, which are left unread.

    Args:
      folder: Such as ``runs/train/checkpoints/391``.

    Returns:
      The notes.

    Raises:
      CheckpointError: They are missing, cut or altered, or from another version.
      OSError: The system lets nobody read them now; they may be whole.
    """
    try:
        saved = json.loads(read_regular(folder / "meta" / "metadata"))
        is_whole = saved["checksum"] == _sum_of(saved["notes"])
        notes = Notes(**saved["notes"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _raise_refusal(error, folder)
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if notes is None:
        raise CheckpointError("is damaged (wrong checksum: its notes)")
    return notes


def load_newest(folder: Path) -> tuple[Checkpoint | None, dict[int, str]]:
    """Read the newest whole checkpoint, the same one on every host.

    Args:
      folder: The run's ``checkpoints``.

    Returns:
      The checkpoint, None if there is none at all, and what is wrong with each newer one.

    Raises:
      CheckpointError: There are checkpoints, and not one is whole.
    """
    damaged: dict[int, str] = {}
    newest = None
    for step in reversed(saved_steps(folder)):
        try:
            newest = _load_step(folder, step)
            break
        except CheckpointError as error:
            damaged[step] = str(error)
    if jax.process_count() > 1:
        newest = _agree(folder, newest)
        common = -1 if newest is None else newest.step
        newer = [step for step in saved_steps(folder) if step > common]
        damaged = {step: damaged.get(step, "cannot be read by another host") for step in newer}
    if newest is None and damaged:
        reasons = "; ".join(f"step {step} {reason}" for step, reason in damaged.items())
        raise CheckpointError(
            f"No checkpoint in {folder} is whole: {reasons}. Move the folder away to start over."
        )
    return newest, damaged


def saved_steps(folder: Path) -> list[int]:
    """Return the steps that have a finished checkpoint in a run's ``checkpoints``, oldest first."""
    if not folder.is_dir():
        return []
    # Not 0012 or other digits than these: what is saved as 12 must be found as 12.
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))


def alone() -> ocp.options.MultiprocessingOptions:
    """Return the options of a host that waits for no other, which may have failed to read or write."""
    host = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=host, active_processes={host})


def checksum(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's type, shape and entries."""
    array = np.ascontiguousarray(array)
    header = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(header + array.tobytes()).hexdigest()


def name_of(path: Any) -> str:
    """Return a leaf's path in the state as one name."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def system_error(error: BaseException) -> int | None:
    """Return the system's own number of what went wrong, None if it was not the system."""
    if isinstance(error, OSError):
        return error.errno
    # TensorStore tells it behind long paths, in an error of another type.
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else None


def first_line(error: Exception) -> str:
    """Return the beginning of what an error says."""
    return str(error).strip().partition("\n")[0][:300]


def arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """Return what reads and writes a checkpoint's arrays."""
    # All arrays are NumPy's; Orbax warns of a registry that does not know JAX's.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _Patient()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=alone())


class _Patient(ocp.type_handlers.NumpyHandler):
    """Reads or writes arrays side by side, and lets all of them end before it reports that one failed.

    Orbax alone reports the first failure and closes the event loop of the others. Each that ends later
    tells the closed loop so, in a traceback that Python prints because nobody can catch it.
    """

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        async with _waiting():
            await super()._background_serialize(values, infos, args)

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Read arrays."""
        async with _waiting():
            return await super().deserialize(infos, args)


@contextlib.asynccontextmanager
async def _waiting() -> AsyncIterator[None]:
    """Wait in the end for every task that was begun meanwhile."""
    before = asyncio.all_tasks()
    try:
        yield
    finally:
        await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    # Unlike rglob, walk tells of folders that may not be listed; Orbax finds nothing in them.
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = Path(place, name)
            check_regular(path)
            path.open("rb").close()
    handler = arrays_handler()
    with ocp.Checkpointer(handler, multiprocessing_options=alone()) as reader:
        return reader.restore(folder.absolute())


def _raise(error: OSError) -> None:
    raise error


def _raise_refusal(error: Exception, folder: Path) -> None:
    """Raise what is no damage: a whole checkpoint must not be set aside, nor be given up, because of it."""
    if isinstance(error, MemoryError):
        raise error
    code = system_error(error)
    if code in REFUSALS:
        raise OSError(code, os.strerror(code), str(folder)) from error


def _agree(folder: Path, newest: Checkpoint | None) -> Checkpoint | None:
    """Return the newest checkpoint that every host could read."""
    steps = np.ravel(multihost_utils.process_allgather(np.asarray(-1 if newest is None else newest.step)))
    common = int(steps.min())
    if common < 0 <= steps.max():
        raise CheckpointError(
            f"Host {steps.argmin()} finds no whole checkpoint in {folder}, host {steps.argmax()} does. "
            "All hosts must see the same run_dir."
        )
    if newest is None or newest.step == common:
        return newest
    return _load_step(folder, common)


def _load_step(folder: Path, step: int) -> Checkpoint:
    checkpoint = load_checkpoint(folder / str(step))
    # Every sum is right in a folder that someone has renamed.
    if checkpoint.step != step:
        raise CheckpointError(f"is that of step {checkpoint.step}")
    return checkpoint


def _sum_of(notes: Any) -> str:
    return hashlib.sha256(json.dumps(notes, sort_keys=True).encode()).hexdigest()
