"""``python -m experiments inspect``: the spectrum of a checkpoint or any weights, as a table and a plot."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

import svb_jax
from experiments import plots
from svb_jax.training.checkpoint import load_checkpoint, load_newest

LAYOUTS = {"hwio": None, "oihw": svb_jax.oihw, "every": svb_jax.every_matrix}


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print and plot the singular values of a network's weights."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder, one of its checkpoints (runs/.../checkpoints/391), or an .npz of weights."""
    epsilon: float = 0.5
    """The band [1 / (1 + epsilon), 1 + epsilon] to count the values in."""
    layout: Literal["hwio", "oihw", "every"] = "hwio"
    """Kernels with the output last (hwio: Flax) or first (oihw: PyTorch, Equinox); or every array of rank two
    and more, whatever its name, with the output last (every)."""
    plot: Path | None = None
    """Where to write the plot; beside the weights if not given."""

    def run(self) -> None:
        """Print the table, write the plot, and say where."""
        weights = nested(load_weights(self.path))
        dimension_numbers = LAYOUTS[self.layout]
        print(svb_jax.spectrum_summary(weights, self.epsilon, dimension_numbers=dimension_numbers))
        values = svb_jax.singular_values(weights, dimension_numbers=dimension_numbers)
        plot = self.plot or (
            self.path / "spectrum.png" if self.path.is_dir() else self.path.with_suffix(".png")
        )
        plots.save_png(draw(values, self.epsilon), plot)
        print(f"Wrote {plot.absolute()}")


def load_weights(path: Path) -> dict[str, np.ndarray]:
    """Read parameters by their paths from a run's folder, a checkpoint or an .npz."""
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as arrays:
            return dict(arrays)
    if (path / "checkpoints").is_dir():
        checkpoint, _ = load_newest(path / "checkpoints")
    elif path.is_dir() and path.name.isdecimal():
        checkpoint = load_checkpoint(path)
    else:
        checkpoint = None
    if checkpoint is None:
        raise FileNotFoundError(
            f"inspect needs a run's folder, one of its checkpoints or an .npz, got {path}."
        )
    prefix = "params/"
    return {name.removeprefix(prefix): a for name, a in checkpoint.arrays.items() if name.startswith(prefix)}


def nested(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Turn paths into a tree, so that a leaf's own name is the last on its path.

    Example:
      >>> nested({"conv/kernel": np.ones(2), "head.weight": np.ones(3)})
      {'conv': {'kernel': array([1., 1.])}, 'head': {'weight': array([1., 1., 1.])}}
    """
    tree: dict[str, Any] = {}
    for path, array in weights.items():
        *owners, leaf = path.replace(".", "/").split("/")
        branch = tree
        for owner in owners:
            branch = branch.setdefault(owner, {})
        branch[leaf] = array
    return tree


def draw(values: Mapping[str, np.ndarray], epsilon: float) -> Figure:
    """Draw every matrix's singular values in a column, from the first to the last, over the band."""
    figure, grid = plots.new_figure(1, 1, height=4.2)
    axes = grid[0, 0]
    axes.axhspan(1 / (1 + epsilon), 1 + epsilon, color=plots.COLOURS["blue"], alpha=0.12, lw=0, label="band")
    for place, spectrum in enumerate(values.values()):
        flat = np.ravel(spectrum)
        axes.vlines(place, flat.min(), flat.max(), color=plots.INK, alpha=0.3, linewidth=1)
        axes.scatter(np.full(flat.size, place), flat, s=9, color=plots.COLOURS["red"], alpha=0.5, lw=0)
    axes.set_xticks(
        range(len(values)), list(values), rotation=90, fontsize=max(4, min(8, 200 // len(values)))
    )
    axes.set(ylabel="singular value", title=f"{len(values)} matrices, band for ε = {epsilon:g}")
    if all((np.ravel(spectrum) > 0).all() for spectrum in values.values()):
        plots.log_scale(axes)
    return figure
