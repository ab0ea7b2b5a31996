"""Which leaves a bound is kept to: ``where=``, in all its forms."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from svb_jax._src.bound import Bound
from svb_jax._src.paths import is_hidden, map_leaves, matches_any, named_leaves
from svb_jax._src.suggestions import nearest


def paths(*patterns: str, exclude: str | Sequence[str] = ()) -> Callable[[Any], Any]:
    """Choose leaves by the pattern of their path: a mask for ``where=`` and for ``optax.masked``.

    A leaf's path reads ``encoder/block_0/attention/query/kernel``, alike in Linen's dicts, NNX's states,
    Haiku's parameters and Equinox's modules.

    - A pattern without "/" is compared with each name on the path: ``attention``, ``Conv_*``, ``kernel``.
    - A pattern with "/" is compared with the path from its start: ``encoder/block_0``, ``*/query/kernel``.
    - Either chooses what it names and everything below.
    - ``*`` stands for any characters, "/" among them; a leading ``*/`` also for none, so that
      ``*/attention/*`` finds attention at the top of the tree too. ``?`` stands for one character, and
      ``[01]`` for one of these.

    Args:
      *patterns: A leaf is chosen if one of them matches. None means all leaves.
      exclude: Patterns of leaves that are not chosen after all.

    Returns:
      A function from the parameters to a tree of booleans. It raises if a pattern matches no leaf.

    Example:
      >>> import jax.numpy as jnp, svb_jax
      >>> stem, head = {"kernel": jnp.ones((3, 4))}, {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}
      >>> params = {"stem": stem, "head": head}
      >>> svb_jax.paths("head")(params)
      {'head': {'bias': True, 'kernel': True}, 'stem': {'kernel': False}}
      >>> svb_jax.paths("*/kernel", exclude="stem")(params)
      {'head': {'bias': False, 'kernel': True}, 'stem': {'kernel': False}}
    """
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)

    def mask(params: Any) -> Any:
        check_patterns("paths", [*patterns, *excluded], params)
        return map_leaves(
            lambda leaf: (
                (not patterns or matches_any(patterns, leaf.path)) and not matches_any(excluded, leaf.path)
            ),
            params,
        )

    return mask


def check_patterns(caller: str, patterns: Iterable[str], params: Any) -> None:
    """Raise where a pattern matches no leaf, unless optax.masked or optax.partition may have hidden it."""
    leaves = named_leaves(params, is_leaf=is_hidden)
    # optax.tree_map_params passes a tree without leaves to see a state's structure.
    if not leaves or any(is_hidden(leaf.value) for leaf in leaves):
        return
    known = [leaf.path for leaf in leaves]
    for pattern in patterns:
        if not any(matches_any([pattern], path) for path in known):
            raise ValueError(f"{caller} found no leaf that {pattern!r} matches; {nearest(pattern, known)}.")


def as_mask(where: Any) -> Any:
    """Return ``where`` as ``optax.masked`` takes it: a function of the parameters, or a tree of booleans.

    Args:
      where: One of these, or a pattern or several for :func:`paths`.
    """
    if isinstance(where, str):
        return paths(where)
    # A tree may be callable too: an Equinox module with booleans for leaves.
    if where is None:
        return None
    if callable(where) and jax.tree_util.all_leaves([where]):
        return lambda params: _checked_mask(where(params))
    leaves = jax.tree.leaves(where)
    if isinstance(where, list | tuple) and leaves and all(isinstance(leaf, str) for leaf in leaves):
        return paths(*leaves)
    return _checked_mask(where)


def _checked_mask(mask: Any) -> Any:
    wrong = [leaf for leaf in jax.tree.leaves(mask) if not _is_boolean(leaf)]
    if wrong or (isinstance(mask, list | tuple) and not mask):
        found = repr(wrong[0]) if wrong else "nothing"
        raise ValueError(
            "svb_jax needs where= to be a pattern of paths or a list of them, a tree of booleans, or a "
            f"function from the parameters to such a tree, got {type(mask).__name__} with {found} in it."
        )
    return mask


def _is_boolean(leaf: Any) -> bool:
    return isinstance(leaf, bool) or (np.ndim(leaf) == 0 and getattr(leaf, "dtype", None) == np.bool_)


def hide(params: Any, where: Any) -> Any:
    """Return the parameters with what ``where`` does not select hidden, as ``optax.masked`` hides it."""
    mask = as_mask(where)
    if mask is None:
        return params
    if callable(mask) and jax.tree_util.all_leaves([mask]):
        mask = mask(params)
    return jax.tree.map(lambda is_chosen, part: part if is_chosen else optax.MaskedNode(), mask, params)


def masked(init_fn: Any, update_fn: Any, where: Any) -> Bound:
    """Return the bound, kept to the leaves that ``where`` selects."""
    bound = Bound(init_fn, update_fn)
    return bound if where is None else Bound(*optax.masked(bound, as_mask(where)))
