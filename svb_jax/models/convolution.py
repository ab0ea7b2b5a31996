"""A convolution whose gradients are convolutions of its own layout, for programs within programs on CPU.

XLA lays out the gradients of a convolution for its fast CPU kernels only at the outermost level of a program.
Inside ``pmap``, ``shard_map`` and loops they are left as they are, and take twenty times as long. Here they
are laid out from the start. Two more of its habits cost as much as the rest of a step, and are avoided: it
fuses whatever precedes a transposition into it, and fills a vector register badly with few output channels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import DTypeLike

from svb_jax.models.layers import LayerFactory, conv

FEW_CHANNELS = 16
"""As many output channels as half of what the CPU kernels compute at once, or fewer."""

NHWC_HWIO = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def step_conv(dtype: DTypeLike = jnp.float32) -> LayerFactory:
    """Return the convolutional layer for a training step: on CPU by :func:`convolve`, else by XLA alone."""
    return partial(conv, dtype=dtype, convolve=convolve if jax.default_backend() == "cpu" else None)


def convolve(
    images: jax.Array,
    kernel: jax.Array,
    strides: tuple[int, ...],
    padding: Any,
    *,
    lhs_dilation: tuple[int, ...] = (1, 1),
    rhs_dilation: tuple[int, ...] = (1, 1),
    dimension_numbers: lax.ConvDimensionNumbers = NHWC_HWIO,
    feature_group_count: int = 1,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Convolve as ``jax.lax.conv_general_dilated`` does, undilated and ungrouped, for ``flax.linen.Conv``.

    It can be differentiated in reverse mode only.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models.convolution import convolve
      >>> images, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))
      >>> jax.grad(lambda kernel: convolve(images, kernel, (2, 2), "SAME").sum())(kernel).shape
      (3, 3, 2, 5)
    """
    if {*lhs_dilation, *rhs_dilation, feature_group_count} != {1} or dimension_numbers != NHWC_HWIO:
        raise ValueError(
            "convolve needs NHWC images and one HWIO kernel without dilation or groups, got "
            f"{dimension_numbers}, dilations {lhs_dilation} and {rhs_dilation}, {feature_group_count} groups."
        )
    sizes = images.shape[1:3], kernel.shape[:2]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(*sizes, strides, padding)
    pads = tuple((int(before), int(after)) for before, after in padding)
    return _convolve(images, kernel, tuple(strides), pads, precision)


_Pads = tuple[tuple[int, int], ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve(
    images: jax.Array, kernel: jax.Array, strides: tuple[int, ...], pads: _Pads, precision: lax.PrecisionLike
) -> jax.Array:
    if strides == (1, 1):
        return _dense(images, kernel, pads, precision)
    return _plain(images, kernel, strides, pads, precision=precision)


def _forward(images: jax.Array, kernel: jax.Array, *static: Any) -> tuple[jax.Array, Any]:
    return _convolve(images, kernel, *static), (images, kernel)


def _backward(
    strides: tuple[int, ...], pads: _Pads, precision: lax.PrecisionLike, operands: Any, change: jax.Array
) -> tuple[jax.Array, jax.Array]:
    images, kernel = operands
    image_pads, kernel_pads = [], []
    for axis, (stride, (before, _)) in enumerate(zip(strides, pads, strict=True)):
        size, window = images.shape[1 + axis], kernel.shape[axis]
        spread = (change.shape[1 + axis] - 1) * stride + 1
        image_pads.append((window - 1 - before, size - spread + before))
        kernel_pads.append((before, spread + window - 1 - size - before))
    mirrored = jnp.swapaxes(kernel[::-1, ::-1], 2, 3)
    if strides == (1, 1):
        of_images = _dense(change, mirrored, image_pads, precision)
    else:
        of_images = _plain(change, mirrored, (1, 1), image_pads, lhs_dilation=strides, precision=precision)
    # Inlined, the transpositions would be fused with what precedes them, and take ten times as long.
    with set_xla_metadata(inlineable="false"):
        return of_images, _kernel_gradient(images, change, strides, tuple(kernel_pads), precision)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _kernel_gradient(
    images: jax.Array, change: jax.Array, strides: tuple[int, ...], pads: _Pads, precision: lax.PrecisionLike
) -> jax.Array:
    # Channels are the images here, and images are the channels.
    gradient = _plain(
        jnp.transpose(images, (3, 1, 2, 0)),
        jnp.transpose(change, (1, 2, 0, 3)),
        (1, 1),
        pads,
        rhs_dilation=strides,
        precision=precision,
    )
    return jnp.transpose(gradient, (1, 2, 0, 3))


def _dense(images: jax.Array, kernel: jax.Array, pads: Any, precision: lax.PrecisionLike) -> jax.Array:
    """Convolve with stride 1; where there are few output channels, two neighbours at once, as channels.

    Their kernels are the same one, one column apart: a third more products, computed twice as fast.
    """
    width = images.shape[2] + sum(pads[1]) - kernel.shape[1] + 1
    if kernel.shape[3] > FEW_CHANNELS or width % 2:
        return _plain(images, kernel, (1, 1), pads, precision=precision)
    left, right = (jnp.pad(kernel, ((0, 0), pad, (0, 0), (0, 0))) for pad in ((0, 1), (1, 0)))
    pairs = _plain(images, jnp.concatenate([left, right], -1), (1, 2), pads, precision=precision)
    return pairs.reshape(*pairs.shape[:2], width, kernel.shape[3])


_plain = partial(lax.conv_general_dilated, dimension_numbers=NHWC_HWIO)

_convolve.defvjp(_forward, _backward)
