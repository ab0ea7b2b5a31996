"""The spectrum of a convolution as a map from images to images."""

import math

import numpy as np
from jax.typing import ArrayLike

from svb_jax._src.host_spectra import host_spectra


def conv_operator_singular_values(
    kernel: ArrayLike,
    input_shape: tuple[int, int],
    *,
    strides: int | tuple[int, int] = 1,
    groups: int = 1,
) -> np.ndarray:
    r"""Return all singular values of a convolution as the linear map from images to images that it is.

    SVB bounds the kernel reshaped to out × (in·height·width), and that is not the map's spectrum: a value of
    the map can be up to :math:`\sqrt{h w}` times the reshaped kernel's largest (strides lower the factor to
    :math:`\sqrt{\lceil h/s_h \rceil \lceil w/s_w \rceil}`), and may vanish however large the reshaped
    kernel's smallest is.

    The convolution is taken as circular (Flax's ``padding="CIRCULAR"``), and there the result is exact: the
    Fourier transform splits the map into one small matrix for each frequency of the output. Zero padding only
    cuts rows and columns out of a circular map on a larger image.

    Args:
      kernel: Of shape (height, width, in / groups, out), as Flax keeps it. Larger than the image, it
        wraps.
      input_shape: The image's height and width.
      strides: The step or the (vertical, horizontal) steps; they must divide the image's sides.
      groups: ``feature_group_count``.

    Returns:
      The singular values in descending order, as many as the map's smaller side.

    Example:
      A mean over three neighbours keeps a constant image and wipes out a wave of three pixels:

      >>> import jax.numpy as jnp, svb_jax
      >>> svb_jax.conv_operator_singular_values(jnp.ones((1, 3, 1, 1)) / 3, (1, 3)).round(6)
      array([1., 0., 0.])

    References:
      Sedghi, Gupta and Long, `The Singular Values of Convolutional Layers
      <https://arxiv.org/abs/1805.10408>`_, 2019.
    """
    kernel = np.asarray(kernel, np.float64)
    strides = (strides, strides) if isinstance(strides, int) else strides
    _check_convolution(kernel, input_shape, strides, groups)
    blocks = _frequency_blocks(kernel, input_shape, strides, groups)
    # A real kernel's blocks at opposite frequencies are conjugate: half of them have all the values.
    width = blocks.shape[1]
    values = host_spectra(blocks[:, : width // 2 + 1])
    mirrored = values[:, 1 : (width + 1) // 2]
    return np.sort(np.concatenate([values, mirrored], axis=None))[::-1]


def _check_convolution(
    kernel: np.ndarray, input_shape: tuple[int, int], strides: tuple[int, int], groups: int
) -> None:
    name = "conv_operator_singular_values"
    if kernel.ndim != 4:
        raise ValueError(f"{name} needs a kernel (height, width, in, out), got shape {kernel.shape}.")
    if len(input_shape) != 2 or min(input_shape) < 1:
        raise ValueError(f"{name} needs the image's height and width as input_shape, got {input_shape}.")
    if len(strides) != 2 or min(strides) < 1 or any(n % s for n, s in zip(input_shape, strides, strict=True)):
        raise ValueError(f"{name} needs strides that divide input_shape {input_shape}, got {strides}.")
    if groups < 1 or kernel.shape[3] % groups:
        raise ValueError(f"{name} needs groups that divide the {kernel.shape[3]} outputs, got {groups}.")


def _frequency_blocks(
    kernel: np.ndarray, input_shape: tuple[int, int], strides: tuple[int, int], groups: int
) -> np.ndarray:
    """Return the map's diagonal blocks: (output frequencies, groups, aliased inputs, outputs a group)."""
    height, width, inputs, outputs = kernel.shape
    (rows, columns), (down, across) = input_shape, strides
    wrapped = np.zeros((rows, columns, inputs, outputs))
    np.add.at(wrapped, np.ix_(np.arange(height) % rows, np.arange(width) % columns), kernel)
    # Keeping every s-th output adds up the s frequencies that look alike on the coarser grid; the root
    # is what the shorter transform's normalisation differs by.
    responses = np.fft.fft2(wrapped, axes=(0, 1)) / math.sqrt(down * across)
    aliased = responses.reshape(
        down, rows // down, across, columns // across, inputs, groups, outputs // groups
    )
    ordered = aliased.transpose(1, 3, 5, 0, 2, 4, 6)
    return ordered.reshape(*ordered.shape[:3], down * across * inputs, outputs // groups)
