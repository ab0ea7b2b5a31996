"""Checkpoints that are whole or not used: saved by Orbax in the background, checked by our own sums."""

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from svb_jax.training.parallel import fetch


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or none that could be read."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a step."""

    step: int
    arrays: dict[str, np.ndarray]
    """Every leaf of the state by its path, such as ``params/conv_1/kernel``."""
    seconds: float
    """How long the run had taken."""

    def fill(self, like: Any) -> Any:
        """Return a state of the same structure as ``like``, with the saved arrays."""
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [_name(path) for path, _ in paths]
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
    """
    try:
        meta = json.loads((folder / "meta" / "metadata").read_text())
        arrays = _read_arrays(folder / "state")
        sums = {name: _checksum(array) for name, array in arrays.items()}
    # Orbax meets damage with whatever its layers raise: ValueError, KeyError, OSError, bare Exception.
    except Exception as error:
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {_first_line(error)})") from error
    if sums != meta["checksums"]:
        odd = [name for name, value in meta["checksums"].items() if sums.get(name) != value]
        raise CheckpointError(f"is damaged (wrong checksum: {', '.join(odd[:3]) or 'unknown arrays'})")
    return Checkpoint(int(folder.name), arrays, meta["seconds"])


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
            newest = load_checkpoint(folder / str(step))
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


def set_aside(folder: Path, step: int) -> Path:
    """Move a damaged checkpoint out of the way, so that its step can be saved again; return where to."""
    target = folder.parent / "damaged" / str(step)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    (folder / str(step)).rename(target)
    return target


class Checkpoints:
    """Saves the newest states and the best one, in the background, each whole or not at all.

    The state is the same on all hosts, and the first one alone saves it. Orbax's own way, where all hosts
    meet at the end of every save, would let a host whose disk is full wait for the others, and they for it.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder.absolute()
        self._manager = self._open(keep) if jax.process_index() == 0 else None

    def _open(self, keep: int) -> ocp.CheckpointManager:
        policy = ocp.checkpoint_managers
        best = policy.BestN(
            get_metric_fn=lambda metrics: metrics["test_error"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy([policy.LatestN(keep), best]),
            cleanup_tmp_directories=True,
            multiprocessing_options=_alone(),
            # Orbax creates the folder only if all hosts take part.
            create=False,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self.folder, options=options, handler_registry=_make_handlers())

    def save(self, state: Any, *, seconds: float, test_error: float | None) -> None:
        """Start to save a state under its own step; what is on the devices may change at once.

        Args:
          state: A ``TrainState``, replicated on the devices.
          seconds: How long the run has taken.
          test_error: Its test error, if it was evaluated.

        Raises:
          FloatingPointError: The parameters are not finite; nothing is saved.
          CheckpointError: This or the last save failed; older checkpoints are untouched.
        """
        arrays = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(fetch(state))}
        step = int(arrays["step"])
        for name, array in arrays.items():
            if name.startswith("params/") and not np.isfinite(array).all():
                raise FloatingPointError(f"{name} is not finite after step {step}")
        if self._manager is None:
            return
        meta = {"seconds": seconds, "checksums": {name: _checksum(a) for name, a in arrays.items()}}
        with self._explained():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)),
                metrics=None if test_error is None else {"test_error": test_error},
            )

    def wait(self) -> None:
        """Wait until everything is on disk.

        Raises:
          CheckpointError: The last save failed; older checkpoints are untouched.
        """
        if self._manager is not None:
            with self._explained():
                self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._manager is not None:
            # Another error is already on its way: one about closing must not hide it.
            with contextlib.suppress(Exception) if error_type else self._explained():
                self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failed save into a sentence that says what is left."""
        try:
            yield
        except Exception as error:
            newest = max(saved_steps(self.folder), default=None)
            left = "There is no older one" if newest is None else f"The newest whole one is of step {newest}"
            raise CheckpointError(
                f"A checkpoint could not be saved in {self.folder}: {_first_line(error)}. {left}. Once there "
                "is room again, the same command continues from there."
            ) from error


class _PatientWriter(ocp.type_handlers.NumpyHandler):
    """Writes arrays side by side, and lets all of them end before it reports that one failed.

    Orbax alone reports the first failure and closes the writes' event loop. Each write that ends later
    tells the closed loop so, in a traceback that Python prints because nobody can catch it.
    """

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        try:
            await super()._background_serialize(values, infos, args)
        finally:
            # The loop is this save's own: whatever else it runs are the other writes.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)


def _make_handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Return what writes a checkpoint's arrays and its sums."""
    # All arrays are NumPy's; Orbax warns of a registry that does not know JAX's.
    writer = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _PatientWriter()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=writer, multiprocessing_options=_alone())
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.PyTreeSave, arrays)
    handlers.add("meta", ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=_alone()))
    return handlers


def saved_steps(folder: Path) -> list[int]:
    """Return the steps that have a finished checkpoint in a run's ``checkpoints``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone())
    with ocp.Checkpointer(handler, multiprocessing_options=_alone()) as reader:
        return reader.restore(folder.absolute())


def _alone() -> ocp.options.MultiprocessingOptions:
    """Return the options of a host that waits for no other, which may have failed to read or write."""
    host = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=host, active_processes={host})


def _agree(folder: Path, newest: Checkpoint | None) -> Checkpoint | None:
    """Return the newest checkpoint that every host could read."""
    steps = multihost_utils.process_allgather(np.asarray(-1 if newest is None else newest.step))
    common = int(steps.min())
    if newest is None or newest.step == common:
        return newest
    return load_checkpoint(folder / str(common))


def _checksum(array: np.ndarray) -> str:
    array = np.ascontiguousarray(array)
    header = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(header + array.tobytes()).hexdigest()


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
