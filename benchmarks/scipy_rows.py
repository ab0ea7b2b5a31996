"""The projection of all kernels of a network in SciPy."""

from pathlib import Path

import numpy as np
import scipy.linalg

from benchmarks.kernels import Kernels, as_matrix, load_kernels
from benchmarks.workload import Task, Workload


def svd(task: Task) -> Workload:
    """``scipy.linalg.svd`` layer by layer, in float32 (NumPy's own would compute in float64)."""
    kernels = load_kernels(Path(task["kernels"]))
    lower, upper = 1 / (1 + task["epsilon"]), 1 + task["epsilon"]

    def clip(kernel: np.ndarray) -> np.ndarray:
        u, s, vt = scipy.linalg.svd(as_matrix(kernel), full_matrices=False, check_finite=False)
        return ((u * np.clip(s, lower, upper)) @ vt).reshape(kernel.shape)

    def run(_: None) -> Kernels:
        return {name: clip(kernel) for name, kernel in kernels.items()}

    return Workload(run=run, kernels=lambda clipped: clipped)
