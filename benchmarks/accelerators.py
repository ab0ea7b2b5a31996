"""Programs compiled for TPUs and GPUs ahead of time: what their own compilers plan, without any device.

python -m benchmarks accelerators --tpu-python PATH --gpu-python PATH    # hours on two cores
python -m benchmarks accelerators --targets v5e-1 --networks wrn_28_10 --rows floor project_auto --keep
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.measurement import Row, say
from benchmarks.options import RESULTS, choose
from benchmarks.processes import Pool, RowError
from benchmarks.results import load, make_result, save
from benchmarks.routes import METHODS
from benchmarks.tables import render, section
from svb_jax.ahead_of_time import TARGETS, find_target

TRANSFORMER = "transformer_1.3b"
# Examples a chip.
BATCHES = {
    **{"convnet_20": 128, "convnet_38": 128, "preact_resnet_68": 128, "wrn_28_10": 128, "wrn_28_16": 128},
    **{"inception_resnet_imagenet": 32, TRANSFORMER: 1},
}
STEP, PROJECT = "benchmarks.accelerator_rows:step", "benchmarks.accelerator_rows:project"
STEPS = {
    "sgd": Row("SGD", STEP, {"optimizer": "sgd"}),
    **{
        f"step_{method}": Row(f"SVB+BBN {method}", STEP, {"optimizer": "bounds after", "method": method})
        for method in METHODS
    },
    "chain_auto": Row("SVB+BBN in the chain", STEP, {"optimizer": "bounds in chain", "method": "auto"}),
    # What any bound pays where nothing is due: the update stands behind a conditional.
    "conditional": Row("SGD and a conditional alone", STEP, {"optimizer": "conditional"}),
    "muon": Row("optax Muon", STEP, {"optimizer": "muon"}),
}
PROJECTIONS = {
    "floor": Row("two products a matrix, the floor", "benchmarks.accelerator_rows:floor"),
    **{f"project_{method}": Row(f"svb_jax {method}", PROJECT, {"method": method}) for method in METHODS},
    "svd": Row("SVD vmapped by shape, by hand", "benchmarks.accelerator_rows:svd"),
}
ROWS = STEPS | PROJECTIONS
BY_HAND = ("floor", "svd")
"""Rows that know nothing of sharing work: for one chip, and for the transformer as XLA partitions it."""


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """Compile for TPUs and GPUs that need not be there, and read what their compilers planned."""

    targets: tuple[str, ...] = tuple(TARGETS)
    """What to compile for."""
    networks: tuple[str, ...] = tuple(BATCHES)
    """Networks; the transformer only where there are 16 chips."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which programs to compile."""
    limit: float = 600.0
    """Seconds after which a compilation is given up."""
    keep: bool = False
    """Keep what was recorded before of other rows; each row says of which commit it is."""
    tpu_python: str | None = None
    """An interpreter that has libtpu; this one if not given."""
    gpu_python: str | None = None
    """An interpreter that has JAX's CUDA plugin; this one if not given."""
    results: Path = RESULTS
    """The folder for the JSON and the plot."""

    @property
    def _pythons(self) -> dict[str, str]:
        return {"tpu": self.tpu_python or sys.executable, "cuda": self.gpu_python or sys.executable}

    def run(self) -> None:
        """Compile, print and save."""
        self._check()
        with Pool() as pool:
            environment = describe(pool, self._pythons.values())
        earlier = [each for each in load(self.results) if each["command"] == "accelerators"]
        sections = {part["title"]: part for part in earlier[0]["sections"]} if self.keep and earlier else {}
        result = make_result("accelerators", environment, {"limit": self.limit}, sections.values())
        for title, name, row in self._compile_all(environment["commit"][:12]):
            base, cycles = ("sgd", "cycles_idle") if name in STEPS else ("floor", "cycles_due")
            ratios = dict.fromkeys(("compile_seconds", "compile_cpu_seconds", "code_bytes", cycles), base)
            new = section(title, {}, "cycles_due", **ratios)
            part = sections.setdefault(title, new)
            rows = part["rows"] | {name: row}
            part["rows"] = {key: rows[key] for key in ("target", *ROWS) if key in rows}
            result = make_result("accelerators", environment, {"limit": self.limit}, sections.values())
            # After every row: hours of compiling must not be lost to what comes last.
            save(self.results, result)
        print(render(result))

    def _check(self) -> None:
        choose("accelerators", self.rows, ROWS)
        for name in self.targets:
            find_target(name)
        unknown = [name for name in self.networks if name not in BATCHES]
        if unknown:
            raise ValueError(
                f"benchmarks accelerators needs networks out of {', '.join(BATCHES)}; got {unknown[0]}."
            )
        for python in self._pythons.values():
            if shutil.which(python) is None:
                raise ValueError(f"benchmarks accelerators needs interpreters; got {python}.")

    def _compile_all(self, commit: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Return section, name and result of each row as soon as it is compiled."""
        for target in self.targets:
            absent = self._ask(Row(target, "benchmarks.accelerator_rows:check", {"target": target}))
            if "detail" in absent:
                yield target, "target", absent
                continue
            for network, name, row in self._programs(target):
                title = f"{target}, {network}: {'training step' if name in STEPS else 'projection alone'}"
                say(f"{title}, {row.label}")
                task = {"target": target, "network": network, "batch": BATCHES[network]}
                yield title, name, self._ask(row.given(**task)) | {"commit": commit}

    def _programs(self, target: str) -> Iterator[tuple[str, str, Row]]:
        chips = find_target(target).chips
        for network in self.networks:
            is_large = network == TRANSFORMER
            for name, row in choose("accelerators", self.rows, ROWS).items():
                is_shared = chips == 1 or is_large or name not in BY_HAND
                if is_shared and is_large == (chips == 16):
                    yield network, name, row

    def _ask(self, row: Row) -> dict[str, Any]:
        """Compile in a process of its own, which can be stopped."""
        python = self._pythons[find_target(row.task["target"]).platform]
        request = {"do": "prepare", "row": row.label, "factory": row.factory, "task": row.task}
        with Pool() as pool:
            pool.start(row.label, python)
            try:
                return {
                    "label": row.label,
                    "status": "compiled",
                    **pool.ask(row.label, self.limit, **request),
                }
            except RowError as reason:
                say(str(reason))
                return {"label": row.label, "status": reason.status, "detail": reason.detail}
