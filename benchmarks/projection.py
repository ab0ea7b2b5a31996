"""The projection of whole networks, beside every other way to compute it or something like it.

python -m benchmarks projection --torch-python PATH    # an hour on two cores
python -m benchmarks projection --models convnet_38 --rows auto svd_in_one_jit floor --rounds 3
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels import clip_exactly, count_numbers, drifted_kernels, save_kernels
from benchmarks.measurement import Row, measure, say
from benchmarks.options import Options, choose
from benchmarks.processes import Pool
from benchmarks.routes import METHODS
from benchmarks.tables import section
from benchmarks.without import MEASURES
from svb_jax import models

ROWS: Mapping[str, Row] = {
    "auto": Row("svb_jax auto", "benchmarks.jax_rows:project", {"method": "auto"}),
    "busy_1": Row("svb_jax auto, a busy process beside", "benchmarks.busy:project", {"processes": 1}),
    "busy_2": Row("svb_jax auto, two busy processes beside", "benchmarks.busy:project", {"processes": 2}),
    **{
        f"without_{name.replace(' ', '_')}": Row(
            f"svb_jax auto, without {name}", "benchmarks.without:project", {"without": name}
        )
        for name in MEASURES
    },
    **{
        method: Row(f"svb_jax {method}", "benchmarks.jax_rows:project", {"method": method})
        for method in METHODS
        if method != "auto"
    },
    "svd_in_one_jit": Row("jnp.linalg.svd per layer, one jit", "benchmarks.jax_rows:svd_in_one_jit"),
    "svd_one_after_another": Row(
        "jnp.linalg.svd per layer, a jit each", "benchmarks.jax_rows:svd_one_after_another"
    ),
    "svd_eager": Row("jnp.linalg.svd per layer, no jit", "benchmarks.jax_rows:svd_eager"),
    "scipy": Row("scipy.linalg.svd per layer", "benchmarks.scipy_rows:svd"),
    "torch": Row("torch.linalg.svd per layer, as it starts", "benchmarks.torch_rows:svd"),
    "torch_best": Row("torch.linalg.svd per layer, at its best", "benchmarks.torch_rows:svd_at_its_best"),
    "geotorch": Row("geotorch AlmostOrthogonal, a read", "benchmarks.torch_rows:almost_orthogonal"),
    "muon": Row("optax Muon's orthogonalisation", "benchmarks.jax_rows:muon"),
    "floor": Row("two products m·m·n, the floor", "benchmarks.jax_rows:floor"),
}
LONGEST_FOR_GEOTORCH = 1024
"""Its matrix exponentials are as large as a kernel's long side: 5760² on a wide network."""


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions(Options):
    """Options of what projects kernels."""

    epsilon: float = 0.5
    """The band is [1 / (1 + epsilon), 1 + epsilon]."""
    condition: float = 3.4
    """Largest singular value over the smallest, before.

    3.4 as after a first epoch, a third is clipped; 2.35 as later, a twentieth; 100 shows the exact route."""

    def measure_kernels(
        self, pool: Pool, title: str, shapes: Shapes, rows: Mapping[str, Row], is_checked: bool = False
    ) -> dict[str, Any]:
        """Return a section: rows that project kernels of these shapes, and if asked for, their errors."""
        say(title)
        kernels = drifted_kernels(shapes, self.condition)
        left_out = _left_out(rows, shapes)
        with tempfile.TemporaryDirectory() as folder:
            path, exact = Path(folder, "kernels.npz"), Path(folder, "exact.npz")
            save_kernels(path, kernels)
            if is_checked:
                save_kernels(exact, clip_exactly(kernels, self.epsilon))
            given = {
                name: row.given(kernels=str(path), epsilon=self.epsilon).run_by(self.torch)
                for name, row in rows.items()
                if name not in left_out
            }
            measured = measure(pool, given, self.plan, exact if is_checked else None)
        title = f"{title}: {len(shapes)} matrices, {count_numbers(kernels) / 1e6:.2f} M numbers"
        return section(title, measured | left_out, median="auto floor")


@dataclass(frozen=True, kw_only=True)
class Projection(ProjectionOptions):
    """Project all matrices of whole networks, in every way there is."""

    models: tuple[str, ...] = ("convnet_38", "preact_resnet_68", "wrn_28_10")
    """Networks of svb_jax.models, by name; wrn_28_16 is the largest."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which rows to measure."""

    def measure(self, pool: Pool) -> Iterator[dict[str, Any]]:
        """Yield a section for each network."""
        rows = choose("projection", self.rows, ROWS)
        for model in self.models:
            shapes = models.summary(model).matrices
            yield self.measure_kernels(pool, model, shapes, rows, is_checked=True)


def _left_out(rows: Mapping[str, Row], shapes: Shapes) -> dict[str, Any]:
    longest = max(max(shape[-1], math.prod(shape[:-1])) for shape in shapes.values())
    if "geotorch" not in rows or longest <= LONGEST_FOR_GEOTORCH:
        return {}
    detail = f"needs matrix exponentials of {longest} x {longest}"
    return {"geotorch": {"label": rows["geotorch"].label, "status": "left out", "detail": detail}}
