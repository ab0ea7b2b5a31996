"""Training steps in JAX: plain, bounded by SVB and BBN, with spectral normalisation; and parts of them."""

import functools
import json
import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

import svb_jax
from benchmarks.jax_rows import clip_by_svd, compiled_facts
from benchmarks.kernels import drifted_kernels
from benchmarks.training import (
    BBN_EPSILON,
    EVERY,
    SVB_EPSILON,
    bounded,
    make_bounds,
    make_loss,
    make_step,
    sgd,
)
from benchmarks.workload import Task, Workload
from svb_jax import models
from svb_jax.ahead_of_time.fusions import list_fusions
from svb_jax.models.convolution import convolve, step_conv
from svb_jax.training.memory import keep_freed_memory


class SpectrallyNormalized(nn.Module):
    """A layer under Flax's SpectralNorm, which takes one step of power iteration a call."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the layer's output."""
        return nn.SpectralNorm(self.layer)(x, update_stats=True)


def train(task: Task) -> Workload:
    """One step of training by ``task["optimizer"]``.

    That is ``sgd``, ``svb+bbn``, ``svb+bbn after it``, ``svb+bbn by svd``, ``by hand``, ``scaling`` or
    ``spectral_norm``.

    With ``task["projects"]`` the step is one that projects. The very same program runs on other steps.
    """
    shared = {name: value for name, value in task.items() if name != "projects"}
    compiled, facts, (params, batch_stats, opt_state), batch = _compiled_step(json.dumps(shared))
    state = params, batch_stats, _on_the_eve(opt_state) if task.get("projects") else opt_state
    return Workload(
        run=lambda fresh: jax.block_until_ready(compiled(fresh, batch)),
        # The step takes its state's memory for its own, as in training.
        fresh=lambda: jax.block_until_ready(jax.tree.map(jnp.copy, state)),
        facts=facts,
    )


def update(task: Task) -> Workload:
    """The optimizer's part of a step alone, from gradients to new weights; its task is that of ``train``."""
    _, params, batch_stats, _ = _loss(task)
    tx = _optimizer(task["optimizer"])
    grads = jax.tree.map(lambda leaf: 1e-3 * leaf, params)

    def take(params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, batch_stats=batch_stats)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    start = params, _on_the_eve(opt_state) if task.get("projects") else opt_state
    compiled = jax.jit(take, donate_argnums=(0, 1)).lower(*start).compile()
    return Workload(
        run=lambda fresh: jax.block_until_ready(compiled(*fresh)),
        fresh=lambda: jax.block_until_ready(jax.tree.map(jnp.copy, start)),
    )


def compile_train(task: Task) -> Workload:
    """Tracing and compiling the step of ``train``, from nothing. Only this process's own time counts."""
    step, state, batch = _training(task)

    def compile_step(_: None) -> tuple[float, jax.stages.Compiled]:
        begin = time.process_time()
        compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        return time.process_time() - begin, compiled

    fusions = list_fusions(compile_step(None)[1].as_text() or "")
    facts = {"fusions": len(fusions), "different_fusions": len(set(fusions))}
    return Workload(
        compile_step, fresh=jax.clear_caches, facts=facts, seconds=operator.itemgetter(0), is_warm=True
    )


def forward(task: Task) -> Workload:
    """The loss of a batch, in training mode."""
    loss, *arguments = _loss(task)
    return _compiled(loss, *arguments)


def gradients(task: Task) -> Workload:
    """The loss of a batch and its gradients."""
    loss, *arguments = _loss(task)
    return _compiled(jax.value_and_grad(loss, has_aux=True), *arguments)


