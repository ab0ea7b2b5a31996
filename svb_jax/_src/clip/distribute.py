"""Who clips what: each matrix has one owner among the devices of an axis or a mesh."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from svb_jax._src.clip import Method, with_sound_band
from svb_jax._src.clip.derivative import clip_tangent, clipped_tangent
from svb_jax._src.clip.exchange import ShardedBatch, clip_sharded
from svb_jax._src.clip.in_place import clip_in_place, is_too_large
from svb_jax._src.clip.shard_layout import Layout, Names, on_explicit_axes
from svb_jax._src.paths import named_leaves
from svb_jax._src.stats import Clipped

# Leaves are read as matrices one level above.
if TYPE_CHECKING:
    from svb_jax._src.leaves import MatrixLeaf

AxisName = str | tuple[str, ...]


class Band(NamedTuple):
    """The band of a leaf's matrices, and whether there is one: all are scalars."""

    lower: jax.Array
    upper: jax.Array
    is_active: jax.Array


def clip_over_devices(
    leaves: Sequence["MatrixLeaf"],
    values: Sequence[jax.Array],
    bands: Sequence[Band],
    method: Method,
    axis_name: AxisName | None,
    mesh: Mesh | None,
    shardings: Any,
) -> tuple[list[jax.Array], list[Clipped]]:
    """Clip leaves over an axis or, if none is named, over a mesh: that of ``shardings``, if none is given.

    Args:
      leaves: How each is read as matrices.
      values: The leaves.
      bands: One a leaf.
      method: The route.
      axis_name: As for :func:`clip_over_axis`.
      mesh: As for :func:`clip_over_mesh`.
      shardings: A tree of them like the parameters', if it is known how these lie on the mesh.
    """
    if axis_name is not None:
        return _differentiable(clip_over_axis, leaves, method, axis_name)(list(values), list(bands))
    known = _known_shardings(leaves, shardings)
    of_all = next(each for each in known if each is not None).mesh if mesh is None else mesh
    return _differentiable(clip_over_mesh, leaves, method, of_all, known)(list(values), list(bands))


def _differentiable(clip: Callable[..., Any], leaves: Sequence["MatrixLeaf"], *options: Any) -> Any:
    """Return a distributed clip that differentiates as a clip on one device does.

    The derivative of an exchange would count replicated values once per device.
    """

    @jax.custom_jvp
    def clip_distributed(values: list[jax.Array], bands: list[Band]) -> tuple[list[jax.Array], list[Clipped]]:
        return clip(leaves, values, bands, *options)

    @clip_distributed.defjvp
    def clip_distributed_jvp(primals: Any, tangents: Any) -> Any:
        clipped, seen = clip_distributed(*primals)
        changes = []
        for leaf, value, band, change, (lower, upper, _) in zip(leaves, *primals, *tangents, strict=True):
            tangent = leaf.to_batch(change, Band(lower, upper, band.is_active))
            moved = clip_tangent(with_sound_band(leaf.to_batch(value, band)), tangent)
            changes.append(leaf.from_batch(moved, value))
        return (clipped, seen), (changes, list(map(clipped_tangent, seen, changes)))

    return clip_distributed


def _known_shardings(leaves: Sequence["MatrixLeaf"], shardings: Any) -> list[NamedSharding | None]:
    """Return how each leaf lies on its mesh, None where the tree ``shardings`` does not say it."""
    if shardings is None:
        return [None] * len(leaves)
    by_label = {leaf.label: leaf.value for leaf in named_leaves(shardings)}
    found = [by_label.get(leaf.label) for leaf in leaves]
    known = [each if isinstance(each, NamedSharding) else None for each in found]
    if leaves and not any(known):
        raise ValueError(
            "svb_jax needs shardings= to be a tree of NamedSharding like the parameters, such as "
            f"jax.tree.map(lambda leaf: leaf.sharding, params); it has {found[0]!r} for {leaves[0].label!r}."
        )
    return known


