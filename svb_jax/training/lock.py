"""A folder belongs to one process at a time: a lock that the system releases when its process ends."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from svb_jax.training.durable import check_folder

LOCK = "lock"


class FolderInUse(OSError):  # noqa: N818 - what is the case, not what failed
    """Another process works in the folder."""


@contextlib.contextmanager
def locked(folder: Path, argument: str = "run_dir") -> Iterator[bool]:
    """Keep every other process out of a folder.

    The lock is the kernel's (``flock``), and ends with this process however it ends. NFS since Linux 2.6.12
    and most cluster file systems carry it between hosts; where one does not know locks at all, there is none.

    Args:
      folder: The folder; made if need be.
      argument: What the user calls it.

    Yields:
      Whether the file system could lock it.

    Raises:
      FolderInUse: Another process has it; the message says which, on what host, since when.
      OSError: There is no folder, or no lock, but something else of its name.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _open(folder / LOCK) as file, _opened(folder) as itself:
        try:
            is_locked = _lock(file.fileno())
            # Whoever removes the file must not let a second process in.
            _lock(itself)
        except BlockingIOError as error:
            raise FolderInUse(
                f"{folder} is in use by {_holder(file)}. Wait for its end, stop it, or give another "
                f"{argument}."
            ) from error
        if is_locked:
            _sign(file)
        yield is_locked


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    number = os.open(folder, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def _open(path: Path) -> FileIO:
    # A link that someone has put there is not followed: what it leads to would be overwritten.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        return FileIO(os.open(path, flags, 0o666), "a+")
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP):
            raise
        raise OSError(f"{path} must be a file, got a folder or a link. Move it away.") from error


def _lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        # EBADF: some file systems lock only what is open for writing, which a folder cannot be.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
            raise
        return False
    return True


def _sign(file: FileIO) -> None:
    """Write who holds the lock; on a full disk it holds without a name."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        file.write(json.dumps(holder).encode())


def _holder(file: FileIO) -> str:
    try:
        file.seek(0)
        holder = json.load(file)
        return f"process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
