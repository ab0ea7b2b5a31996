"""Reads the weights of anyone's network, by path, from the files that frameworks leave.

``.npz`` and safetensors need NumPy alone; Flax's msgpack and Orbax's folders need the extra ``[train]``.
Nothing is ever unpickled, and a file that is not what it says gets a sentence.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from svb_jax._src.extras import needs_extra
from svb_jax._src.npz import load_npz
from svb_jax._src.regular_files import check_regular, read_regular
from svb_jax.experiments.safetensors import read_safetensors

Weights = dict[str, np.ndarray]

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""What PyTorch and others write by default: programs, which could do anything to whoever reads them."""
PICKLE_HINT = (
    " Python's pickles, which can run code, are not read: save the weights with safetensors.torch.save_file."
)
MOST_OWNERS = 100
"""Levels above an array. No network nests its layers so deep, and JAX walks a tree by recursion."""


class UnreadableWeightsError(OSError):
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
      UnreadableWeightsError: It is damaged, no such file at all, too large for this machine, or has two
        arrays of one name.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    read = _read_folder if path.is_dir() else READERS.get(path.suffix)
    if read is None:
        raise FileNotFoundError(
            "inspect reads .npz, .safetensors and .msgpack files, folders of safetensors, Orbax checkpoints "
            f"and the folders of runs, got {path}.{PICKLE_HINT if path.suffix in PICKLES else ''}"
        )
    try:
        if not path.is_dir():
            check_regular(path)
        floating = {name: array for name, array in read(path).items() if _is_floating(array)}
        weights = _renamed(floating, lambda name: "/".join(_words(_printable(name))))
        return _without_value(_only_params(weights))
    except ModuleNotFoundError:
        raise
    except MemoryError as error:
        raise UnreadableWeightsError(f"{path} cannot be read: this machine has too little memory.") from error
    # Damaged files make zip, JSON, msgpack and Orbax raise whatever they like.
    except Exception as error:
        reason = _reason(error).replace(f"{path} is", "it is", 1)
        raise UnreadableWeightsError(f"{path} cannot be read: {reason}.") from error


def nested(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Turn paths into a tree, so that a leaf's own name is the last on its path.

    Example:
      >>> nested({"conv/kernel": np.ones(2), "head.weight": np.ones(3)})
      {'conv': {'kernel': array([1., 1.])}, 'head': {'weight': array([1., 1., 1.])}}
    """
    tree: dict[str, Any] = {}
    for path, array in weights.items():
        *owners, leaf = _words(path)
        if len(owners) > MOST_OWNERS:
            raise UnreadableWeightsError(
                f"{path[:40]!r}... lies {len(owners)} levels deep: {MOST_OWNERS} at most."
            )
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
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise ValueError("it holds one array and no names: save it by numpy.savez")
    return load_npz(path)


def _read_msgpack(path: Path) -> Weights:
    with needs_extra("inspect of a Flax msgpack file", "train"):
        from flax import serialization
    return _flat(serialization.msgpack_restore(read_regular(path)))


def _read_folder(path: Path) -> Weights:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        return _read_orbax(path)
    weights: Weights = {}
    for shard in shards:
        try:
            arrays = read_safetensors(shard)
        except ValueError as error:
            raise ValueError(f"in {shard.name}, {error}") from error
        if twice := sorted(arrays.keys() & weights.keys()):
            raise ValueError(f"it holds {twice[0]!r} in two files; name one of them")
        weights |= arrays
    return weights


def _read_orbax(path: Path) -> Weights:
    with needs_extra("inspect of an Orbax checkpoint", "train"):
        from svb_jax.experiments.orbax_weights import read_folder
    for file in path.rglob("*"):
        if not file.is_dir():
            check_regular(file)
    return _flat(read_folder(path))


READERS: Mapping[str, Callable[[Path], Weights]] = {
    ".npz": _read_npz,
    ".safetensors": read_safetensors,
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
    short = {path: "/".join(words[words.index("params") + 1 :]) for path, words in through.items()}
    # The parameters of several networks, or their averages, keep the paths that tell them apart.
    is_one = len({*short.values()}) == len(short)
    return {short[path] if is_one else path: weights[path] for path in through}


def _without_value(weights: Weights) -> Weights:
    """Drop the last word of ``conv/kernel/value``: NNX's states keep an array one level below its name."""
    owners = Counter(path.rpartition("/")[0] for path in weights)

    def is_variable(path: str) -> bool:
        # A leaf of this name beside others, such as query and key, is called so by the network itself.
        return path.endswith("/value") and owners[path.removesuffix("/value")] == 1

    return _renamed(weights, lambda path: path.removesuffix("/value") if is_variable(path) else path)


def _renamed(weights: Weights, rename: Callable[[str], str]) -> Weights:
    """Rename arrays, none of which may take another's place."""
    renamed: Weights = {}
    for path, array in weights.items():
        name = rename(path)
        if name in renamed:
            raise ValueError(f"there are two arrays called {name!r}")
        renamed[name] = array
    return renamed


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        # Its own text has the number too, which says nothing more.
        return f"{error.strerror} ({error.filename})"
    return _printable(str(error).strip().partition("\n")[0][:200].removesuffix(".")) or type(error).__name__


def _printable(text: str) -> str:
    """Escape what would command the terminal that a name is printed to."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_floating(array: np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.size > 0


def _words(path: str) -> list[str]:
    return path.replace(".", "/").split("/")
