"""Projecting the matrices of a tree: leaves as stacks, stacks into their bands, and back."""

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike

from svb_jax.checks import check_choice, check_positive
from svb_jax.cutting import computed_zero
from svb_jax.layout import replicate
from svb_jax.matrices import MatrixLeaf, from_stacks, to_stacks
from svb_jax.packing import Packing, pack_equal
from svb_jax.reading import Reading
from svb_jax.routes import Method
from svb_jax.sharing import AxisName, clip_stacks

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


def project_rows(
    leaves: list[MatrixLeaf],
    packing: Packing,
    rows: list[jax.Array],
    epsilon: ArrayLike,
    *,
    scale: Scale = 1.0,
    method: Method = "auto",
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> tuple[list[jax.Array], Reading]:
    """Return the leaves' values with every matrix bounded, and what was seen.

    Args:
      leaves: what is bounded.
      packing: of their values.
      rows: the packed values, in float32 or better.
      epsilon: the band is ``[1 / (1 + epsilon), 1 + epsilon]``.
      scale: the band's centre.
      method: the route.
      axis_name: share the work over this axis.
      mesh: share the work over this mesh.
    """
    # What is equal is stacked, and compiled once.
    equal = pack_equal(rows)
    members = [[leaves[position] for row in group for position in packing.rows[row]] for group in equal.rows]
    stacks = [
        to_stacks(of_row, replicate(row)) for of_row, row in zip(members, equal.pack(rows), strict=True)
    ]
    bands = []
    for row in stacks:
        bound = 1 + jnp.asarray(epsilon, row.numbers.dtype)
        centres = (
            [scale(outputs, inputs) for _, inputs, outputs in row.shapes] if callable(scale) else [scale]
        )
        bands.append([(centre / bound, centre * bound) for centre in centres])
    clipped, reading = clip_stacks(stacks, bands, method, axis_name, mesh)
    projected = [from_stacks(of_row, row) for of_row, row in zip(members, clipped, strict=True)]
    return equal.unpack(projected, like=rows, zero=computed_zero(reading.skipped)), reading
