"""What every bound does alike: count steps, and on due ones end at a bounded point."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from svb_jax._src.checks import check_count
from svb_jax._src.clip.matrix_functions import compute_dtype
from svb_jax._src.paths import key_names

ScalarOrSchedule = ArrayLike | optax.Schedule
# A named tuple of ``count``, ``step`` and ``stats``.
State = Any
# From the stepped values and the number of steps before this one to the bounded values, and what was seen.
Bounding = Callable[[list[jax.Array], jax.Array], tuple[list[jax.Array], Any]]

_LAST_STEP = jnp.iinfo(jnp.int32).max
# The extra argument by which Bound.apply says that it hands over parameters, not updates.
IS_STEPPED = "svb_jax_is_stepped"


@dataclass(frozen=True)
class Timing:
    """On which steps a bound acts, counted from 1."""

    every: ArrayLike
    until: ArrayLike | None

    def check(self, caller: str) -> None:
        """Raise where a number that is known is no sensible one."""
        check_count(caller, "every", self.every)
        if self.until is not None:
            check_count(caller, "until", self.until)

    def next_step(self, count: jax.Array) -> jax.Array:
        """Return the step after ``count``; at the end of its range the count goes back by ``every``.

        So what is due stays due, however long a run is.
        """
        return jnp.where(count == _LAST_STEP, count - self._limited(self.every), count) + 1

    def is_due(self, step: jax.Array) -> jax.Array:
        """Return whether to act at this step."""
        due = lax.rem(step, self._limited(self.every)) == 0
        return due if self.until is None else due & (step <= self._limited(self.until))

    def _limited(self, number: Any) -> jax.Array:
        # inject_hyperparams hands numbers over as arrays of a type of its own.
        if not isinstance(number, Tracer):
            number = min(int(number), _LAST_STEP)
        return jnp.maximum(jnp.asarray(number).astype(jnp.int32), 1)


class Targets:
    """The leaves that a bound moves: parameters, and their updates in a tree that may lack some of them.

    They are matched by path. Equinox's frozen leaves have no update: they are not moved, so not bounded
    either.

    Args:
      caller: The function to name in messages.
      updates: The step that would be taken, or the parameters after it: :meth:`Bound.apply` says so.
      params: The parameters before the step.
      extra_args: What ``update`` was called with besides.
    """

    def __init__(self, caller: str, updates: Any, params: Any, extra_args: dict[str, Any]) -> None:
        if params is None:
            raise ValueError(f"{caller} needs the parameters: call tx.update(grads, state, params).")
        self.is_stepped = extra_args.get(IS_STEPPED, False)
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(updates)
        self.updates = [update for _, update in paths]
        self._places = {key_names(path): place for place, (path, _) in enumerate(paths)}
        self._params = jax.tree_util.tree_flatten_with_path(params)[0]
        if self._places and not any(key_names(path) in self._places for path, _ in self._params):
            raise ValueError(
                f"{caller} matches updates and parameters by path, and found no path that both have: "
                f"{jax.tree_util.keystr(paths[0][0])!r} is in the updates alone."
            )
        self._caller = caller

    def place(self, index: int) -> int | None:
        """Return where the update of the ``index``-th parameter stands, or None if it has none."""
        return self._places.get(key_names(self._params[index][0]))

    def pair(self, index: int) -> tuple[int, jax.Array, jax.Array]:
        """Return where the update of the ``index``-th parameter stands, the parameter, and the update."""
        path, param = self._params[index]
        place = self._places[key_names(path)]
        param, update = jnp.asarray(param), jnp.asarray(self.updates[place])
        if param.shape != update.shape:
            raise ValueError(
                f"{self._caller} needs updates of the parameters' shapes, got {update.shape} for "
                f"{jax.tree_util.keystr(path)} of shape {param.shape}."
            )
        return place, param, update


def land_updates(
    targets: Targets, indices: Sequence[int], state: State, timing: Timing, bound: Bounding, keep_dtype: bool
) -> tuple[optax.Updates, State]:
    """Return the updates, on due steps with those at ``indices`` landing where ``bound`` says.

    One conditional holds all the work. Other steps pay for the counter and for one more kernel a leaf: with
    a conditional in between, XLA cannot fuse an update into the sum with its parameter. Parameters after
    their step pay for the counter alone.

    Args:
      targets: Parameters and updates, or parameters after their step.
      indices: Which of the flattened parameters are bounded; each has an update.
      state: A named tuple of ``count``, ``step`` and ``stats``.
      timing: When.
      bound: What lands where.
      keep_dtype: Whether updates of half-precision leaves stay so, or become float32.
    """
    step = timing.next_step(state.count)
    counted = state._replace(count=step)
    if not indices:
        return jax.tree.unflatten(targets.treedef, targets.updates), counted
    places, old, updates = map(list, zip(*map(targets.pair, indices), strict=True))
    if targets.is_stepped:
        old = []
    elif not keep_dtype:
        updates = [_widened(u, compute_dtype(p.dtype)) for u, p in zip(updates, old, strict=True)]

    def land(old: list[jax.Array], updates: list[jax.Array]) -> tuple[list[jax.Array], State]:
        before = [p.astype(compute_dtype(p.dtype)) for p in old]
        # Parameters after their step are a step from zero.
        before = before or [jnp.zeros((), compute_dtype(u.dtype)) for u in updates]
        stepped = [p + u.astype(p.dtype) for p, u in zip(before, updates, strict=True)]
        bounded, stats = bound(stepped, state.count)
        landed = list(map(_land, bounded, stepped, updates, before))
        # A copy: a state in which two leaves are one buffer cannot be donated.
        return landed, state._replace(count=step, step=jnp.copy(step), stats=stats)

    def leave(_: list[jax.Array], updates: list[jax.Array]) -> tuple[list[jax.Array], State]:
        return updates, counted

    due = timing.is_due(step)
    if isinstance(due, Tracer):
        landed, state = lax.cond(due, land, leave, old, updates)
    else:
        # Outside a jit the step is known, and a conditional would be compiled anew on every call.
        landed, state = (land if due else leave)(old, updates)
    for place, update in zip(places, landed, strict=True):
        targets.updates[place] = update
    return jax.tree.unflatten(targets.treedef, targets.updates), state


# Traced once for all leaves of a shape.
@jax.jit
def _land(bounded: jax.Array, stepped: jax.Array, update: jax.Array, param: jax.Array) -> jax.Array:
    """Return the update from a parameter to its bounded value."""
    # A weight that was left alone keeps its update; infinity minus infinity would be NaN.
    return jnp.where(bounded == stepped, update, (bounded - param).astype(update.dtype))


def _widened(update: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return update if update.dtype.itemsize >= dtype.itemsize else update.astype(dtype)
