"""The plain ConvNet once more, as a ``flax.nnx`` module."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from svb_jax.models.convnet import convolutions
from svb_jax.models.layers import centred_padding, orthogonal, scale_channels


class NNXConvNet(nnx.Module):
    """The same network as :class:`svb_jax.models.ConvNet`: 6 ``depth`` + 2 layers, conv-BatchNorm-ReLU.

    ``model.train()`` and ``model.eval()`` say whether BatchNorm uses the batch or its running statistics.

    Args:
      depth: The X in 6X + 2 layers.
      num_classes: The number of outputs.
      width: Multiplies every channel count.
      input_channels: The number of channels of an image.
      dtype: The type to compute in; parameters and statistics stay float32.
      rngs: The generator of the initial weights.

    Example:
      >>> from flax import nnx
      >>> from svb_jax.models import NNXConvNet
      >>> model = nnx.eval_shape(lambda: NNXConvNet(depth=3, rngs=nnx.Rngs(0)))
      >>> sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
      269712
    """

    def __init__(
        self,
        depth: int = 3,
        num_classes: int = 10,
        width: float = 1.0,
        input_channels: int = 3,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        layers = [(scale_channels(channels, width), s) for channels, s in convolutions((16, 32, 64), depth)]
        inputs = [input_channels, *(channels for channels, _ in layers)]
        self.convs = nnx.List(
            nnx.Conv(
                channels_in,
                channels,
                (3, 3),
                strides,
                padding=centred_padding((3, 3)),
                use_bias=False,
                kernel_init=orthogonal,
                dtype=dtype,
                rngs=rngs,
            )
            for channels_in, (channels, strides) in zip(inputs, layers, strict=False)
        )
        self.norms = nnx.List(
            nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)
            for channels, _ in layers
        )
        self.head = nnx.Linear(
            inputs[-1], num_classes, use_bias=False, kernel_init=orthogonal, dtype=dtype, rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits of a batch of images, NHWC."""
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean(axis=(1, 2))).astype(jnp.float32)
