"""The paper's augmentation of small images, inside the jitted step: pad, crop at random, mirror."""

from functools import partial

import jax
import jax.numpy as jnp


def prepare(images: jax.Array) -> jax.Array:
    """Turn stored images into the network's input: raw pixels, 0 to 255, as float32.

    The paper uses raw images, and the authors' code neither scales nor normalises them. Every network here
    has BatchNorm behind its first convolution, which makes loss and gradients independent of that scale.

    Examples:
      >>> prepare(jnp.array([[[[0], [255]]]], jnp.uint8)).ravel().tolist()
      [0.0, 255.0]
    """
    return jnp.asarray(images, jnp.float32)


def augment(
    images: jax.Array,
    key: jax.Array,
    example_ids: jax.Array,
    pad: int | None = None,
    *,
    mirror: bool = True,
) -> jax.Array:
    """Crop each zero-padded image at random, and mirror it left to right half of the time.

    Each example's randomness comes from the key and its own number alone: it does not matter which device
    holds it, nor beside which others.

    Args:
      images: (batch, height, width, channels), of any type.
      key: The step's random key.
      example_ids: Integers of shape (batch,), one number an example.
      pad: Zeros along each side: 4 for 32 pixels, and in proportion for other sizes, if not given.
      mirror: Off for images whose mirror image means something else, such as digits.

    Returns:
      Images of the same shape and type.

    Examples:
      >>> images = jnp.ones((2, 32, 32, 3), jnp.uint8)
      >>> jax.jit(augment)(images, jax.random.key(0), jnp.arange(2)).shape
      (2, 32, 32, 3)
    """
    if pad is None:
        pad = default_pad(images.shape[1])
    keys = jax.vmap(partial(jax.random.fold_in, key))(example_ids)
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return jax.vmap(partial(_crop_and_mirror, shape=images.shape[1:], mirror=mirror))(padded, keys)


def default_pad(image_size: int) -> int:
    """Return how far images of this size are padded: 4 for 32 pixels, in proportion, at least 1.

    Examples:
      >>> [default_pad(size) for size in (32, 16, 8, 4)]
      [4, 2, 1, 1]
    """
    return max(1, image_size // 8)


def _crop_and_mirror(padded: jax.Array, key: jax.Array, *, shape: tuple[int, ...], mirror: bool) -> jax.Array:
    crop_key, mirror_key = jax.random.split(key)
    room = jnp.array([padded.shape[0] - shape[0] + 1, padded.shape[1] - shape[1] + 1])
    top, left = jax.random.randint(crop_key, (2,), 0, room)
    crop = jax.lax.dynamic_slice(padded, (top, left, 0), shape)
    if not mirror:
        return crop
    return jnp.where(jax.random.bernoulli(mirror_key), crop[:, ::-1], crop)
