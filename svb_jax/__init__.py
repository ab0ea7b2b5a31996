"""Singular Value Bounding and Bounded Batch Normalization for JAX."""

from svb_jax.axes import (
    MatrixAxes,
    attention,
    by_name,
    every_matrix,
    grouped_convolutions,
    oihw,
    scan_stacks,
)

__all__ = [
    "MatrixAxes",
    "attention",
    "by_name",
    "every_matrix",
    "grouped_convolutions",
    "oihw",
    "scan_stacks",
]
