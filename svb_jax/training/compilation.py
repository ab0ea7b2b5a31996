"""Compiled steps kept on disk, so that a restart, or the next run beside it, need not compile again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def cached_compilation(folder: Path) -> Iterator[None]:
    """Keep what is compiled meanwhile in a folder, unless the user has already chosen one."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    # JAX decides at its first compilation, which may lie behind us, whether it has a cache.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
