"""Arrays from an ``.npz``, which may be damaged or made to harm: measured before it is read."""

import io
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from svb_jax._src.regular_files import check_regular

_END = struct.Struct("<4s4H2LH")
"""The record that ends a zip archive; the fifth field is the number of members."""
_UNSUSPICIOUS_BYTES = 1 << 28
_MOST_COMPRESSION = 100
"""Weights hardly shrink; a file that grows so much beyond a quarter of a gigabyte was made to fill memory."""


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Read every array of an ``.npz``, with the archive's own checksums checked; never a pickle.

    Args:
      path: The file.

    Returns:
      The arrays by their names.

    Raises:
      FileNotFoundError: It is not there.
      ValueError: It is damaged, holds Python objects, or declares far more than such a file can mean or this
        machine can hold.
    """
    try:
        check_regular(path)
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            _measure(archive, file)
            return {_name(member): _read(archive, member) for member in archive.infolist()}
    except FileNotFoundError:
        raise
    # zipfile, zlib and NumPy meet damage with whatever they like, RuntimeError and TokenError among it.
    except Exception as error:
        raise ValueError(f"{path} is not a whole .npz of arrays: {_reason(error)}.") from error


def _measure(archive: zipfile.ZipFile, file: IO[bytes]) -> None:
    names = {member.filename for member in archive.infolist()}
    file.seek(-_END.size, os.SEEK_END)
    signature, *_, count, _, _, _ = _END.unpack(file.read())
    # zipfile lists as many members as it finds, whatever their number should be.
    if signature != b"PK\x05\x06" or count != len(names):
        raise ValueError(f"it should have {count} members, and has {len(names)}")
    total = sum(member.file_size for member in archive.infolist())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > memory:
        raise ValueError(f"it declares {total:,} bytes, more than this machine's memory of {memory:,}")
    size = file.seek(0, os.SEEK_END)
    if total > max(_UNSUSPICIOUS_BYTES, _MOST_COMPRESSION * size):
        raise ValueError(
            f"it declares {total:,} bytes in a file of {size:,}, more than weights can be compressed"
        )


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    # To its end, where zipfile compares the checksum, before a word of it is believed.
    content = archive.read(member)
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _read_header(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"{member.filename} declares {shape} of {dtype}, which it cannot hold")
    flat = np.frombuffer(content, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C").copy()


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
