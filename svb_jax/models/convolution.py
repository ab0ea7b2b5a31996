"""A convolution whose gradients are convolutions of its own layout, for programs within programs on CPU.

XLA lays out the gradients of a convolution for its fast CPU kernels only at the outermost level of a program.
Inside ``pmap``, ``shard_map`` and loops they are left as they are, and take twenty times as long. Here they
are laid out from the start.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NHWC_HWIO = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


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
    return lax.conv_general_dilated(
        images, kernel, strides, pads, dimension_numbers=NHWC_HWIO, precision=precision
    )


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
    convolved = partial(lax.conv_general_dilated, dimension_numbers=NHWC_HWIO, precision=precision)
    of_images = convolved(change, mirrored, (1, 1), image_pads, lhs_dilation=strides)
    # Channels are the images here, and images are the channels.
    of_kernel = convolved(
        jnp.transpose(images, (3, 1, 2, 0)),
        jnp.transpose(change, (1, 2, 0, 3)),
        (1, 1),
        kernel_pads,
        rhs_dilation=strides,
    )
    return of_images, jnp.transpose(of_kernel, (1, 2, 0, 3))


_convolve.defvjp(_forward, _backward)
