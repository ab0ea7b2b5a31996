"""Projecting the matrices of a tree: leaves into stacks, stacks into their bands, and back."""

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax.checks import check_choice, check_positive
from svb_jax.cutting import computed_zero
from svb_jax.matrices import MatrixLeaf, stack_by_shape, unstack
from svb_jax.routes import Method, Reading
from svb_jax.sharing import AxisName, clip_stacks, replicate, shard_like

# The band's centre: a number, or a function of a matrix's (outputs, inputs).
Scale = float | Callable[[int, int], float]


def check_projection(
    caller: str, method: Method, scale: Scale, axis_name: AxisName | None, mesh: Mesh | None
) -> None:
    """Raise unless these options of a projection make sense."""
    check_choice(caller, "method", method, get_args(Method))
    if not callable(scale):
        check_positive(caller, "scale", scale)
    if axis_name is not None and mesh is not None:
        raise ValueError(
            f"{caller} takes axis_name (inside pmap or shard_map) or mesh (under jit), not both."
        )


def project_leaves(
    leaves: list[MatrixLeaf],
    values: list[jax.Array],
    epsilon: ArrayLike,
    *,
    scale: Scale = 1.0,
    method: Method = "auto",
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> tuple[list[jax.Array], Reading]:
    """Return the leaves' values with every matrix bounded, in float32 or better, and what was seen."""
    stacks = stack_by_shape(leaves, [replicate(value) for value in values])
    bands = {}
    for key, stack in stacks.items():
        inputs, outputs = stack.shape[1:]
        centre = scale(outputs, inputs) if callable(scale) else scale
        bound = 1 + jnp.asarray(epsilon, stack.dtype)
        bands[key] = centre / bound, centre * bound
    clipped, reading = clip_stacks(stacks, bands, method, axis_name, mesh)
    projected = unstack(leaves, clipped, computed_zero(reading.skipped))
    return [shard_like(new, old) for new, old in zip(projected, values, strict=True)], reading
