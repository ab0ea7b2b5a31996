"""Singular Value Bounding and Bounded Batch Normalization for JAX."""

import importlib
from typing import Any

from svb_jax._src.batch_norm import bound_batch_norm_scales
from svb_jax._src.bound import Bound
from svb_jax._src.conv_operator import conv_operator_singular_values
from svb_jax._src.describe import Description, LeafDescription, describe
from svb_jax._src.dimension_numbers import MatrixAxes, by_name
from svb_jax._src.functional import clip_singular_values, project, project_batch_norm
from svb_jax._src.layouts import attention, every_matrix, oihw
from svb_jax._src.masks import paths
from svb_jax._src.nested_dimension_numbers import by_path, depthwise, grouped_convolutions, scan_stacks
from svb_jax._src.plotting import plot_projections, plot_spectrum
from svb_jax._src.schedules import staircase_schedule
from svb_jax._src.spectrum import (
    MatrixSummary,
    SpectrumSummary,
    folded_singular_values,
    singular_values,
    spectrum_summary,
)
from svb_jax._src.stats import (
    BoundBatchNormScalesState,
    BoundSingularValuesState,
    ProjectionStats,
    ScaleStats,
    projection_stats,
)
from svb_jax._src.transforms import bound_singular_values
from svb_jax._src.wrappers import bbn, svb

__all__ = [
    "Bound",
    "BoundBatchNormScalesState",
    "BoundSingularValuesState",
    "Description",
    "LeafDescription",
    "MatrixAxes",
    "MatrixSummary",
    "ProjectionStats",
    "ScaleStats",
    "SpectrumSummary",
    "attention",
    "bbn",
    "bound_batch_norm_scales",
    "bound_singular_values",
    "by_name",
    "by_path",
    "clip_singular_values",
    "conv_operator_singular_values",
    "depthwise",
    "describe",
    "every_matrix",
    "folded_singular_values",
    "grouped_convolutions",
    "oihw",
    "paths",
    "plot_projections",
    "plot_spectrum",
    "project",
    "project_batch_norm",
    "projection_stats",
    "scan_stacks",
    "singular_values",
    "spectrum_summary",
    "staircase_schedule",
    "svb",
]

# Reachable without an import of their own, imported when they are used: most need more than jax and optax.
_MODULES = ("ahead_of_time", "linen", "models", "training")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return importlib.import_module(f"svb_jax.{name}")
    raise AttributeError(f"module 'svb_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])


def _version() -> str:
    """Return the version that pyproject.toml gave the installed package."""
    from importlib import metadata

    try:
        return metadata.version("svb_jax")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"
