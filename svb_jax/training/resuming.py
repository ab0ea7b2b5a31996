"""What a run finds in its folder, and how it makes the folder its own."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from svb_jax.training.checkpoint import Checkpoint, CheckpointError, load_newest, load_notes, saved_steps
from svb_jax.training.durable import set_aside
from svb_jax.training.lock import locked
from svb_jax.training.run_folder import RunFolder


@contextlib.contextmanager
def owned(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes out of the folder, and look once more what the last one has left there.

    Args:
      folder: The run's.
      say: Told of what is damaged, and of a file system without locks.

    Raises:
      FolderInUse: Another process has it.
      ValueError: It holds another run.
    """
    if not folder.is_writer:
        yield
        return
    with locked(folder.path) as is_locked:
        if not is_locked:
            say(f"The file system of {folder.path} has no locks: start no second run there.")
        folder.check()
        folder.set_damaged_aside(say)
        yield


def find_start(folder: RunFolder, data: str | None, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint, if any, and set newer ones aside, which are damaged.

    Args:
      folder: The run's.
      data: The digest of the images and labels, if it is known.
      say: Told of what was found.

    Returns:
      The checkpoint; None if there is none at all.

    Raises:
      CheckpointError: There are checkpoints, and not one is whole.
      ValueError: The newest whole one is that of another run, or was trained on other images or labels.
    """
    start, damaged = load_newest(folder.checkpoints)
    if folder.is_writer:
        for step, reason in (damaged | _damaged_notes(folder.checkpoints, damaged)).items():
            place = set_aside(folder.checkpoints / str(step), folder.path)
            say(f"The checkpoint of step {step} {reason}; it is now in {place}.")
    if start is not None:
        # The folder's check has read that of the newest, which may be damaged elsewhere.
        folder.check_config(start.notes.config)
        _check_data(folder, start.notes.data, data)
        say(f"Continuing the run in {folder.path} from step {start.step}.")
    return start


def _damaged_notes(checkpoints: Path, known: Collection[int]) -> dict[int, str]:
    """Return what is wrong with the notes of the others: without its error, the best would not be kept."""
    damaged = {}
    for step in saved_steps(checkpoints):
        try:
            if step not in known:
                load_notes(checkpoints / str(step))
        except CheckpointError as error:
            damaged[step] = str(error)
    return damaged


def _check_data(folder: RunFolder, saved: str | None, data: str | None) -> None:
    if None not in (saved, data) and saved != data:
        config = folder.config
        raise ValueError(
            f"train cannot continue the run in {folder.path} on other images or labels: the {config.dataset} "
            f"in {config.data_dir} is not the one that it began with. Bring that back, or give another "
            "run_dir."
        )
