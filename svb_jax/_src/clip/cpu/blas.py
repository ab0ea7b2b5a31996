"""One thread for the OpenBLAS that XLA's decompositions run on.

jaxlib takes LAPACK from SciPy, whose OpenBLAS has a thread for each core, which spin while they wait. XLA
runs its own threads beside them, and so do data loaders: on two cores a projection of 0.6 s took up to 25 s
with one busy process beside it, and 0.6 to 0.7 s with one BLAS thread, busy or not. At these sizes the
threads gain nothing.

The limit holds for SciPy's OpenBLAS in this process, and for nothing else: NumPy has a copy of its own.
Whoever sets OPENBLAS_NUM_THREADS or OMP_NUM_THREADS has chosen, and is left alone.
"""

import contextlib
import ctypes
import functools
import importlib
import os

import jax

_CHOSEN_BY_USER = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_SETTERS = ("scipy_openblas_set_num_threads", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads")


@functools.cache
def limit_threads() -> bool:
    """Let the OpenBLAS of SciPy, if there is one, use a single thread; return whether it was told to."""
    # A host with accelerators decomposes nothing itself.
    if jax.default_backend() != "cpu" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return False
    with contextlib.suppress(ImportError, OSError):
        # Symbols are looked up in a library and in those that it was linked with.
        library = ctypes.CDLL(importlib.import_module("scipy.linalg.cython_lapack").__file__)
        for name in _SETTERS:
            if (set_num_threads := getattr(library, name, None)) is not None:
                set_num_threads(1)
                return True
    return False
