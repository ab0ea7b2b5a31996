"""Files that are written whole or not at all, and set aside when something has damaged them since."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from svb_jax._src.regular_files import read_regular

SUMS = "SHA256SUMS"
"""The sums of a folder's files, in the form that ``sha256sum --check`` reads."""
DAMAGED = "damaged"
"""The folder of a run that damaged files are moved to."""
RUN_FILES = ("config.json", "metrics.jsonl", "spectrum.npz", "result.json")
"""What a complete run has beside its checkpoints, from the newest of which all of it can be made anew."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of one."""
    with writing_whole(path) as file:
        file.write(content)


@contextlib.contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place when all is written; a folder that is there is set aside."""
    partial = path.with_name(f"{path.name}.partial")
    with naming(path):
        # A crash has left it, or someone a link, which would be followed.
        remove(partial)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir():
            set_aside(path, path.parent)
        partial.replace(path)


def check_folder(path: Path) -> None:
    """Raise if there is something else than a folder, or a link to one, where one must be made or found."""
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(f"{path} must be a folder, got something else. Move it away.")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in a failure to write it: the system says no more than that some disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def set_aside(path: Path, run_dir: Path) -> Path:
    """Move a damaged file or folder to the run's ``damaged/``, and return where to."""
    target = run_dir / DAMAGED / path.name
    if target.parent.is_symlink():
        # It might lead to the files of others, of the same names.
        target.parent.unlink()
    target.parent.mkdir(exist_ok=True)
    remove(target)
    # A rename, unless a link has led to another disk.
    return Path(shutil.move(path, target))


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_sums(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the sums of files, by their names and contents, for ``altered`` or ``sha256sum --check``."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    write_whole(folder / SUMS, "".join(lines).encode())


def altered(folder: Path, names: Iterable[str]) -> list[str]:
    """Return which files are no longer those whose sums were written; none if no sums were.

    Args:
      folder: Holds the files and, perhaps, their sums.
      names: The files that the sums must cover.

    Returns:
      The names of files that are missing or altered, or that the sums do not know.
    """
    try:
        text = read_regular(folder / SUMS).decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError:
        text = ""
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
    return [name for name in names if sums.get(name) != _digest(folder / name)]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError:
        return "unreadable"
