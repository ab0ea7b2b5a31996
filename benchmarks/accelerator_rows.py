"""Programs to compile ahead of time: steps, projections and their yardsticks, by abstract shapes alone."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

import svb_jax
from benchmarks import transformer
from benchmarks.training import EVERY, SVB_EPSILON, make_bounds, make_loss, make_step, sgd
from benchmarks.workload import Task, Workload, nothing
from svb_jax import models
from svb_jax.ahead_of_time import compile_plan, find_target, well_conditioned

AXIS = "chips"
matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Setting(NamedTuple):
    """A network, and how its arrays lie on the chips."""

    loss: Callable[..., Any]
    params: Any
    batch_stats: Any
    batch: Any
    dimension_numbers: Any
    mesh: Mesh
    is_sharded: bool
    """Whether parameters are sharded over the chips (FSDP) or replicated."""

    @property
    def shared(self) -> Mesh | None:
        """The mesh over which projections are shared; None on one chip."""
        return self.mesh if self.mesh.size > 1 else None

    @property
    def shardings(self) -> Any:
        """How the parameters lie on the chips; None on one chip."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.place(self.params)) if self.shared else None

    def place(self, tree: Any) -> Any:
        """Return abstract parameters or what is shaped like them, with shardings."""
        return jax.tree.map(lambda leaf: self._struct(leaf, self._spec(leaf.shape)), tree)

    def place_batch(self) -> Any:
        """Return the abstract batch, each chip with its own examples."""
        return jax.tree.map(lambda leaf: self._struct(leaf, PartitionSpec(AXIS)), self.batch)

    def _struct(self, leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Shard the longest axis that the chips divide, but not that of the layers."""
        axes = [axis for axis in range(len(shape) == 3, len(shape)) if shape[axis] % self.mesh.size == 0]
        if not (self.is_sharded and axes and np.prod(shape) > 2**16):
            return PartitionSpec()
        longest = max(axes, key=lambda axis: shape[axis])
        return PartitionSpec(*(AXIS if axis == longest else None for axis in range(longest + 1)))


def check(task: Task) -> Workload:
    """Make sure that the compiler for ``task["target"]`` is installed."""
    find_target(task["target"]).check()
    return Workload(run=lambda _: nothing())


def step(task: Task) -> Workload:
    """A training step by ``task["optimizer"]``; bounds go by the route ``task["method"]``."""
    setting = _setting(task)
    tx, bounds = _optimizer(task, setting)
    states = [jax.eval_shape(each.init, setting.params) for each in (tx, *bounds)]
    state = setting.place((setting.params, setting.batch_stats, *states))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(setting.mesh, PartitionSpec())
    compiled = jax.jit(make_step(setting.loss, tx, bounds), donate_argnums=0, out_shardings=shardings)
    return _planned(setting, lambda: compiled.lower(state, setting.place_batch()), is_scheduled=True)


def project(task: Task) -> Workload:
    """The projection of all matrices by the route ``task["method"]``."""
    setting = _setting(task)

    def bound(params: Any) -> Any:
        return svb_jax.project(
            params,
            SVB_EPSILON,
            method=task["method"],
            dimension_numbers=setting.dimension_numbers,
            mesh=setting.shared,
            shardings=setting.shardings,
        )

    return _on_kernels(setting, bound)


def floor(task: Task) -> Workload:
    """The two products that no projection by its Gram matrix can do without, equal matrices as one batch."""

    def multiply_twice(tall: jax.Array) -> jax.Array:
        return matmul(tall, matmul(tall.mT, tall))

    return _on_batches(_setting(task), multiply_twice)


def svd(task: Task) -> Workload:
    """The projection as one would write it by hand: an SVD vmapped over equal matrices."""

    def clip(tall: jax.Array) -> jax.Array:
        u, s, vt = jnp.linalg.svd(tall, full_matrices=False)
        return matmul(u * jnp.clip(s, 1 / (1 + SVB_EPSILON), 1 + SVB_EPSILON)[..., None, :], vt)

    return _on_batches(_setting(task), clip)


def _planned(setting: Setting, lower: Callable[[], jax.stages.Lowered], is_scheduled: bool) -> Workload:
    expected = well_conditioned(SVB_EPSILON)
    plan, _ = compile_plan(lower, setting.mesh.size, is_scheduled=is_scheduled, expected=expected)
    kernels = jax.tree.leaves(_kernels(setting))
    facts = dataclasses.asdict(plan) | {
        "planned_bytes": plan.planned_bytes,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(setting.params)),
        "matrices": sum(
            np.prod(leaf.shape[:-2], dtype=int) if len(leaf.shape) == 3 else 1 for leaf in kernels
        ),
    }
    return Workload(run=lambda _: nothing(), facts=jax.tree.map(_plain, facts))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _kernels(setting: Setting) -> Any:
    """Return the parameters without any but kernels: of others, programs would hold a copy each."""

    def keep(path: Any, leaf: Any) -> Any:
        return leaf if path[-1].key == "kernel" else None

    return jax.tree_util.tree_map_with_path(keep, setting.params)


def _on_kernels(setting: Setting, function: Callable[[Any], Any]) -> Workload:
    """Plan a function of the kernels, which come back as they lie."""
    params = setting.place(_kernels(setting))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    compiled = jax.jit(function, out_shardings=shardings)
    return _planned(setting, lambda: compiled.lower(params), is_scheduled=False)


def _on_batches(setting: Setting, function: Callable[[jax.Array], jax.Array]) -> Workload:
    """Plan a function of tall matrices, called once for all that have the same shape."""

    def apply(kernels: list[jax.Array]) -> list[jax.Array]:
        tall = [_to_tall(kernel) for kernel in kernels]
        new = list(tall)
        order = sorted(range(len(tall)), key=lambda index: tall[index].shape[1:])
        for _, group in itertools.groupby(order, key=lambda index: tall[index].shape[1:]):
            members = list(group)
            sizes = np.cumsum([len(tall[index]) for index in members])[:-1]
            results = jnp.split(function(jnp.concatenate([tall[index] for index in members])), sizes)
            for index, result in zip(members, results, strict=True):
                new[index] = result
        return [_from_tall(result, kernel.shape) for result, kernel in zip(new, kernels, strict=True)]

    kernels = setting.place(jax.tree.leaves(_kernels(setting)))
    return _planned(setting, lambda: jax.jit(apply).lower(kernels), is_scheduled=False)


def _to_tall(kernel: jax.Array) -> jax.Array:
    stack = kernel if kernel.ndim == 3 else kernel.reshape(1, -1, kernel.shape[-1])
    return stack if stack.shape[1] >= stack.shape[2] else stack.mT


def _from_tall(stack: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    rows = shape[1] if len(shape) == 3 else int(np.prod(shape[:-1]))
    return (stack if stack.shape[1] == rows else stack.mT).reshape(shape)


def _optimizer(
    task: Task, setting: Setting
) -> tuple[optax.GradientTransformationExtraArgs, list[svb_jax.Bound]]:
    """Return an optimizer and the bounds that follow its steps."""
    if task["optimizer"] == "muon":
        muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=_muon_dimension_numbers)
        return optax.with_extra_args_support(muon), []
    if task["optimizer"] == "sgd":
        return sgd(), []
    if task["optimizer"] == "conditional":
        return optax.chain(sgd(), optax.conditionally_transform(optax.scale(-1.0), _is_due)), []
    bounds = make_bounds(
        has_batch_norm=bool(jax.tree.leaves(setting.batch_stats)),
        method=task["method"],
        dimension_numbers=setting.dimension_numbers,
        mesh=setting.shared,
        shardings=setting.shardings,
    )
    return (sgd(), bounds) if task["optimizer"] == "bounds after" else (optax.chain(sgd(), *bounds), [])


def _is_due(step: ArrayLike, **extra_args: Any) -> jax.Array:
    del extra_args
    return jnp.asarray(step) % EVERY == EVERY - 1


def _muon_dimension_numbers(params: Any) -> Any:
    def numbers(path: Any, leaf: Any) -> Any:
        if path[-1].key != "kernel":
            return None
        axes = tuple(range(leaf.ndim == 3, leaf.ndim - 1))
        return optax.contrib.MuonDimensionNumbers(axes, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(numbers, params)


def _setting(task: Task) -> Setting:
    mesh = Mesh(np.array(find_target(task["target"]).devices()), (AXIS,))
    make = _transformer if task["network"] == "transformer_1.3b" else _convolutional
    return make(task, mesh)


def _transformer(task: Task, mesh: Mesh) -> Setting:
    tokens = jax.ShapeDtypeStruct((task["batch"] * mesh.size, transformer.CONTEXT + 1), jnp.int32)
    return Setting(
        loss=functools.partial(transformer.loss, activations=NamedSharding(mesh, PartitionSpec(AXIS))),
        params=transformer.abstract_params(),
        batch_stats={},
        batch=tokens,
        dimension_numbers=svb_jax.scan_stacks("blocks"),
        mesh=mesh,
        is_sharded=True,
    )


def _convolutional(task: Task, mesh: Mesh) -> Setting:
    model = models.make(task["network"], dtype=jnp.bfloat16)
    size = task["batch"] * mesh.size
    images = jax.ShapeDtypeStruct((size, *model.image_shape), jnp.float32)
    variables: Any = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)
    return Setting(
        loss=make_loss(model),
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        batch=(images, jax.ShapeDtypeStruct((size,), jnp.int32)),
        dimension_numbers=None,
        mesh=mesh,
        is_sharded=False,
    )
