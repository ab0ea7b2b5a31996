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
from svb_jax.functional import project, project_batch_norm
from svb_jax.projection import all_platforms, clip_singular_values
from svb_jax.schedules import staircase_schedule
from svb_jax.spectrum import (
    MatrixSummary,
    SpectrumSummary,
    conv_operator_singular_values,
    folded_singular_values,
    singular_values,
    spectrum_summary,
)
from svb_jax.transforms import (
    BoundBatchNormScalesState,
    BoundSingularValuesState,
    bbn,
    bound_batch_norm_scales,
    bound_singular_values,
    projection_stats,
    svb,
)

__all__ = [
    "BoundBatchNormScalesState",
    "BoundSingularValuesState",
    "MatrixAxes",
    "MatrixSummary",
    "SpectrumSummary",
    "all_platforms",
    "attention",
    "bbn",
    "bound_batch_norm_scales",
    "bound_singular_values",
    "by_name",
    "clip_singular_values",
    "conv_operator_singular_values",
    "every_matrix",
    "folded_singular_values",
    "grouped_convolutions",
    "oihw",
    "project",
    "project_batch_norm",
    "projection_stats",
    "scan_stacks",
    "singular_values",
    "spectrum_summary",
    "staircase_schedule",
    "svb",
]
