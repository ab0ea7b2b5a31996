"""Single-crop top-1 and top-5 errors over a whole test set."""

from collections.abc import Callable, Iterable
from typing import Any

from svb_jax.training.metrics import Totals, zero_totals
from svb_jax.training.parallel import Engine, fetch
from svb_jax.training.step import Batch


def evaluate(
    eval_step: Callable[[Totals, Any, Any, Batch], Totals],
    engine: Engine,
    params: Any,
    batch_stats: Any,
    batches: Iterable[Batch],
) -> dict[str, float]:
    """Return the test errors in percent.

    Args:
      eval_step: What the engine made of ``make_eval_step``.
      engine: The devices.
      params: On the devices.
      batch_stats: On the devices.
      batches: This host's share of the test set.

    Returns:
      ``test_loss``, ``test_error`` and ``test_error_top5``.
    """
    totals = engine.replicate(zero_totals())
    for batch in batches:
        totals = eval_step(totals, params, batch_stats, engine.shard(batch))
    return {f"test_{name}": float(value) for name, value in fetch(totals).means().items()}
