"""Projections of all kernels of a network in PyTorch, and geotorch's re-parametrisation.

Runs in an interpreter that has PyTorch, and needs nothing else but NumPy.
"""

import dataclasses
import importlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import as_matrix, load_kernels
from benchmarks.workload import Task, Workload

# By name, because PyTorch is not among what this project installs.
torch: Any = importlib.import_module("torch")

Setting = tuple[int, bool]
"""How many threads, and whether matrices lie on their side: as many rows as outputs."""


def svd(task: Task) -> Workload:
    """``torch.linalg.svd`` layer by layer, outputs times inputs, as PyTorch is set when it starts."""
    return _svd(task, (torch.get_num_threads(), True))


def svd_at_its_best(task: Task) -> Workload:
    """The same, with the number of threads and the orientation that a trial finds fastest."""
    cores = os.cpu_count() or 1
    threads = sorted({1, *(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores})
    return fastest(lambda setting: _svd(task, setting), list(itertools.product(threads, (True, False))))


def almost_orthogonal(task: Task) -> Workload:
    """AlmostOrthogonal of geotorch: what it costs to read every weight once, as each forward pass must."""
    geotorch: Any = importlib.import_module("geotorch")
    torch.manual_seed(0)
    layers = []
    for kernel in load_kernels(Path(task["kernels"])).values():
        # A weight is outputs x inputs, and geotorch 0.4 fails on weights that are wider than tall.
        layer = torch.nn.Linear(*sorted(as_matrix(kernel).shape), bias=False)
        geotorch.almost_orthogonal(layer, "weight", lam=task["epsilon"])
        with torch.no_grad():
            for parameter in layer.parameters():
                # Away from the start, where the exponential of zero would be too easy.
                parameter.add_(0.1 * torch.randn_like(parameter))
        layers.append(layer)

    def run(_: None) -> Any:
        with torch.no_grad():
            return [layer.weight for layer in layers]

    return Workload(run=run)


def fastest(make: Callable[[Any], Workload], settings: list[Any]) -> Workload:
    """Return the workload of the setting with the quickest call."""

    def trial(setting: Any) -> float:
        workload, times = make(setting), []
        # The first call also prepares something, which only shows where calls are short.
        while not times or (len(times) < 3 and sum(times) < 1):
            argument = workload.fresh()
            begin = time.perf_counter()
            workload.run(argument)
            times.append(time.perf_counter() - begin)
        return min(times)

    return dataclasses.replace(make(min(settings, key=trial)), is_warm=True)


def clip_singular_values(matrix: Any, lower: float, upper: float) -> Any:
    """Return a matrix with its singular values in the band."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u * s.clamp(lower, upper)) @ vt


def _svd(task: Task, setting: Setting) -> Workload:
    threads, is_wide = setting
    lower, upper = 1 / (1 + task["epsilon"]), 1 + task["epsilon"]
    kernels = load_kernels(Path(task["kernels"]))
    matrices = {name: _to_tensor(kernel, is_wide) for name, kernel in kernels.items()}

    def run(_: None) -> dict[str, Any]:
        torch.set_num_threads(threads)
        return {name: clip_singular_values(matrix, lower, upper) for name, matrix in matrices.items()}

    def to_kernels(clipped: dict[str, Any]) -> dict[str, np.ndarray]:
        tall = {name: matrix.T if is_wide else matrix for name, matrix in clipped.items()}
        return {name: tall[name].numpy().reshape(kernel.shape) for name, kernel in kernels.items()}

    facts = {"threads": threads, "orientation": "out x in" if is_wide else "in x out"}
    return Workload(run=run, facts=facts, kernels=to_kernels)


def _to_tensor(kernel: np.ndarray, is_wide: bool) -> Any:
    matrix = torch.from_numpy(as_matrix(kernel))
    return (matrix.T if is_wide else matrix).contiguous()
