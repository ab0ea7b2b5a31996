"""Reads the weights of anyone's network, by path, from the files that frameworks leave.

``.npz`` and safetensors need NumPy alone; Flax's msgpack and Orbax's folders need the extra ``[train]``.
Nothing is ever unpickled, and a file that is not what it says gets a sentence.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from svb_jax._src.extras import needs_extra

Weights = dict[str, np.ndarray]

SAFETENSORS_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
}
# Floats of eight bits and fewer are weights up to factors that are kept elsewhere, as in packed integers.
SKIPPED_TYPES = re.compile(r"[IU]\d+|BOOL|C\d+|F[468]_?\w*")


class UnreadableWeightsError(ValueError):
    """A file that does not hold what its name says."""


def load_weights(path: Path) -> Weights:
    """Read weights by their paths from a file or a folder.

    Args:
      path: An ``.npz``, ``.safetensors`` or Flax ``.msgpack`` file; a folder of safetensors, an Orbax
        checkpoint, the folder of a checkpoint manager, or the folder of a run of ``svb train``.

    Returns:
      From a path such as ``conv/kernel`` to an array. Where some paths go through ``params``, only those,
      from there on, and none through ``opt_state``: an optimizer's state holds arrays of the same names.

    Raises:
      FileNotFoundError: There is no such file, or it is of another kind.
      UnreadableWeightsError: It is damaged, or no such file at all.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    read = _read_folder if path.is_dir() else READERS.get(path.suffix)
    if read is None:
        raise FileNotFoundError(
            "inspect reads .npz, .safetensors and .msgpack files, folders of safetensors, Orbax checkpoints "
            f"and the folders of runs, got {path}."
        )
    try:
        arrays = read(path)
    # Damaged files make zip, JSON, msgpack and Orbax raise whatever they like.
    except (ModuleNotFoundError, UnreadableWeightsError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise UnreadableWeightsError(f"{path} cannot be read: {reason}") from error
    floating = {name: array for name, array in arrays.items() if _is_floating(array)}
    weights = {"/".join(_words(name)): _without_float64(array) for name, array in floating.items()}
    return _without_value(_only_params(weights))


def nested(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Turn paths into a tree, so that a leaf's own name is the last on its path.

    Example:
      >>> nested({"conv/kernel": np.ones(2), "head.weight": np.ones(3)})
      {'conv': {'kernel': array([1., 1.])}, 'head': {'weight': array([1., 1., 1.])}}
    """
    tree: dict[str, Any] = {}
    for path, array in weights.items():
        *owners, leaf = _words(path)
        branch = tree
        for owner in owners:
            branch = branch.setdefault(owner, {})
            if not isinstance(branch, dict):
                raise UnreadableWeightsError(f"{path!r} goes through {owner!r}, which is an array itself.")
        if leaf in branch:
            raise UnreadableWeightsError(f"There are two arrays called {path!r}, or arrays below it.")
        branch[leaf] = array
    return tree


def _read_npz(path: Path) -> Weights:
    # NumPy leaves a file open that it cannot read; ours is closed.
    with path.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise UnreadableWeightsError(f"{path} holds one array and no names: save it by numpy.savez.")
        return dict(arrays)


def _read_safetensors(path: Path) -> Weights:
    """Read the format itself: the header's length, a JSON header, the arrays' bytes."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or end > len(content):
        raise UnreadableWeightsError(f"{path} is cut short: its header should end at byte {end}.")
    header = json.loads(content[8:end])
    data = memoryview(content)[end:]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {
        name: _safetensor(path, name, entry, data)
        for name, entry in entries.items()
        if not SKIPPED_TYPES.fullmatch(entry["dtype"])
    }


def _safetensor(path: Path, name: str, entry: Mapping[str, Any], data: memoryview) -> np.ndarray:
    kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in SAFETENSORS_TYPES:
        raise UnreadableWeightsError(f"{path} holds {name!r} as {kind}, which inspect does not read.")
    dtype = np.dtype(SAFETENSORS_TYPES[kind])
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise UnreadableWeightsError(
            f"{path} is damaged: {name!r} of shape {shape} has no room for its bytes."
        )
    return np.frombuffer(data[start:end], dtype).reshape(shape)


def _read_msgpack(path: Path) -> Weights:
    with needs_extra("inspect of a Flax msgpack file", "train"):
        from flax import serialization
    return _flat(serialization.msgpack_restore(path.read_bytes()))


def _read_folder(path: Path) -> Weights:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        return _read_orbax(path)
    weights: Weights = {}
    for shard in shards:
        arrays = _read_safetensors(shard)
        if twice := sorted(arrays.keys() & weights.keys()):
            raise UnreadableWeightsError(f"{path} holds {twice[0]!r} in two files; name one of them.")
        weights |= arrays
    return weights


def _read_orbax(path: Path) -> Weights:
    with needs_extra("inspect of an Orbax checkpoint", "train"):
        from svb_jax.experiments.orbax_weights import read_folder
    return _flat(read_folder(path))


READERS: Mapping[str, Callable[[Path], Weights]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".msgpack": _read_msgpack,
}


def _flat(tree: Any, prefix: str = "") -> Weights:
    """Return a tree's arrays by path; lists and tuples count their entries."""
    if isinstance(tree, list | tuple):
        tree = {str(number): entry for number, entry in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {prefix: np.asarray(tree)}
    below = [_flat(entry, f"{prefix}/{name}" if prefix else str(name)) for name, entry in tree.items()]
    return {path: array for arrays in below for path, array in arrays.items()}


def _only_params(weights: Weights) -> Weights:
    chosen = {path: words for path in weights if "opt_state" not in (words := _words(path))}
    through = {path: words for path, words in chosen.items() if "params" in words[:-1]}
    if not through:
        return {path: weights[path] for path in chosen}
    return {"/".join(words[words.index("params") + 1 :]): weights[path] for path, words in through.items()}


def _without_value(weights: Weights) -> Weights:
    """Drop the last word of ``conv/kernel/value``: NNX's states keep an array one level below its name."""
    owners = Counter(path.rpartition("/")[0] for path in weights)

    def is_variable(path: str) -> bool:
        # A leaf of this name beside others, such as query and key, is called so by the network itself.
        return path.endswith("/value") and owners[path.removesuffix("/value")] == 1

    return {
        path.removesuffix("/value") if is_variable(path) else path: array for path, array in weights.items()
    }


def _is_floating(array: np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.size > 0


def _without_float64(array: np.ndarray) -> np.ndarray:
    """JAX warns of each float64 array and does the same."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _words(path: str) -> list[str]:
    return path.replace(".", "/").split("/")
