"""``svb compile``: whether a row's training step fits an accelerator, and what it costs there.

svb compile table1/svb+bbn --target v5e-8             # needs the TPU's compiler: pip install libtpu
svb compile table1/svb+bbn --target v5e-8 --record    # for the columns of svb list --costs
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from svb_jax import models
from svb_jax.ahead_of_time import Plan, Target, compile_plan, find_target, well_conditioned
from svb_jax.experiments import catalogue
from svb_jax.experiments.console import PlainConsole
from svb_jax.experiments.listing import CLASSES, IMAGES
from svb_jax.experiments.plans import format_hours, save_plan, step_seconds
from svb_jax.experiments.record import RESULTS
from svb_jax.training.config import TrainConfig
from svb_jax.training.feed import STREAMED
from svb_jax.training.optimizer import Span, hyperparameters, make_optimizer
from svb_jax.training.parallel import AXIS
from svb_jax.training.sampling import steps_per_epoch
from svb_jax.training.state import create_state
from svb_jax.training.step import Batch, make_train_step


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile a row's training step for an accelerator, ahead of time and without having one.

    Prints whether it fits, what it costs and how long compiling took. Nothing is trained or allocated.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME/ROW")]
    """A row of an experiment, at full scale."""
    target: str = "v5e-8"
    """The accelerator and its number of chips: v5e-1, v5e-8, v5e-16, v6e-8, h100-8 ..."""
    batch_size: int | None = None
    """Images per step over all chips; the row's own if not given."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The compute type; the row's own if not given."""
    record: bool = False
    """Keep the compiler's figures, for the columns of `list --costs`."""
    results: Path = RESULTS
    """Where they are kept."""

    def run(self) -> int:
        """Compile and print; the exit code is 1 where the step does not fit."""
        target = find_target(self.target)
        config = self._config()
        devices = target.devices()
        try:
            expected = well_conditioned(config.svb_epsilon or 0.0)
            plan, _ = compile_plan(lambda: lower_step(config, devices), target.chips, expected=expected)
        except jax.errors.JaxRuntimeError as error:
            # The TPU's compiler refuses what its chip cannot hold.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{self.name} does not fit {target.name}: {str(error).splitlines()[0]}")
            return 1
        PlainConsole().print(plan_table(self.name, config, target, plan))
        if self.record:
            print(f"Recorded in {save_plan(self.name, config, target, plan, self.results)}.")
        return 0 if plan.planned_bytes <= target.memory_bytes else 1

    def _config(self) -> TrainConfig:
        experiment, rows = catalogue.find(self.name)
        if len(rows) != 1 or not isinstance(experiment.rows[rows[0]], TrainConfig):
            trained = [row for row, config in experiment.rows.items() if isinstance(config, TrainConfig)]
            known = ", ".join(f"{experiment.name}/{row}" for row in trained) or "none here"
            raise ValueError(f"compile needs one row that trains a network, of {known}; got {self.name!r}.")
        chosen = {"batch_size": self.batch_size, "dtype": self.dtype}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        return replace(experiment.rows[rows[0]], **given)


def lower_step(config: TrainConfig, devices: Sequence[Any]) -> jax.stages.Lowered:
    """Trace and lower the step of a run, data-parallel over devices that need not be there.

    Args:
      config: The run; its data set must be CIFAR or ImageNet.
      devices: As :meth:`svb_jax.ahead_of_time.Target.devices` returns them.
    """
    chips, mesh = len(devices), Mesh(np.array(devices), (AXIS,))
    if config.batch_size % (chips * config.accumulate):
        raise ValueError(
            f"compile needs a batch_size that {chips} chips x {config.accumulate} micro-batches divide, "
            f"got {config.batch_size}."
        )
    span = _span(config)
    model = models.make(
        config.model,
        num_classes=CLASSES[config.dataset],
        width=config.width,
        depth=config.depth,
        dtype=jnp.dtype(config.dtype),
        axis_name=AXIS,
    )
    is_streamed = config.dataset in STREAMED
    step = make_train_step(config, model, span, augments=config.augment and not is_streamed, mirror=True)

    def on_own_row(state: Any, hyper: Any, batch: Any) -> Any:
        return step(state, hyper, jax.tree.map(lambda row: row[0], batch))

    hyper = jax.eval_shape(lambda: hyperparameters(config))
    shape = _image_shape(config)
    state = jax.eval_shape(
        lambda: create_state(model, make_optimizer(config, hyperparameters(config), span), 0, shape)
    )
    mapped = jax.shard_map(
        on_own_row, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P(), check_vma=False
    )
    arguments = [_placed(tree, mesh, P()) for tree in (state, hyper)]
    return jax.jit(mapped, donate_argnums=0).lower(*arguments, _placed(_batch(config, chips), mesh, P(AXIS)))


def plan_table(name: str, config: TrainConfig, target: Target, plan: Plan) -> Table:
    """What the compiler planned, for a reader who asks whether to rent the machine."""
    table = Table(title=f"{name} on {target.name}", show_header=False)
    fits = "fits" if plan.planned_bytes <= target.memory_bytes else "does not fit"
    table.add_row(
        "memory a chip", f"{fits}: {_gigabytes(plan.planned_bytes)} of {_gigabytes(target.memory_bytes)}"
    )
    table.add_row("of it code, temporary", f"{_gigabytes(plan.code_bytes)}, {_gigabytes(plan.temp_bytes)}")
    table.add_row("compiled in", f"{plan.compile_seconds:.0f} s, traced in {plan.trace_seconds:.0f} s")
    table.add_row("traffic a step, all chips", _gigabytes(plan.idle_traffic_bytes or 0))
    if plan.cycles_idle is not None and plan.cycles_due is not None:
        least, most = plan.cycles_due
        table.add_row("cycles a step, estimated", f"{plan.cycles_idle:,.0f}")
        table.add_row(
            "cycles of a projecting step, well-conditioned",
            f"{least:,.0f}" + (f" to {most:,.0f}" if most > least else ""),
        )
        if (seconds := step_seconds(plan, target)) is not None:
            hours = format_hours(seconds * _span(config).total_steps)
            # The estimate knows no waiting: for the host, for memory that others use, for other chips.
            table.add_row(
                "time at the clock's rate", f"at least {1000 * seconds:.1f} ms a step, {hours} h in all"
            )
    return table


def _span(config: TrainConfig) -> Span:
    per_epoch = steps_per_epoch(IMAGES[config.dataset], config.batch_size)
    return Span(per_epoch, config.epochs * per_epoch)


def _image_shape(config: TrainConfig) -> tuple[int, int, int]:
    size = config.image_size or STREAMED.get(config.dataset, 32)
    return size, size, 3


def _batch(config: TrainConfig, chips: int) -> Batch:
    """Return the shapes of a global batch, with one row a chip."""
    rows = chips, config.accumulate, config.batch_size // (chips * config.accumulate)
    return Batch(
        images=jax.ShapeDtypeStruct((*rows, *_image_shape(config)), jnp.uint8),
        labels=jax.ShapeDtypeStruct(rows, jnp.int32),
        stop=jax.ShapeDtypeStruct((chips,), jnp.float32),
    )


def _placed(tree: Any, mesh: Mesh, spec: P) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
