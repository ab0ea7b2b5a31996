"""Files of a folder or a tar archive from outside, each measured before it is read; nothing is unpacked."""

import contextlib
import gzip
import io
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

MOST_FILES = 1000
"""More members or entries than any data set of a few files has."""
MOST_BYTES = 1 << 30
"""More than all members together may take when they are decompressed."""
MOST_BYTES_OF_EXTENSION = 1 << 16
"""More than the names, times and owners take that a header had no room for."""


_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class OutsideFile(NamedTuple):
    """A file whose size is known and whose content is not read yet."""

    path: PurePosixPath
    size: int
    read: Callable[[], bytes]


def walk(source: Path, folder: str, most_bytes: int, remedy: str) -> Iterator[OutsideFile]:
    """Yield the files of a folder or a tar archive, which may be damaged or made to harm.

    Args:
      source: A tar archive, compressed by gzip or not; or a folder.
      folder: Its one folder: looked for in ``source`` if that is a folder.
      most_bytes: A larger member is refused.
      remedy: What a user should do about a refused archive.

    Yields:
      Each file; it must be read before the next one is asked for.

    Raises:
      FileNotFoundError: There is nothing at ``source``.
      ValueError: A member is of another kind than file or folder, points outside, is too large, or there
        are too many; or the archive is damaged.
    """
    if source.is_dir():
        inner = source / folder
        yield from _walk_folder(inner if inner.is_dir() else source.resolve())
    elif source.is_file():
        yield from _walk_archive(source, most_bytes, remedy)
    else:
        raise FileNotFoundError(f"There is neither a file nor a folder at {source}.")


def _walk_folder(folder: Path) -> Iterator[OutsideFile]:
    for number, path in enumerate(folder.iterdir()):
        _refuse_many(number, folder)
        status = path.stat()
        # Opening a pipe waits for ever, and a device has no end.
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise ValueError(
                f"{path} must be a file, got a pipe, a device or a socket. Nothing was imported."
            )
        if stat.S_ISREG(status.st_mode):
            yield OutsideFile(PurePosixPath(folder.name, path.name), status.st_size, path.read_bytes)


def _walk_archive(source: Path, most_bytes: int, remedy: str) -> Iterator[OutsideFile]:
    with (
        _refusing_damage(source, remedy),
        _open(source) as stream,
        _open_archive(stream, source, remedy) as archive,
    ):
        for number, member in enumerate(_members(archive, source, remedy)):
            _refuse_many(number, source)
            _refuse_member(source, member, most_bytes)

            def read(member: tarfile.TarInfo = member) -> bytes:
                with _refusing_damage(source, remedy):
                    file = archive.extractfile(member)
                    return file.read() if file else b""

            yield OutsideFile(PurePosixPath(member.name), member.size, read)


def _open_archive(stream: io.BufferedIOBase, source: Path, remedy: str) -> tarfile.TarFile:
    # The first header is read at once; odd ones meet errors of int(), which are no sentences of ours.
    with _refusing_damage(source, remedy, ValueError):
        # As a stream it can only go forward: a member of negative size cannot send it back, and round.
        return tarfile.open(fileobj=_Limited(stream), mode="r|", bufsize=1 << 20, tarinfo=_Header)


def _members(archive: tarfile.TarFile, source: Path, remedy: str) -> Iterator[tarfile.TarInfo]:
    while True:
        with _refusing_damage(source, remedy, ValueError):
            member = archive.next()
        if member is None:
            return
        yield member


class _Header(tarfile.TarInfo):
    """A header that tarfile may go on from: it reads extensions and maps of holes whole, however large."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """Parse 512 bytes, and refuse what would make tarfile read far more."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENSIONS and not 0 <= header.size <= MOST_BYTES_OF_EXTENSION:
            raise tarfile.ReadError(f"{header.name!r} extends a header by {header.size:,} bytes")
        return header

    def _refuse_sparse(self, *_: Any) -> None:
        raise tarfile.ReadError(f"{self.name!r} is sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _open(source: Path) -> io.BufferedIOBase:
    with source.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.GzipFile(source) if is_gzip else source.open("rb")


class _Limited(io.RawIOBase):
    """A stream that ends in an error before it has filled the memory."""

    def __init__(self, stream: io.BufferedIOBase):
        self._stream, self._left = stream, MOST_BYTES

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes."""
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(f"it holds more than {MOST_BYTES:,} bytes")
        return data


def _refuse_many(number: int, source: Path) -> None:
    if number >= MOST_FILES:
        raise ValueError(f"{source} must hold a few files, got more than {MOST_FILES}. Nothing was imported.")


def _refuse_member(source: Path, member: tarfile.TarInfo, most_bytes: int) -> None:
    path = PurePosixPath(member.name)
    is_plain = member.isdir() or (member.isfile() and not member.issparse())
    if path.is_absolute() or ".." in path.parts or not is_plain:
        raise ValueError(
            f"{source} is not an official archive: its member {member.name!r} is a link, a device or sparse, "
            "or points outside of the target folder. Nothing was imported."
        )
    if not 0 <= member.size <= most_bytes:
        raise ValueError(
            f"{source} is not an official archive: its member {member.name!r} declares "
            f"{member.size:,} bytes. Nothing was imported."
        )


@contextlib.contextmanager
def _refusing_damage(source: Path, remedy: str, *more: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, OSError, zlib.error, OverflowError, RecursionError, *more) as error:
        raise ValueError(f"{source} is not a whole tar archive ({error}). {remedy}") from error
