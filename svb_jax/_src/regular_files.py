"""Files from outside, told from pipes and devices before they are opened: those may never end."""

import errno
from pathlib import Path


def check_regular(path: Path) -> None:
    """Raise if there is something else than a file, or a link to one."""
    path.stat()
    if not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Read a file.

    Raises:
      OSError: It cannot be read, or is a pipe or a device.
    """
    check_regular(path)
    return path.read_bytes()
