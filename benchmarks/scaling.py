"""How the projection grows: over devices, with the width and the depth of a network, at ImageNet's size.

python -m benchmarks scaling    # half an hour on two cores
python -m benchmarks scaling --model convnet_38 --devices 1 2 --widths 64 128 --depths 8 16
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measurement import Row
from benchmarks.options import choose
from benchmarks.processes import Pool
from benchmarks.projection import ROWS, ProjectionOptions, Shapes
from svb_jax import models

# Ours decompose one matrix at a time, so that one process is safe for all three.
ROUTES = {name: replace(ROWS[name], group="routes") for name in ("auto", "svd", "floor")}


@dataclass(frozen=True, kw_only=True)
class Scaling(ProjectionOptions):
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

    def measure(self, pool: Pool) -> Iterator[dict[str, Any]]:
        """Yield a section for the devices, for each width and depth, and for the whole network."""
        rows = choose("scaling", self.rows, ROUTES)
        devices = {str(devices): _shared(devices) for devices in self.devices}
        shapes = models.summary(self.model).matrices
        yield self.measure_kernels(pool, f"{self.model} over virtual devices", shapes, devices)
        for width in self.widths:
            title = f"{width} channels, {self.width_layers} layers"
            yield self.measure_kernels(pool, title, _plain(self.width_layers, width), rows)
        for depth in self.depths:
            title = f"{depth} layers, {self.depth_width} channels"
            yield self.measure_kernels(pool, title, _plain(depth, self.depth_width), rows)
        if self.network:
            yield self.measure_kernels(pool, self.network, models.summary(self.network).matrices, rows)


def _shared(devices: int) -> Row:
    return Row(f"{devices} devices", "benchmarks.device_rows:shared", {"devices": devices})


def _plain(layers: int, width: int) -> Shapes:
    return {f"layer{number}": (3, 3, width, width) for number in range(layers)}
