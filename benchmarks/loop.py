"""What training costs beside its steps: the input pipeline, and the loop with its bar and checkpoints.

python -m benchmarks loop    # five minutes on two cores
python -m benchmarks loop --model convnet_8 --rounds 2
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurement import Row, measure
from benchmarks.options import Options
from benchmarks.processes import Pool
from benchmarks.tables import section

# One process for all: their differences are smaller than those between processes.
ROWS = {
    "step": Row("the step, on a ready batch", "benchmarks.loop_rows:step", {"augment": True}, group="jax"),
    "plain_step": Row(
        "the step without augmentation", "benchmarks.loop_rows:step", {"augment": False}, group="jax"
    ),
    "input": Row("input pipeline", "benchmarks.loop_rows:feed", {"augment": True}, group="jax"),
    "loop": Row("the loop around it", "benchmarks.loop_rows:around", {"augment": True}, group="jax"),
}


@dataclass(frozen=True, kw_only=True)
class Loop(Options):
    """Train, and see what the input pipeline and the loop add to the bare steps."""

    rounds: int = 4
    """How often all rows are called in turn."""
    seconds: float = 3.0
    """How long a row is called in each round; at least once in any case."""
    limit: float = 600.0
    """Seconds after which a call is stopped and its row given up."""
    model: str = "convnet_20"
    """The network, one of svb_jax.models."""
    width: float = 1.0
    """Multiplies every channel count of the network."""
    dataset: str = "digits"
    """digits, synthetic, cifar10 or cifar100: the more images, the rarer its checkpoints, and the longer."""
    image_size: int | None = None
    """Average the images down to this size."""
    data_dir: Path = Path("data")
    """Holds the data sets that do not come with this package."""
    batch: int = 128
    """Images in a batch."""

    def measure(self, pool: Pool) -> Iterator[dict[str, Any]]:
        """Yield the one section."""
        fields = ("model", "width", "dataset", "image_size")
        task = {name: getattr(self, name) for name in fields}
        task |= {"batch_size": self.batch, "data_dir": str(self.data_dir.absolute())}
        # Made out here: a row's process is ended from outside, and cleans nothing up.
        with tempfile.TemporaryDirectory(prefix="loop-") as folder:
            rows = {name: row.given(folder=folder, **task) for name, row in ROWS.items()}
            yield section("What a run consists of", with_parts(measure(pool, rows, self.plan)))


def with_parts(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Add what each row takes a step, and as a part of the bare step: the median within rounds.

    The row without augmentation counts by what it lacks.
    """
    if not all("seconds" in row for row in rows.values()):
        return dict(rows)

    def a_step(name: str) -> list[float]:
        return [value / rows[name]["facts"]["steps"] for value in rows[name]["seconds"]]

    def with_part(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        parts = [one / step for one, step in zip(a_step(name), a_step("step"), strict=True)]
        part = (
            statistics.median(1 - one for one in parts) if name == "plain_step" else statistics.median(parts)
        )
        return {**row, "a_step_seconds": statistics.median(a_step(name)), "of_a_step_share": part}

    return {name: with_part(name, row) for name, row in rows.items()}
