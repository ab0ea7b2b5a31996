"""A small GPT in Flax, with or without normalisation layers, all matrices orthogonal at first."""

import jax
import jax.numpy as jnp
from flax import linen as nn

orthogonal = jax.nn.initializers.orthogonal()


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what goes in.

    Attributes:
      heads: The number of attention heads.
      normalizes: Whether each branch begins with LayerNorm.
      branch_weight: A branch f turns x into (1 - w) x + w f(x); the usual x + f(x) if not given.
    """

    heads: int
    normalizes: bool
    branch_weight: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the block's output, of the shape of ``x``."""
        width = x.shape[-1]
        attend = nn.MultiHeadDotProductAttention(
            self.heads, use_bias=False, kernel_init=orthogonal, name="attention"
        )
        x = self._add(x, attend(self._norm("norm1", x), mask=mask))
        hidden = _dense(4 * width, "up")(self._norm("norm2", x))
        return self._add(x, _dense(width, "down")(nn.gelu(hidden)))

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(use_bias=False, name=name)(x) if self.normalizes else x

    def _add(self, x: jax.Array, branch: jax.Array) -> jax.Array:
        if self.branch_weight is None:
            return x + branch
        return (1 - self.branch_weight) * x + self.branch_weight * branch


class GPT(nn.Module):
    """A decoder of characters.

    Without normalisation, x + f(x) would double a signal at every branch: there a branch weighs
    1 / (2 ``layers``), so that the network's gain is bounded by those of its matrices.

    Attributes:
      vocabulary: How many characters there are.
      width: Features of each character.
      layers: The number of blocks.
      heads: Attention heads in each.
      context: The longest text.
      normalizes: Whether there are LayerNorms.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = GPT(vocabulary=96, width=8, layers=1, heads=2, context=4, normalizes=True)
      >>> params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), int))["params"]
      >>> params["blocks_0"]["attention"]["query"]["kernel"].shape
      (8, 2, 4)
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    normalizes: bool

    def setup(self) -> None:
        """Make the layers."""
        one = jax.nn.initializers.normal(1.0)
        self.characters = nn.Embed(self.vocabulary, self.width, embedding_init=one)
        self.positions = nn.Embed(self.context, self.width, embedding_init=one)
        weight = None if self.normalizes else 0.5 / self.layers
        self.blocks = [Block(self.heads, self.normalizes, weight) for _ in range(self.layers)]
        self.norm = nn.LayerNorm(use_bias=False) if self.normalizes else None
        self.head = _dense(self.vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of each next character, (batch, length, vocabulary)."""
        return self.decode(self.embed(tokens))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Return the features of characters and their positions."""
        return self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))[None]

    def decode(self, x: jax.Array) -> jax.Array:
        """Return the logits from the first features: the part of the network that matrices make up."""
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:-1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x if self.norm is None else self.norm(x))


def _dense(features: int, name: str | None = None) -> nn.Module:
    return nn.Dense(features, use_bias=False, kernel_init=orthogonal, name=name)
