"""Figures of the deep linear study: strengths, gains, errors through depth, mixing."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from svb_jax.experiments.experiment import Experiment
from svb_jax.experiments.plots import INK, curves, drawn_panels, legend, log_scale, looks, new_figure
from svb_jax.experiments.record import Runs


def energy(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Energy over training: the mean of the seeds, and the band from the best to the worst."""
    figure = curves(experiment, runs)
    for axes in figure.axes:
        log_scale(axes, ticks=(1,))
        # Energies span decades: the limits of a linear axis do not fit.
        axes.autoscale(axis="y")
    return figure


def strengths(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Each direction's strength in the network against the data's, one dot a direction and seed."""
    panels = drawn_panels(experiment, runs)
    figure, grid = new_figure(1, len(panels))
    markers = "o^sDv"
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=True):
        for marker, (row, look) in zip(markers, looks(experiment, rows), strict=False):
            sigma = np.concatenate([record.result["sigma"] for record in runs[row]])
            strength = np.concatenate([record.result["strengths"] for record in runs[row]])
            axes.scatter(
                sigma, strength, s=16, marker=marker, color=look["color"], alpha=0.55, label=row, lw=0
            )
        axes.axline((1, 1), slope=1, color=INK, linewidth=1, linestyle=":")
        axes.set(title=title, xlabel="σ, strength in the data", ylabel="strength in the network")
        legend(axes)
    return figure


def gain_ranges(experiment: Experiment[Any], runs: Runs) -> Figure:
    """Smallest to largest gain of any layer along each direction, the strongest direction first."""
    figure, grid = new_figure(-(-len(runs) // 3), 3, height=2.6, sharex=True, sharey=True)
    for axes, (row, look) in zip(grid.flat, looks(experiment, list(runs)), strict=False):
        gains = np.array([record.result["gains"] for record in runs[row]])
        low, high = gains.min(axis=(0, 2)), gains.max(axis=(0, 2))
        places = np.arange(1, len(low) + 1)
        axes.vlines(places, low, high, color=look["color"], linewidth=4)
        axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        axes.set(title=row, xlabel="direction", ylabel="gain of a layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        log_scale(axes)
    return figure


def errors_through_depth(experiment: Experiment[Any], runs: Runs) -> Figure:
    """The length of each direction's unit error on its way back from the output, first seed."""
    figure, grid = new_figure(-(-len(runs) // 3), 3, height=2.6, sharex=True, sharey=True)
    for axes, (row, look) in zip(grid.flat, looks(experiment, list(runs)), strict=False):
        errors = np.array(runs[row][0].result["error_components"])
        # From the output back to the input.
        axes.set_xlim(len(errors) - 1, 0)
        axes.plot(np.arange(len(errors)), errors, color=look["color"], linewidth=0.9, alpha=0.6)
        axes.set(title=row, xlabel="layer", ylabel="error")
        log_scale(axes)
    return figure


def mixing(experiment: Experiment[Any], runs: Runs) -> Figure:
    """The strengths at which two layers in the middle mix directions, first seed, all rows on one scale."""
    figure, grid = new_figure(-(-len(runs) // 3), 3, height=3.0)
    matrices = {row: np.array(records[0].result["mixing"]) for row, records in runs.items()}
    top = max(float(matrix.max()) for matrix in matrices.values())
    for axes, (row, matrix) in zip(grid.flat, matrices.items(), strict=False):
        image = axes.imshow(matrix, cmap="magma", vmin=0, vmax=top, rasterized=True)
        axes.set(title=row, xlabel="direction, lower layer", ylabel="direction, upper layer")
        axes.grid(False)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


FIGURES = (strengths, energy, gain_ranges, errors_through_depth, mixing)
