"""Saves checkpoints in the background, by Orbax, and keeps the newest ones and the best."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from svb_jax.training.checkpoint import (
    CheckpointError,
    Notes,
    alone,
    arrays_handler,
    checksum,
    first_line,
    load_notes,
    name_of,
    saved_steps,
    system_error,
)
from svb_jax.training.durable import remove
from svb_jax.training.parallel import fetch

OUTDATED = "outdated"
"""Where a checkpoint that is no longer kept goes before it is removed: a kill while its files go one by one
would otherwise leave half of it under its own name."""


class Checkpoints:
    """Saves the newest states and the best one, in the background, each whole or not at all.

    The state is the same on all hosts, and the first one alone saves it. Orbax's own way, where all hosts
    meet at the end of every save, would let a host whose disk is full wait for the others, and they for it.

    Args:
      folder: The run's ``checkpoints``.
      keep: How many of the newest to keep.
      config: The run's configuration, noted in each of them.
      data: The digest of its images and labels, noted as well.
    """

    def __init__(
        self, folder: Path, keep: int, config: Mapping[str, Any] | None = None, data: str | None = None
    ):
        self.folder = folder.absolute()
        self._config, self._data = config or {}, data
        self._manager = self._open(keep) if jax.process_index() == 0 else None

    def _open(self, keep: int) -> ocp.CheckpointManager:
        self._kept = _NewestAndBest(keep, _saved_errors(self.folder))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            todelete_subdir=OUTDATED,
            cleanup_tmp_directories=True,
            multiprocessing_options=alone(),
            # Orbax creates the folder only if all hosts take part.
            create=False,
            # In the background its threads would wait five minutes for folders that cannot be made.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self.folder, options=options, handler_registry=_make_handlers())

    def save(
        self,
        state: Any,
        *,
        seconds: float,
        test_error: float | None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start to save a state under its own step; what is on the devices may change at once.

        Args:
          state: A ``TrainState``, replicated on the devices.
          seconds: How long the run has taken.
          test_error: Its test error, if it was evaluated.
          history: The metrics of every epoch so far.

        Raises:
          FloatingPointError: The parameters are not finite; nothing is saved.
          CheckpointError: This or the last save failed; older checkpoints are untouched.
        """
        arrays = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(fetch(state))}
        step = int(arrays["step"])
        for name, array in arrays.items():
            if name.startswith("params/") and not np.isfinite(array).all():
                raise FloatingPointError(f"{name} is not finite after step {step}")
        if self._manager is None:
            return
        notes = Notes(
            seconds=seconds,
            test_error=test_error,
            config=self._config,
            history=list(history),
            checksums={name: checksum(array) for name, array in arrays.items()},
            data=self._data,
        )
        self._kept.errors[step] = test_error
        items = {"state": ocp.args.PyTreeSave(arrays), "meta": ocp.args.JsonSave(notes.to_json())}
        with self._explained():
            self._manager.wait_until_finished()
            self._remove_outdated()
            self._manager.save(step, args=ocp.args.Composite(**items))

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
            self._remove_outdated()

    def _remove_outdated(self) -> None:
        # Orbax would follow a link, and fail at a file, that someone has put there.
        with contextlib.suppress(OSError):
            remove(self.folder / OUTDATED)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failed save into a sentence that says what is left."""
        try:
            yield
        except Exception as error:
            newest = max(saved_steps(self.folder), default=None)
            left = "There is no older one" if newest is None else f"The newest whole one is of step {newest}"
            raise CheckpointError(
                f"A checkpoint could not be saved in {self.folder}: {_reason(error)}. {left}. Once there "
                "is room again, the same command continues from there."
            ) from error


def _reason(error: Exception) -> str:
    """Return why a save failed: what the system said, which TensorStore tells last, behind long paths."""
    code = system_error(error)
    return first_line(error) if code is None else os.strerror(code)


class _NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest checkpoints, and the one with the lowest test error, whichever process saved it.

    Orbax's own policy knows the errors of its own process only, and after a restart drops the best.
    """

    def __init__(self, keep: int, errors: dict[int, float | None]):
        self._keep = keep
        self.errors = errors
        """The test error of each step's checkpoint, if it was evaluated."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint, oldest first, whether it stays."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        known = {step: error for step in steps if (error := self.errors.get(step)) is not None}
        kept = {*steps[-self._keep :], *([min(known, key=known.__getitem__)] if known else [])}
        return [step in kept for step in steps]


def _saved_errors(folder: Path) -> dict[int, float | None]:
    errors = {}
    for step in saved_steps(folder):
        # A damaged one is noticed, and said to be, by whoever wants to continue from it.
        with contextlib.suppress(CheckpointError):
            errors[step] = load_notes(folder / str(step)).test_error
    return errors


def _make_handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Return what writes a checkpoint's arrays and its sums."""
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.PyTreeSave, arrays_handler())
    handlers.add("meta", ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=alone()))
    return handlers