def clip_over_axis(
    leaves: Sequence["MatrixLeaf"],
    values: Sequence[jax.Array],
    bands: Sequence[Band],
    method: Method,
    axis_name: AxisName,
) -> tuple[list[jax.Array], list[Clipped]]:
    """Clip leaves that are the same on all devices of an axis, each matrix on one of them.

    Args:
      leaves: How each is read as matrices.
      values: The leaves.
      bands: One a leaf.
      method: The route.
      axis_name: The axis of the ``pmap`` or ``shard_map`` that this runs in.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    nowhere = [((),) * len(leaf.shape) for leaf in leaves]
    clipped, seen = _clip_shards(leaves, values, bands, nowhere, method, axes)
    return clipped, [Clipped(value, *figures) for value, figures in zip(clipped, seen, strict=True)]


def clip_over_mesh(
    leaves: Sequence["MatrixLeaf"],
    values: Sequence[jax.Array],
    bands: Sequence[Band],
    method: Method,
    mesh: Mesh,
    shardings: Sequence[NamedSharding | None],
) -> tuple[list[jax.Array], list[Clipped]]:
    """Clip leaves under ``jit``, each matrix on one device of a mesh; they come back as they lay.

    Args:
      leaves: How each is read as matrices.
      values: The leaves.
      bands: One a leaf.
      method: The route.
      mesh: The devices.
      shardings: How each leaf lies on them; None where that is not known, which costs a gather.
    """
    known = [_sharding(*each, mesh) for each in zip(values, shardings, strict=True)]
    specs = tuple(_spec(*each) for each in zip(leaves, known, strict=True))
    values = [_lay(*each, mesh) for each in zip(values, specs, strict=True)]
    names = [_names(*each) for each in zip(leaves, specs, strict=True)]
    in_place = [index for index, leaf in enumerate(leaves) if is_too_large(leaf, names[index], method)]
    moved = [index for index in range(len(leaves)) if index not in in_place]
    # Bands are arrays, arguments of the program: calls with other epsilons need no compilation.
    mapped = _mapped(tuple(leaves[i] for i in moved), method, mesh, tuple(specs[i] for i in moved))
    pairs = zip(*mapped([values[i] for i in moved], [bands[i] for i in moved]), strict=True)
    results = dict(zip(moved, pairs, strict=True))
    for index in in_place:
        results[index] = clip_in_place(leaves[index], values[index], bands[index], names[index], mesh)
    clipped, seen = zip(*(results[index] for index in range(len(leaves))), strict=True)
    clipped = [_lay_back(*each, mesh) for each in zip(clipped, values, known, strict=True)]
    return clipped, [Clipped(value, *figures) for value, figures in zip(clipped, seen, strict=True)]


@functools.lru_cache(maxsize=256)
def _mapped(
    leaves: tuple["MatrixLeaf", ...], method: Method, mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> Any:
    """Return the function that runs on every device of the mesh, compiled once for calls that are alike."""
    names = [_names(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]

    def clip(values: list[jax.Array], bands: list[Band]) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        return _clip_shards(leaves, values, bands, names, method, tuple(mesh.axis_names))

    own, everywhere = list(specs), PartitionSpec()
    # Without the check: each round depends on the one before, whose varying axes it would seem to inherit.
    mapped = jax.shard_map(
        clip, mesh=mesh, in_specs=(own, everywhere), out_specs=(own, everywhere), check_vma=False
    )
    return jax.jit(mapped)


def _clip_shards(
    leaves: Sequence["MatrixLeaf"],
    values: Sequence[jax.Array],
    bands: Sequence[Band],
    names: Sequence[tuple[Names, ...]],
    method: Method,
    axes: Names,
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Clip the leaves of which this device holds these shards, split over the named axes."""
    batches = [_to_sharded_batch(*each) for each in zip(leaves, values, bands, names, strict=True)]
    results = clip_sharded(batches, axes, method)
    clipped = [
        _from_shards(leaf, value, result.shards)
        for leaf, value, result in zip(leaves, values, results, strict=True)
    ]
    return clipped, [result.seen for result in results]


