"""Where and with what something was measured."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, Pool, RowError

PACKAGES = ["svb_jax", "jax", "jaxlib", "optax", "flax", "numpy", "scipy"]
PEERS = ["torch", "geotorch", "libtpu", "jax-cuda12-plugin"]
# Settings that change how many threads anyone takes: the reader must know if they were set.
THREAD_SETTINGS = ("OMP_", "OPENBLAS_", "MKL_", "XLA_", "JAX_", "KMP_", "GOTO_")


def describe(pool: Pool, pythons: Iterable[str]) -> dict[str, Any]:
    """Return the hardware, the versions of everything, the commit and the settings of the surroundings.

    Args:
      pool: Where to start the interpreters that have peers or compilers.
      pythons: Those interpreters.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    for python in dict.fromkeys(pythons):
        versions |= _peer_versions(pool, python)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "has_uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
        "variables": {key: value for key, value in os.environ.items() if key.startswith(THREAD_SETTINGS)},
    }


def _peer_versions(pool: Pool, python: str) -> dict[str, str]:
    group = python, "versions"
    pool.start(group, python)
    try:
        return pool.ask(group, 60, do="versions", packages=PEERS)
    except RowError:
        return {}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.stdout.strip()
