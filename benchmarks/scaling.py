"""How the projection grows: over devices, with the width and the depth of a network, at ImageNet's size.

python -m benchmarks scaling    # half an hour on two cores
python -m benchmarks scaling --model convnet_38 --devices 1 2 --widths 64 128 --depths 8 16
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kernels import count_numbers, drifted_kernels, save_kernels
from benchmarks.measurement import Row, measure, say
from benchmarks.options import Options, choose
from benchmarks.processes import Pool
from benchmarks.projection import ROWS
from benchmarks.results import finish
from benchmarks.tables import section
from svb_jax import models

# Ours decompose one matrix at a time, so that one process is safe for all three.
ROUTES = {name: replace(ROWS[name], group="routes") for name in ("auto", "svd", "floor")}
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Scaling(Options):
    """Project over more devices, at more widths and depths, and a network for ImageNet."""

    model: str = "wrn_28_10"
    """The network whose projection is shared over devices."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of devices: virtual ones, on the cores there are."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Channels of the 3 x 3 kernels in the study of width."""
    width_layers: int = 4
    """How many such kernels."""
    depths: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Numbers of 3 x 3 kernels in the study of depth."""
    depth_width: int = 64
    """Their channels."""
    network: str | None = "inception_resnet_imagenet"
    """A whole network to project beside; "None" for none."""
    rows: tuple[str, ...] = tuple(ROUTES)
    """Which rows to measure in the studies of width and depth, and on the whole network."""
    epsilon: float = 0.5
    """The band is [1 / (1 + epsilon), 1 + epsilon]."""
    condition: float = 3.4
    """Largest singular value over the smallest, before."""

    def run(self) -> None:
        """Measure, print and save."""
        with Pool() as pool:
            environment = self.surroundings(pool)
            shapes = models.summary(self.model).matrices
            rows = {str(devices): _shared(devices) for devices in self.devices}
            sections = [self._measure(pool, f"{self.model} over virtual devices", shapes, rows)]
            for width in self.widths:
                shapes = _plain(self.width_layers, width)
                sections.append(
                    self._measure_routes(pool, f"{width} channels, {self.width_layers} layers", shapes)
                )
            for depth in self.depths:
                shapes = _plain(depth, self.depth_width)
                sections.append(
                    self._measure_routes(pool, f"{depth} layers, {self.depth_width} channels", shapes)
                )
            if self.network:
                shapes = models.summary(self.network).matrices
                sections.append(self._measure_routes(pool, self.network, shapes))
        settings = {
            name: getattr(self, name)
            for name in ("rounds", "model", "width_layers", "depth_width", "network", "epsilon", "condition")
        }
        finish(self.results, "scaling", environment, settings, sections)

    def _measure_routes(self, pool: Pool, title: str, shapes: Shapes) -> dict[str, Any]:
        return self._measure(pool, title, shapes, choose("scaling", self.rows, ROUTES))

    def _measure(self, pool: Pool, title: str, shapes: Shapes, rows: Mapping[str, Row]) -> dict[str, Any]:
        say(title)
        kernels = drifted_kernels(shapes, self.condition)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernels.npz")
            save_kernels(path, kernels)
            given = {name: row.given(kernels=str(path), epsilon=self.epsilon) for name, row in rows.items()}
            measured = measure(pool, given, self.plan)
        title = f"{title}: {len(shapes)} matrices, {count_numbers(kernels) / 1e6:.2f} M numbers"
        return section(title, measured, median="auto floor")


def _shared(devices: int) -> Row:
    return Row(f"{devices} devices", "benchmarks.device_rows:shared", {"devices": devices})


def _plain(layers: int, width: int) -> Shapes:
    return {f"layer{number}": (3, 3, width, width) for number in range(layers)}
