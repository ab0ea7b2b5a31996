"""Projections of all kernels of a network in JAX: ours, plain SVDs, and two yardsticks."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import svb_jax
from benchmarks.kernels import load_kernels
from benchmarks.workload import Task, Workload

Params = dict[str, dict[str, jax.Array]]

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def project(task: Task) -> Workload:
    """Our projection by the route ``task["method"]``, the whole network in one jit."""
    return _in_one_jit(task, lambda params: svb_jax.project(params, task["epsilon"], method=task["method"]))


def svd_in_one_jit(task: Task) -> Workload:
    """``jnp.linalg.svd`` layer by layer, all layers in one jit."""
    return _in_one_jit(task, functools.partial(jax.tree.map, clip_by_svd(task["epsilon"])))


def svd_one_after_another(task: Task) -> Workload:
    """``jnp.linalg.svd`` layer by layer, each in a jit of its own that waits for the one before."""
    return _layer_by_layer(task, jax.jit(clip_by_svd(task["epsilon"])))


def svd_eager(task: Task) -> Workload:
    """``jnp.linalg.svd`` layer by layer, without any jit."""
    return _layer_by_layer(task, clip_by_svd(task["epsilon"]))


def muon(task: Task) -> Workload:
    """Muon's orthogonalisation as optax has it, five steps: the yardstick of what products alone cost."""
    # It has no public name: where an optax has it elsewhere, this row alone is left out.
    from optax.contrib._muon import orthogonalize_via_newton_schulz as orthogonalize

    coefficients = jnp.array([3.4445, -4.7750, 2.0315])

    def orthogonalize_all(params: Params) -> Params:
        return jax.tree.map(lambda kernel: orthogonalize(_as_matrix(kernel), coefficients), params)

    return _in_one_jit(task, orthogonalize_all, is_projection=False)


def floor(task: Task) -> Workload:
    """The two products m·m·n that no projection by its Gram matrix can do without."""

    def multiply_twice(kernel: jax.Array) -> jax.Array:
        matrix = _as_matrix(kernel)
        if matrix.shape[0] >= matrix.shape[1]:
            return matmul(matrix, matmul(matrix.T, matrix))
        return matmul(matmul(matrix, matrix.T), matrix)

    return _in_one_jit(task, functools.partial(jax.tree.map, multiply_twice), is_projection=False)


def compiled_facts(lowered: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return a compiled program with the time it took to trace and compile, and the memory it will take."""
    begin = time.perf_counter()
    compiled = lowered().compile()
    facts: dict[str, Any] = {"compile_seconds": time.perf_counter() - begin}
    memory = compiled.memory_analysis()
    if memory is not None:
        facts |= {"temp_bytes": memory.temp_size_in_bytes, "output_bytes": memory.output_size_in_bytes}
    return compiled, facts


def load_params(task: Task) -> Params:
    """Return the kernels as a tree of parameters."""
    kernels = load_kernels(Path(task["kernels"]))
    return {name: {"kernel": jnp.asarray(kernel)} for name, kernel in kernels.items()}


def to_kernels(params: Params) -> dict[str, np.ndarray]:
    """Return what ``load_params`` read, or what became of it."""
    return {name: np.asarray(layer["kernel"]) for name, layer in params.items()}


def _in_one_jit(task: Task, function: Callable[[Params], Any], is_projection: bool = True) -> Workload:
    params = load_params(task)
    compiled, facts = compiled_facts(lambda: jax.jit(function).lower(params))
    return Workload(
        run=lambda _: jax.block_until_ready(compiled(params)),
        facts=facts,
        kernels=to_kernels if is_projection else None,
    )


def _layer_by_layer(task: Task, function: Callable[[jax.Array], jax.Array]) -> Workload:
    params = load_params(task)

    def run(_: None) -> Params:
        return jax.tree.map(lambda kernel: jax.block_until_ready(function(kernel)), params)

    return Workload(run=run, kernels=to_kernels)


def _as_matrix(kernel: jax.Array) -> jax.Array:
    return kernel.reshape(-1, kernel.shape[-1])


def clip_by_svd(epsilon: float) -> Callable[[jax.Array], jax.Array]:
    """Return the projection of a kernel as one would write it down."""

    def clip(kernel: jax.Array) -> jax.Array:
        u, s, vt = jnp.linalg.svd(_as_matrix(kernel), full_matrices=False)
        return matmul(u * jnp.clip(s, 1 / (1 + epsilon), 1 + epsilon), vt).reshape(kernel.shape)

    return clip
