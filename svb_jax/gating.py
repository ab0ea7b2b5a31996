"""What every bound does alike: wait for its step, then land the update on a bounded point."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from svb_jax.checks import check_count, check_epsilon
from svb_jax.cutting import computed_zero
from svb_jax.packing import Packing, pack_small

ScalarOrSchedule = ArrayLike | optax.Schedule
# A mask as ``optax.masked`` takes it: a tree of booleans, or a function of the parameters.
Where = Any | Callable[[Any], Any]
Bounded = tuple[list[jax.Array], Any]
Bound = Callable[[Packing, list[jax.Array], ArrayLike], Bounded]


@dataclass(frozen=True)
class Timing:
    """When a bound acts, and how wide its band is then."""

    epsilon: ScalarOrSchedule
    every: ArrayLike
    until: ArrayLike | None

    def check(self, caller: str) -> None:
        """Raise where a number that is known is no sensible one."""
        if not callable(self.epsilon):
            check_epsilon(caller, self.epsilon)
        check_count(caller, "every", self.every)
        if self.until is not None:
            check_count(caller, "until", self.until)

    def is_due(self, step: jax.Array) -> jax.Array:
        """Return whether to act at this step, counted from 1."""
        # inject_hyperparams hands numbers over as arrays of its own type.
        # No step is negative, so that what remains is never either.
        due = lax.rem(step, jnp.asarray(self.every).astype(step.dtype)) == 0
        return due if self.until is None else due & (step <= jnp.asarray(self.until).astype(jnp.int32))

    def epsilon_after(self, count: jax.Array) -> ArrayLike:
        """Return the band's epsilon when ``count`` steps are behind."""
        return self.epsilon(count) if callable(self.epsilon) else self.epsilon


def replace_updates(
    updates: optax.Updates,
    state: Any,
    params: Any,
    indices: list[int],
    timing: Timing,
    bound: Bound,
    keep_dtype: bool,
) -> tuple[optax.Updates, Any]:
    """Return the updates, on due steps with those at ``indices`` landing where ``bound`` says.

    One conditional holds all the work: other steps pay for its arguments at most.

    Args:
      updates: the step that would be taken.
      state: a named tuple of ``count``, ``step`` and ``reading``.
      params: the parameters before the step.
      indices: which of the flattened leaves are bounded.
      timing: when.
      bound: from the stepped values, packed into rows, and epsilon to the bounded rows and what was seen.
      keep_dtype: whether updates of half-precision leaves stay so, or become float32.
    """
    all_updates, treedef = jax.tree.flatten(updates)
    all_params = jax.tree.leaves(params)
    old = [all_params[i] for i in indices]
    steps = [all_updates[i] for i in indices]
    if not keep_dtype:
        steps = [
            u.astype(jnp.promote_types(u.dtype, exact_dtype(p))) for u, p in zip(steps, old, strict=True)
        ]
    packing = pack_small(old, steps)
    count = jnp.asarray(optax.safe_increment(state.count))

    # One device packs its steps before the conditional, which then has one array to return; to keep them for
    # it apart from their use would take a kernel for each shape. Several devices may have them in shards, and
    # would have to gather these at every step.
    is_packed = jax.device_count() == 1
    zero = computed_zero(count)

    def land(old: list[jax.Array], steps: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        moves = steps if is_packed else packing.pack(steps)
        before = [p.astype(exact_dtype(p)) for p in packing.pack(old)]
        stepped = [p + u.astype(p.dtype) for p, u in zip(before, moves, strict=True)]
        bounded, reading = bound(packing, stepped, timing.epsilon_after(state.count))
        # What the bound left alone keeps its step: infinite weights have no difference to land on.
        landed = [
            jnp.where(b == s, u, (b - p).astype(u.dtype))
            for b, s, u, p in zip(bounded, stepped, moves, before, strict=True)
        ]
        landed = landed if is_packed else packing.unpack(landed, steps, zero)
        return landed, state._replace(count=count, step=count, reading=reading)

    def leave(old: list[jax.Array], steps: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        del old
        return steps, state._replace(count=count)

    due, moves = timing.is_due(count), packing.pack(steps) if is_packed else steps
    if isinstance(due, Tracer):
        landed, state = lax.cond(due, land, leave, old, moves)
    else:
        # Outside a jit the step is known, and a conditional would be compiled anew on every call.
        landed, state = (land if due else leave)(old, moves)
    landed = packing.unpack(landed, steps, zero) if is_packed else landed
    for index, step in zip(indices, landed, strict=True):
        all_updates[index] = step
    return jax.tree.unflatten(treedef, all_updates), state


def masked(init_fn: Any, update_fn: Any, where: Where | None) -> optax.GradientTransformationExtraArgs:
    """Return the transformation, kept to the leaves that ``where`` selects."""
    tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return tx if where is None else optax.masked(tx, where)


def exact_dtype(array: jax.Array) -> jnp.dtype:
    """Return the type to bound an array in: half types go through float32."""
    return jnp.promote_types(array.dtype, jnp.float32)