def _to_sharded_batch(
    leaf: "MatrixLeaf", value: jax.Array, band: Band, names: tuple[Names, ...]
) -> ShardedBatch:
    """Return a device's part of a leaf, its axes in the order batch, rows, columns."""
    apart = _split(leaf, value)
    rank, num_batch = apart.ndim, apart.ndim - len(leaf.reduction) - _num_output_axes(leaf)
    along = _split_axes(leaf, names)
    batch_names = tuple(name for each in along[:num_batch] for name in each)
    layout = Layout(apart.shape[num_batch:rank], along[num_batch:], len(leaf.reduction), apart.dtype)
    shards = apart.reshape(math.prod(apart.shape[:num_batch]), *layout.sizes)
    return ShardedBatch(shards, layout, batch_names, *band)


def _from_shards(leaf: "MatrixLeaf", value: jax.Array, shards: jax.Array) -> jax.Array:
    like = jax.eval_shape(functools.partial(_split, leaf), value)
    return _join(leaf, shards.reshape(like.shape), value.shape)


def _sharding(value: jax.Array, given: NamedSharding | None, mesh: Mesh) -> NamedSharding | None:
    """Return how a value lies on the mesh, if its type, the array itself or the caller says it."""
    typed = jax.typeof(value).sharding
    candidates = [
        given,
        typed if any(typed.spec) else None,
        None if isinstance(value, Tracer) else value.sharding,
    ]
    for sharding in candidates:
        if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape):
            return sharding
    return None


def _spec(leaf: "MatrixLeaf", sharding: NamedSharding | None) -> PartitionSpec:
    """Return how a leaf lies when its matrices are exchanged.

    The outputs of grouped kernels are whole: their groups are matrices, and a shard may hold parts of them.
    """
    if sharding is None:
        return PartitionSpec()
    entries = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    whole = leaf.output if leaf.groups > 1 else ()
    return PartitionSpec(*(None if axis in whole else entry for axis, entry in enumerate(entries)))


def _names(leaf: "MatrixLeaf", spec: PartitionSpec) -> tuple[Names, ...]:
    entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
    return tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries
    )


def _lay(value: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    # On explicit axes shard_map wants its arguments laid out as it says; on automatic ones XLA moves them.
    if AxisType.Explicit not in mesh.axis_types or not isinstance(value, Tracer):
        return value
    return jax.sharding.reshard(value, on_explicit_axes(NamedSharding(mesh, spec)))


def _lay_back(clipped: jax.Array, value: jax.Array, known: NamedSharding | None, mesh: Mesh) -> jax.Array:
    """Return clipped values laid out as they were."""
    if not isinstance(value, Tracer):
        return jax.device_put(clipped, value.sharding) if known is not None else clipped
    if AxisType.Explicit in mesh.axis_types and known is not None:
        clipped = jax.sharding.reshard(clipped, on_explicit_axes(known))
    elif known is not None:
        return jax.lax.with_sharding_constraint(clipped, known)
    return shard_alike(clipped, value)[0] if AxisType.Auto in mesh.axis_types else clipped


def _num_output_axes(leaf: "MatrixLeaf") -> int:
    """Return how many axes of :func:`_split` make up the columns."""
    return 1 if leaf.groups > 1 else len(leaf.output)


def _split(leaf: "MatrixLeaf", value: jax.Array) -> jax.Array:
    """Return a leaf, or a device's part of it, with its axes in the order batch, groups, rows, columns.

    None are merged but the outputs of grouped kernels: sharded axes can be moved, but not always merged.
    """
    apart = value.transpose(leaf.order)
    if leaf.groups == 1:
        return apart
    start = len(leaf.batch)
    sizes = apart.shape[: start + len(leaf.reduction)]
    return jnp.moveaxis(apart.reshape(*sizes, leaf.groups, -1), -2, start)


def _join(leaf: "MatrixLeaf", apart: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the leaf of this shape that :func:`_split` would read as these."""
    if leaf.groups > 1:
        apart = jnp.moveaxis(apart, len(leaf.batch), -2)
    return apart.reshape([shape[a] for a in leaf.order]).transpose(leaf.inverse_order)


def _split_axes(leaf: "MatrixLeaf", items: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return what belongs to each of the leaf's axes in the order of :func:`_split`'s."""
    batch, reduction, output = (
        tuple(items[a] for a in axes) for axes in (leaf.batch, leaf.reduction, leaf.output)
    )
    return (*batch, (), *reduction, ()) if leaf.groups > 1 else batch + reduction + output
