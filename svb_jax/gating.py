"""What every bound does alike: act on due steps only, land the update on a bounded point, check its timing."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

# A mask as ``optax.masked`` takes it: a tree of booleans, or a function of the parameters.
Where = Any | Callable[[Any], Any]


def replace_updates(
    updates: optax.Updates,
    params: optax.Params,
    indices: list[int],
    due: jax.Array,
    bound: Callable[[list[jax.Array]], tuple[list[jax.Array], Any]],
    state: Any,
    count: jax.Array,
    keep_dtype: bool,
) -> tuple[optax.Updates, Any]:
    """Return the updates, on due steps with those at ``indices`` landing where ``bound`` says.

    One conditional holds all the work, so that other steps pay nothing.
    """
    all_updates, treedef = jax.tree.flatten(updates)
    all_params = jax.tree.leaves(params)
    old = [all_params[i] for i in indices]
    steps = [all_updates[i] for i in indices]
    exact = [jnp.promote_types(p.dtype, jnp.float32) for p in old]
    kept = [
        u.dtype if keep_dtype else jnp.promote_types(u.dtype, e) for u, e in zip(steps, exact, strict=True)
    ]

    def land(old: list[jax.Array], steps: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        old = [p.astype(e) for p, e in zip(old, exact, strict=True)]
        bounded, seen = bound([p + u.astype(p.dtype) for p, u in zip(old, steps, strict=True)])
        return [(b - p).astype(k) for b, p, k in zip(bounded, old, kept, strict=True)], seen

    def leave(old: list[jax.Array], steps: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        del old
        return [u.astype(k) for u, k in zip(steps, kept, strict=True)], state._replace(count=count)

    steps, state = lax.cond(due, land, leave, old, steps)
    for index, step in zip(indices, steps, strict=True):
        all_updates[index] = step
    return jax.tree.unflatten(treedef, all_updates), state


def check_epsilon(caller: str, epsilon: ArrayLike) -> None:
    """Raise unless ``epsilon`` is finite and not negative, as far as it is known."""
    if not is_traced(epsilon) and not 0 <= float(epsilon) < math.inf:
        raise ValueError(f"{caller} needs a finite epsilon >= 0, got {epsilon}.")


def masked(init_fn: Any, update_fn: Any, where: Where | None) -> optax.GradientTransformationExtraArgs:
    tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return tx if where is None else optax.masked(tx, where)


def is_due(count: jax.Array, every: ArrayLike, until: ArrayLike | None) -> jax.Array:
    # inject_hyperparams hands numbers over as arrays of its own type.
    due = count % jnp.asarray(every).astype(jnp.int32) == 0
    return due if until is None else due & (count <= jnp.asarray(until).astype(jnp.int32))


def is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def check_timing(caller: str, epsilon: optax.ScalarOrSchedule, every: int, until: int | None) -> None:
    if not callable(epsilon):
        check_epsilon(caller, epsilon)
    for name, number in (("every", every), ("until", until)):
        if number is None and name == "until":
            continue
        if not is_traced(number) and not (float(number) >= 1 and float(number).is_integer()):
            raise ValueError(f"{caller} needs {name} to be a whole number of steps, 1 or more, got {number}.")


def check_params(caller: str, params: Any) -> None:
    if params is None:
        raise ValueError(f"{caller} needs the parameters: call tx.update(grads, state, params).")
