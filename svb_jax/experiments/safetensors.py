"""Reads safetensors, which may be damaged or made to harm: every entry is measured before it is believed."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from svb_jax._src.regular_files import read_regular

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
}
# Floats of eight bits and fewer are weights up to factors that are kept elsewhere, as in packed integers.
SKIPPED_TYPES = re.compile(r"[IU]\d+|BOOL|C\d+|F[468]_?\w*")


class Entry(NamedTuple):
    """Where an array lies in the file's data, and what it is."""

    dtype: str
    shape: Sequence[int]
    start: int
    end: int


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the format itself: the header's length, a JSON header, the arrays' bytes.

    Args:
      path: The file.

    Returns:
      The arrays of the larger floating types by their names.

    Raises:
      OSError: It cannot be read, or is a pipe or a device.
      ValueError: It is damaged; two entries have one name, or share bytes.
    """
    content = read_regular(path)
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or end > len(content):
        raise ValueError(f"it is cut short: its header should end at byte {end}")
    header = json.loads(content[8:end], object_pairs_hook=_without_repetition)
    data = memoryview(content)[end:]
    if not isinstance(header, dict):
        raise ValueError("its header does not list arrays by name")
    entries = {name: _entry(name, found) for name, found in header.items() if name != "__metadata__"}
    _refuse_overlaps(entries)
    return {
        name: _read(name, entry, data)
        for name, entry in entries.items()
        if not SKIPPED_TYPES.fullmatch(entry.dtype)
    }


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON's pairs; Python alone would let the last of two win."""
    repeated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if repeated:
        raise ValueError(f"it has {repeated[0]!r} twice")
    return dict(pairs)


def _entry(name: str, found: Any) -> Entry:
    match found:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
            isinstance(length, int) and length >= 0 for length in shape
        ):
            return Entry(dtype, shape, start, end)
    raise ValueError(f"the header does not say what {name!r} is, by dtype, shape and data_offsets")


def _refuse_overlaps(entries: Mapping[str, Entry]) -> None:
    ranges = sorted((entry.start, entry.end, name) for name, entry in entries.items())
    for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError(f"{one!r} and {other!r} share bytes")


def _read(name: str, entry: Entry, data: memoryview) -> np.ndarray:
    kind, shape, start, end = entry
    if kind not in TYPES:
        raise ValueError(f"it holds {name!r} as {kind}, which inspect does not read")
    dtype = np.dtype(TYPES[kind])
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} of shape {shape} has no room for its bytes")
    return np.frombuffer(data[start:end], dtype).reshape(shape)
