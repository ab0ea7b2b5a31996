"""Compiled steps kept on disk, so that a restart, or the next run beside it, need not compile again."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache  # no public door leads to what reads the entries
from jax.experimental.compilation_cache import compilation_cache

from svb_jax.training.durable import remove

SUM_BYTES = 32


class _Checked:
    """Entries with a sum over their key and content.

    JAX runs whatever program it finds under a key. A damaged entry may run, and two that were exchanged
    fail with a traceback: here they are dropped, and compiled again.
    """

    def __init__(self, entries: Any):
        self._entries, self._path = entries, entries._path

    def get(self, key: str) -> bytes | None:
        """Return the program that was put under a key, None if it is not there or no longer itself."""
        for file in self._files(key):
            # Pipes and devices never end; at a folder JAX warns, with the lines of its own code.
            if not file.is_file():
                remove(file)
        entry = self._entries.get(key)
        if entry is None:
            return None
        content = entry[SUM_BYTES:]
        if entry[:SUM_BYTES] == _sum_of(key, content):
            return content
        # What is there already would not be written again.
        for file in self._files(key):
            remove(file)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        self._entries.put(key, _sum_of(key, value) + value)

    def _files(self, key: str) -> Iterator[Path]:
        return Path(self._path).glob(f"{key}*")


@contextlib.contextmanager
def cached_compilation(folder: Path) -> Iterator[None]:
    """Keep what is compiled meanwhile in a folder, unless it cannot be made or the user has chosen one."""
    if jax.config.values["jax_compilation_cache_dir"] is not None or not _can_make(folder):
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    open_folder = jax_cache.get_file_cache
    jax_cache.get_file_cache = _checked(open_folder)
    # JAX decides at its first compilation, which may lie behind us, whether it has a cache.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax_cache.get_file_cache = open_folder
        compilation_cache.reset_cache()


def _checked(open_folder: Any) -> Any:
    def open_checked(path: str) -> tuple[Any, str] | None:
        opened = open_folder(path)
        return opened and (_Checked(opened[0]), opened[1])

    return open_checked


def _sum_of(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _can_make(folder: Path) -> bool:
    # JAX would warn at every compilation, with the lines of its own code.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True
