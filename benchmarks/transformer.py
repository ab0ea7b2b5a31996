"""A decoder-only transformer of 1.3 billion parameters, its blocks scanned: kernels are (layers, in, out)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, CONTEXT = 24, 2048, 8192, 16, 32_000, 2048
KERNELS = {
    **dict.fromkeys(("query", "key", "value", "out"), (LAYERS, WIDTH, WIDTH)),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
}


def abstract_params() -> dict[str, Any]:
    """Return the shapes of all parameters; the embedding is the classifier too."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    blocks: dict[str, Any] = {name: {"kernel": shape(*sizes)} for name, sizes in KERNELS.items()}
    blocks |= {name: {"scale": shape(LAYERS, WIDTH)} for name in ("norm1", "norm2")}
    return {"blocks": blocks, "embedding": shape(VOCABULARY, WIDTH), "norm": {"scale": shape(WIDTH)}}


def loss(
    params: Any, batch_stats: Any, tokens: jax.Array, activations: NamedSharding
) -> tuple[jax.Array, Any]:
    """Return the mean loss of the next token, computed in bfloat16, and no statistics.

    Activations are held where their examples are, so that kernels are gathered and not activations.
    """

    def call(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return lax.with_sharding_constraint(jax.checkpoint(_block)(x, block), activations), None

    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = lax.with_sharding_constraint(half["embedding"][tokens[:, :-1]], activations)
    x, _ = lax.scan(call, x, half["blocks"])
    logits = _normalize(x, half["norm"]) @ half["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
    return jnp.mean(losses), batch_stats


def _block(x: jax.Array, block: Any) -> jax.Array:
    y = _normalize(x, block["norm1"])
    split = [
        (y @ block[name]["kernel"]).reshape(*y.shape[:2], HEADS, -1) for name in ("query", "key", "value")
    ]
    attended = jax.nn.dot_product_attention(*split, is_causal=True)
    x = x + attended.reshape(x.shape) @ block["out"]["kernel"]
    y = jax.nn.gelu(_normalize(x, block["norm2"]) @ block["up"]["kernel"])
    return x + y @ block["down"]["kernel"]


def _normalize(x: jax.Array, norm: Any) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * norm["scale"]
