"""What every network is built of: orthogonal layers without biases, BatchNorm, and two base classes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

# Sees a kernel as SVB does: the last axis against all the others, so every singular value starts at 1.
orthogonal = jax.nn.initializers.orthogonal()

LayerFactory = Callable[..., nn.Module]


def centred_padding(kernel_size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return half the kernel on either side, so that an output stays centred on its input."""
    return [(size // 2, size // 2) for size in kernel_size]


def conv(
    features: int,
    kernel_size: tuple[int, int] = (3, 3),
    strides: int = 1,
    padding: str | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    convolve: Callable[..., jax.Array] | None = None,
    name: str | None = None,
) -> nn.Module:
    """Return a convolution without bias, orthogonal at first.

    Args:
      features: The number of output channels.
      kernel_size: Height and width of the kernel.
      strides: The step in both directions.
      padding: As ``flax.linen.Conv`` has it; if not given, half the kernel on either side, so that output
        ``i`` stays centred on input ``strides * i``, as a 1 × 1 shortcut is (``"SAME"`` is not, at stride 2).
      dtype: The type to compute in; the kernel is float32.
      convolve: What computes it, if not ``jax.lax.conv_general_dilated``.
      name: The layer's name in the parameter tree.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models.layers import conv
      >>> params = conv(8).init(jax.random.key(0), jnp.ones((1, 4, 4, 3)))["params"]
      >>> params["kernel"].shape
      (3, 3, 3, 8)
    """
    return nn.Conv(
        features,
        kernel_size,
        strides,
        centred_padding(kernel_size) if padding is None else padding,
        use_bias=False,
        kernel_init=orthogonal,
        dtype=dtype,
        conv_general_dilated=convolve,
        name=name,
    )


def dense(features: int, *, dtype: DTypeLike = jnp.float32, name: str | None = None) -> nn.Module:
    """Return a dense layer without bias, orthogonal at first."""
    return nn.Dense(features, use_bias=False, kernel_init=orthogonal, dtype=dtype, name=name)


def batch_norm(
    *,
    train: bool,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
    name: str | None = None,
) -> nn.Module:
    """Return the paper's BatchNorm: momentum 0.9, epsilon 1e-5, float32 parameters and statistics.

    Args:
      train: Normalise by the batch and update the running statistics; else normalise by these.
      dtype: The type of the output.
      axis_name: The mapped axis over which to average the batch's statistics.
      name: The layer's name in the parameter tree.
    """
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        axis_name=axis_name,
        name=name,
    )


def scale_channels(channels: int, width: float) -> int:
    """Return a channel count times a width, rounded, and at least one."""
    return max(1, round(channels * width))


class Block(nn.Module):
    """A part of a network that is told which convolution and which normalisation to use.

    Attributes:
      conv: Called as ``conv(features, kernel_size, strides, padding, name=...)``.
      norm: Called as ``norm(train=..., name=...)``; both return a module.
    """

    conv: LayerFactory = conv
    norm: LayerFactory = batch_norm

    def norm_relu(self, x: jax.Array, train: bool, name: str) -> jax.Array:
        """Normalise under ``name``, then rectify."""
        return nn.relu(self.norm(train=train, name=name)(x))

    def conv_norm_relu(
        self, x: jax.Array, train: bool, label: str, features: int, *arguments: Any
    ) -> jax.Array:
        """Convolve, normalise and rectify; the layers are ``conv<label>`` and ``bn<label>``."""
        x = self.conv(features, *arguments, name=f"conv{label}")(x)
        return self.norm_relu(x, train, f"bn{label}")


class Network(Block):
    """A classifier of images, NHWC.

    Attributes:
      num_classes: The number of outputs.
      width: Multiplies every channel count, for scaled-down studies and tests.
      depth: Each network's own measure of depth.
      dtype: The type the classifier computes in; ``conv`` and ``norm`` carry their own.
    """

    num_classes: int = 10
    width: float = 1.0
    depth: int = 3
    dtype: DTypeLike = jnp.float32

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images the network is meant for."""
        return (32, 32, 3)

    @property
    def counts_projections(self) -> bool:
        """Whether the number of layers in its name counts projections too, and not the classifier."""
        return False

    def scaled(self, channels: int) -> int:
        """Return a channel count as ``width`` has it."""
        return scale_channels(channels, self.width)

    def classify(self, features: jax.Array) -> jax.Array:
        """Average over all axes between the first and the last, and return float32 logits."""
        pooled = jnp.mean(features, axis=tuple(range(1, features.ndim - 1)))
        return dense(self.num_classes, dtype=self.dtype, name="head")(pooled).astype(jnp.float32)
