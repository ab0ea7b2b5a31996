"""Leaves by path: how a path is written, and which patterns match it, in any library's tree."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

Value = TypeVar("Value")
KeyPath = tuple[Any, ...]


class NamedLeaf(NamedTuple):
    """A leaf with the names that lead to it.

    Attributes:
      names: One for each key on the way, as the user wrote it. No two leaves of a tree share them.
      path: The names joined by "/", which patterns are compared with.
      label: The path as it is shown: spelt out in full where two leaves would read alike.
      value: The leaf itself.
      owner: The object whose attribute the leaf is (an Equinox module), or None in a dict or an NNX variable.
    """

    names: tuple[str, ...]
    path: str
    label: str
    value: Any
    owner: Any = None

    @property
    def name(self) -> str:
        """Return the last name."""
        return self.names[-1] if self.names else ""

    @property
    def module(self) -> str:
        """Return the name of the module that the leaf belongs to."""
        # Haiku's names contain "/".
        return "/".join(self.names[:-1]).rpartition("/")[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the leaf's shape: () for what is no array."""
        return getattr(self.value, "shape", ())

    @property
    def rank(self) -> int:
        """Return the number of axes: 0 for what is no array."""
        return len(self.shape)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[NamedLeaf]:
    """Return the leaves in the tree's order. Paths that would read alike are spelt out."""
    if isinstance(tree, jax.Array) and tree.ndim == 0 and jnp.issubdtype(tree.dtype, jnp.integer):
        raise TypeError(
            "svb_jax got a number of steps in place of the parameters. Under optax.inject_hyperparams, name "
            "where and dimension_numbers in static_args: it takes other functions for schedules."
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = [key_names(key_path) for key_path, _ in flat]
    joined = ["/".join(each) for each in names]
    repeated = {path for path, count in Counter(joined).items() if count > 1}
    return [
        NamedLeaf(
            names=each,
            path=path,
            label=jax.tree_util.keystr(key_path) if path in repeated else path,
            value=value,
            owner=_owner(tree, key_path),
        )
        for each, path, (key_path, value) in zip(names, joined, flat, strict=True)
    ]


def map_leaves(function: Callable[[NamedLeaf], Any], tree: Any) -> Any:
    """Return the tree with each leaf replaced by what the function makes of it."""
    return jax.tree.unflatten(jax.tree.structure(tree), [function(leaf) for leaf in named_leaves(tree)])


def is_hidden(node: Any) -> bool:
    """Return whether optax.masked or optax.partition put this in a leaf's place."""
    return isinstance(node, optax.MaskedNode)


def key_names(key_path: KeyPath) -> tuple[str, ...]:
    """Return the names on a path, without the attribute in which NNX's variables keep their array."""
    return tuple(map(_key_name, key_path[:-1] if _is_wrapped(key_path) else key_path))


def _is_wrapped(key_path: KeyPath) -> bool:
    return bool(key_path) and key_path[-1] == GetAttrKey("value")


def _owner(tree: Any, key_path: KeyPath) -> Any:
    if not key_path or not isinstance(key_path[-1], GetAttrKey) or _is_wrapped(key_path):
        return None
    node: Any = tree
    for key in key_path[:-1]:
        match key:
            case GetAttrKey(name=name):
                node = getattr(node, name, None)
            case DictKey(key=index) | SequenceKey(idx=index):
                node = node[index]
            case _:
                return None
    return node


def _key_name(key: Any) -> str:
    match key:
        case DictKey(key=name) | GetAttrKey(name=name) | SequenceKey(idx=name):
            return str(name)
    return str(getattr(key, "key", key))


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Return whether one of the patterns matches a path, by the rules of :func:`paths`."""
    return any(_matches(pattern, path) for pattern in patterns)


def _matches(pattern: str, path: str) -> bool:
    if "/" not in pattern:
        return any(fnmatchcase(name, pattern) for name in path.split("/"))
    # A path that begins with "/" lets a leading "*/" match nothing.
    rooted, pattern = f"/{path}", pattern.rstrip("/")
    pattern = pattern if pattern.startswith(("*", "/")) else f"/{pattern}"
    return fnmatchcase(rooted, pattern) or fnmatchcase(rooted, f"{pattern}/*")


def value_by_path(caller: str, values: Mapping[str, Value], path: str) -> Value:
    """Return the value of the first pattern that matches a path, or raise.

    Args:
      caller: The function to name in the message, and its argument.
      values: From patterns, by the rules of :func:`paths`, to values.
      path: The leaf's.
    """
    for pattern, value in values.items():
        if _matches(pattern, path):
            return value
    raise ValueError(
        f"{caller} needs a pattern for every matrix, but none of {', '.join(map(repr, values))} matches "
        f"{path!r}. Add '*' as the last pattern to cover the rest."
    )
