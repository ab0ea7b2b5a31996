"""The projection shared over virtual CPU devices, and what its compiled program says about the shares."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import svb_jax
from benchmarks.jax_rows import compiled_facts, load_params
from benchmarks.workload import Task, Workload
from svb_jax.packing import LARGEST_TO_STACK
from svb_jax.sharing import balanced_counts


def shared(task: Task) -> Workload:
    """Our projection, shared over ``task["devices"]`` devices; the first row of its process."""
    devices = task["devices"]
    jax.config.update("jax_num_cpu_devices", devices)
    params, epsilon = load_params(task), task["epsilon"]
    mesh = jax.make_mesh((devices,), ("devices",))
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    project = jax.jit(lambda params: svb_jax.project(params, epsilon, mesh=mesh))
    compiled, facts = compiled_facts(lambda: project.lower(replicated))
    alone = jax.jit(lambda params: svb_jax.project(params, epsilon))(params)
    differences = jax.tree.map(_largest_difference, compiled(replicated), alone)
    facts |= count_shares(params, devices, project.lower(replicated).as_text())
    facts |= count_decompositions(compiled.as_text())
    facts["difference_from_one_device"] = max(jax.tree.leaves(differences))
    return Workload(run=lambda _: jax.block_until_ready(compiled(replicated)), facts=facts)


def count_shares(params: Any, devices: int, program: str) -> dict[str, Any]:
    """Return each device's decompositions, multiply-adds and part of the work.

    A program is one for all devices: it holds, for each stack of equal matrices, a loop around one
    decomposition, and the table of how often each device goes round. The counts are the library's own
    division of the work; ``tables_in_program`` says for how many stacks the program has that very table,
    each of its own. Large matrices are stacks of one.

    Args:
      params: the tree of kernels.
      devices: how many share the work.
      program: the text that the compiler is given.
    """
    sizes = Counter(_matrix_shape(kernel.shape) for kernel in jax.tree.leaves(params))
    shapes = []
    for shape, count in sizes.items():
        shapes += [(1, *shape)] * count if math.prod(shape) > LARGEST_TO_STACK else [(count, *shape)]
    counts = balanced_counts(shapes, devices)
    expected, found = (Counter(map(tuple, tables)) for tables in (counts.tolist(), _tables(program, devices)))
    work = np.array([max(m, n) * min(m, n) ** 2 for _, m, n in shapes]) @ counts
    return {
        "decompositions": counts.sum(axis=0).tolist(),
        "multiply_adds": (_multiply_adds(shapes) @ counts).tolist(),
        "largest_share": float(work.max() / work.sum()),
        "tables": len(counts),
        "tables_in_program": (expected & found).total(),
    }


def count_decompositions(program: str) -> dict[str, int]:
    """Return how many decompositions a compiled CPU program writes out, and how many take several matrices.

    Example:
      >>> eigh = '%e = (f32[8,8]{0,1}, s32[]) custom-call(%x), custom_call_target="lapack_ssyevd_ffi"'
      >>> count_decompositions(eigh)
      {'decompositions_in_program': 1, 'batched_in_program': 0}
    """
    shapes = re.findall(r"= \(f\d+\[([\d,]+)\].*custom_call_target=\"lapack_\wsyevd", program)
    return {
        "decompositions_in_program": len(shapes),
        "batched_in_program": sum(shape.count(",") > 1 for shape in shapes),
    }


def _matrix_shape(kernel: Sequence[int]) -> tuple[int, int]:
    return math.prod(kernel[:-1]), kernel[-1]


def _multiply_adds(shapes: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the products of one matrix of each stack: form the Gram matrix, rebuild it, apply it."""
    return np.array([2 * max(m, n) * min(m, n) ** 2 + min(m, n) ** 3 for _, m, n in shapes])


def _tables(program: str, devices: int) -> list[list[int]]:
    """Return the constants of a program that hold a number for each device."""
    texts = re.findall(rf"dense<\[?([\d, ]+)\]?> : tensor<{devices}xi32>", program)
    tables = [[int(number) for number in text.split(",")] for text in texts]
    # A table of equal numbers is written as that number.
    return [table * devices if len(table) == 1 else table for table in tables]


def _largest_difference(one: jax.Array, other: jax.Array) -> float:
    return float(np.max(np.abs(np.asarray(one) - np.asarray(other))))
