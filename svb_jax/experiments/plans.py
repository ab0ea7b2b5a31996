"""What an accelerator's compiler planned for a row: one small JSON a program and target.

Rows that differ in ε alone are the same program, and share a plan.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from svb_jax.ahead_of_time import Plan, Target
from svb_jax.experiments.record import RESULTS
from svb_jax.training.config import TrainConfig
from svb_jax.training.durable import write_whole
from svb_jax.training.run_folder import current_commit


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """The compiler's figures for one program, and what they are of.

    Attributes:
      row: The row that was compiled, ``NAME/ROW``.
      target: The accelerator and its number of chips.
      planned_bytes: All memory on a chip.
      step_seconds: Of a step that does not project, the estimated cycles at the clock's rate; None where
        the compiler estimates none.
      plan: All its figures.
      jax: The version.
      commit: Of this package.
    """

    row: str
    target: str
    planned_bytes: int
    step_seconds: float | None
    plan: Mapping[str, Any]
    jax: str
    commit: str | None


def step_seconds(plan: Plan, target: Target) -> float | None:
    """Return the time of a step that does not project, at the clock's rate: it knows no waiting."""
    if plan.cycles_idle is None or not target.clock_hz:
        return None
    return plan.cycles_idle / target.clock_hz


def format_hours(seconds: float) -> str:
    """Return a time in hours, with two digits or all whole hours.

    Example:
      >>> format_hours(60), format_hours(600 * 3600)
      ('0.017', '600')
    """
    hours = seconds / 3600
    return f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"


def plan_path(config: TrainConfig, target: str, results: Path = RESULTS) -> Path:
    """Return where a program's plan is kept.

    Example:
      >>> config = TrainConfig(model="preact_resnet_68", dataset="cifar10", svb_epsilon=0.5)
      >>> plan_path(config, "v5e-8").as_posix()
      'experiments/results/compiled/v5e-8/preact_resnet_68-cifar10-128-float32-svb.json'
    """
    bounds = {"svb": config.svb_epsilon, "bbn": config.bbn_epsilon}
    method = "+".join(name for name, epsilon in bounds.items() if epsilon is not None) or "sgd"
    program = f"{config.model}-{config.dataset}-{config.batch_size}-{config.dtype}-{method}.json"
    return results / "compiled" / target / program


def save_plan(row: str, config: TrainConfig, target: Target, plan: Plan, results: Path = RESULTS) -> Path:
    """Write a plan, whole or not at all, and return where."""
    record = PlanRecord(
        row=row,
        target=target.name,
        planned_bytes=plan.planned_bytes,
        step_seconds=step_seconds(plan, target),
        plan=asdict(plan),
        jax=jax.__version__,
        commit=current_commit(),
    )
    path = plan_path(config, target.name, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(asdict(record), indent=1) + "\n").encode())
    return path


def load_plan(config: TrainConfig, target: str, results: Path = RESULTS) -> PlanRecord | None:
    """Return what was planned for a row's program, or None if it was never compiled."""
    path = plan_path(config, target, results)
    if not path.is_file():
        return None
    try:
        return PlanRecord(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"load_plan needs what `svb compile --record` wrote, got {path}: {error}") from error