def convolution(task: Task) -> Workload:
    """One 3 × 3 convolution or a gradient of it; ``task["part"]``: ``forward``, ``input`` or ``kernel``."""
    size, channels = task["size"], task["channels"]
    images = jnp.ones((task["batch"], size, size, channels))
    kernel = jnp.ones((3, 3, channels, channels))

    def layer(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolve(images, kernel, (1, 1), "SAME")

    def pull_back(argument: int, images: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(layer, images, kernel)[1](cotangent)[argument]

    if task["part"] == "forward":
        return _compiled(layer, images, kernel)
    argument = {"input": 0, "kernel": 1}[task["part"]]
    return _compiled(functools.partial(pull_back, argument), images, kernel, jnp.ones_like(images))


def _compiled(function: Callable[..., Any], *arguments: Any) -> Workload:
    compiled, facts = compiled_facts(lambda: jax.jit(function).lower(*arguments))
    return Workload(run=lambda _: jax.block_until_ready(compiled(*arguments)), facts=facts)


# Of the last step only: those before are not called again, and would keep their memory.
@functools.lru_cache(maxsize=1)
def _compiled_step(task: str) -> tuple[Any, dict[str, Any], Any, Any]:
    step, state, batch = _training(json.loads(task))
    compiled, facts = compiled_facts(lambda: jax.jit(step, donate_argnums=0).lower(state, batch))
    facts["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    return compiled, facts, state, batch


def _training(task: Task) -> tuple[Callable[..., Any], Any, Any]:
    loss, params, batch_stats, batch = _loss(task)
    bounds = make_bounds() if task["optimizer"] == "svb+bbn after it" else []
    tx = sgd() if bounds else _optimizer(task["optimizer"])
    state = params, batch_stats, tx.init(params), *(bound.init(params) for bound in bounds)
    return make_step(loss, tx, bounds), state, batch


def _loss(task: Task) -> tuple[Callable[..., tuple[jax.Array, Any]], Any, Any, Any]:
    """Return the loss with its new statistics, and its arguments: parameters, statistics and a batch."""
    # As in training; and before jax starts its threads.
    keep_freed_memory()
    conv = _normalized_conv if task.get("optimizer") == "spectral_norm" else step_conv()
    model = models.make(task["model"], conv=conv, width=task["width"])
    shape = task["batch"], task["image_size"], task["image_size"], model.image_shape[-1]
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    batch = jnp.asarray(images), jnp.arange(task["batch"]) % model.num_classes
    shapes = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), batch[0])
    variables = _filled(shapes, task["condition"])
    return make_loss(model), variables["params"], variables["batch_stats"], batch


def _normalized_conv(*arguments: Any, **options: Any) -> nn.Module:
    return SpectrallyNormalized(step_conv()(*arguments, **options))


def _optimizer(name: str) -> optax.GradientTransformationExtraArgs:
    if name in ("by hand", "scaling"):
        return optax.chain(sgd(), _when_due({"by hand": _bound_by_hand, "scaling": _scale_weights}[name]))
    if name.startswith("svb+bbn"):
        return bounded(method="svd" if name.endswith("svd") else "auto")
    return sgd()


def _bound_by_hand(updates: Any, params: Any, batch_stats: Any) -> Any:
    """Bound all as one would write it down: a SVD for each layer."""
    clip = clip_by_svd(SVB_EPSILON)

    def bound_leaf(path: Any, step: jax.Array, old: jax.Array) -> jax.Array:
        name, new = path[-1].key, old + step
        if name == "kernel":
            return clip(new) - old
        if name != "scale":
            return step
        stats = batch_stats
        for key in path[:-1]:
            stats = stats[key.key]
        deviation = jnp.sqrt(stats["var"] + 1e-5)
        centre = jnp.mean(new / deviation) * deviation
        return jnp.clip(new, centre / (1 + BBN_EPSILON), centre * (1 + BBN_EPSILON)) - old

    return jax.tree_util.tree_map_with_path(bound_leaf, updates, params)


def _scale_weights(updates: Any, params: Any, batch_stats: Any) -> Any:
    """Bound nothing: what is left is the price of changing every weight at some steps only."""
    del batch_stats
    return jax.tree.map(lambda step, old: 0.5 * (old + step) - old, updates, params)


def _when_due(replace: Callable[[Any, Any, Any], Any]) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that replaces the updates at due steps, inside a conditional."""

    def update(
        updates: Any, state: Any, params: Any = None, *, batch_stats: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        is_due = (state + 1) % EVERY == 0
        updates = lax.cond(is_due, replace, lambda updates, *_: updates, updates, params, batch_stats)
        return updates, state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros((), jnp.int32), update)


def _on_the_eve(opt_state: Any) -> Any:
    """Return the optimizer's state one step before a projection."""
    bounds = svb_jax.BoundSingularValuesState, svb_jax.BoundBatchNormScalesState

    def advance(node: Any) -> Any:
        return node._replace(count=jnp.asarray(EVERY - 1)) if isinstance(node, bounds) else node

    return jax.tree.map(advance, opt_state, is_leaf=lambda node: isinstance(node, bounds))


def _filled(shapes: Any, condition: float) -> Any:
    """Return variables with kernels that a projection has to clip, and all else as at the beginning.

    Filled in here because running the model's own initialisers takes longer than all the rest.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    leaves = dict(zip(names, (leaf.shape for _, leaf in flat), strict=True))
    kernels = drifted_kernels(
        {name: shape for name, shape in leaves.items() if name.endswith("/kernel")}, condition
    )

    def fill(name: str) -> jax.Array:
        is_zero = name.endswith(("/bias", "/mean"))
        return (
            jnp.asarray(kernels[name]) if name in kernels else jnp.full(leaves[name], 0.0 if is_zero else 1.0)
        )

    return jax.tree.unflatten(treedef, map(fill, names))
