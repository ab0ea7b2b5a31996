from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svb_jax.training.augment import augment, prepare

augment_jitted = jax.jit(augment, static_argnames=("pad", "mirror"))

PICTURE = np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1)


def possible_results(mirror):
    """All crops of PICTURE padded by one, and their mirror images, cut by hand."""
    padded = np.zeros((5, 5, 1), np.uint8)
    padded[1:4, 1:4] = PICTURE
    crops = [padded[top : top + 3, left : left + 3] for top in range(3) for left in range(3)]
    return [*crops, *(crop[:, ::-1] for crop in crops)] if mirror else crops


@pytest.mark.parametrize("mirror", [True, False])
def test_every_crop_and_its_mirror_image_are_equally_likely(mirror):
    images = np.broadcast_to(PICTURE, (3600, 3, 3, 1))
    results = augment_jitted(images, jax.random.key(0), jnp.arange(3600), pad=1, mirror=mirror)
    counts = Counter(result.tobytes() for result in np.asarray(results))
    expected = [result.tobytes() for result in possible_results(mirror)]
    assert counts.keys() == set(expected)
    # Within five standard deviations of the even share, and so are the mirror images together.
    share = 3600 / len(expected)
    assert max(abs(count - share) for count in counts.values()) < 5 * np.sqrt(share)
    assert not mirror or abs(sum(counts[result] for result in expected[9:]) - 1800) < 5 * 30


def test_an_example_comes_out_the_same_wherever_it_is_held():
    images = np.random.default_rng(1).integers(0, 256, (16, 8, 8, 3), np.uint8)
    key, ids = jax.random.key(2), jnp.arange(100, 116)
    whole = augment_jitted(images, key, ids)
    shards = jax.pmap(augment, in_axes=(0, None, 0))(images.reshape(8, 2, 8, 8, 3), key, ids.reshape(8, 2))
    assert np.array_equal(whole, shards.reshape(images.shape))
    assert np.array_equal(whole[5:6], augment_jitted(images[5:6], key, ids[5:6]))


def test_keys_and_numbers_change_the_result():
    images = np.broadcast_to(np.arange(64, dtype=np.uint8).reshape(8, 8, 1), (20, 8, 8, 1))

    def result(seed, start):
        return augment_jitted(images, jax.random.key(seed), jnp.arange(20) + start).tobytes()

    first = result(0, 0)
    assert first == result(0, 0)
    assert first != result(1, 0)
    assert first != result(0, 20)


@pytest.mark.parametrize(("size", "pad"), [(32, 4), (16, 2), (8, 1)])
def test_padding_is_four_pixels_at_32_and_in_proportion(size, pad):
    results = np.asarray(augment_jitted(jnp.ones((400, size, size, 1)), jax.random.key(0), jnp.arange(400)))
    black_rows = (results == 0).all(axis=(2, 3)).sum(axis=1)
    black_columns = (results == 0).all(axis=(1, 3)).sum(axis=1)
    assert set(black_rows) == set(black_columns) == set(range(pad + 1))


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_shape_and_type_are_kept(dtype):
    result = augment_jitted(jnp.ones((2, 8, 8, 3), dtype), jax.random.key(0), jnp.arange(2))
    assert (result.shape, result.dtype) == ((2, 8, 8, 3), jnp.dtype(dtype))


def test_the_input_is_raw_pixels():
    assert prepare(np.array([0, 1, 255], np.uint8)).tolist() == [0.0, 1.0, 255.0]
    assert prepare(np.zeros(1, np.uint8)).dtype == jnp.float32


def test_batch_norm_makes_the_scale_of_the_input_irrelevant():
    pixels = jax.random.uniform(jax.random.key(0), (64, 3), maxval=255.0)
    target = jax.random.normal(jax.random.key(1), (64, 4))
    kernel = jax.random.normal(jax.random.key(2), (3, 4))
    norm = nn.BatchNorm(use_running_average=False)

    @jax.jit
    def gradient(x):
        def loss(kernel):
            outputs, _ = norm.init_with_output(jax.random.key(0), x @ kernel)
            return jnp.mean(outputs * target)

        return jax.grad(loss)(kernel)

    raw, scaled = gradient(pixels), gradient(pixels / 255)
    assert jnp.max(jnp.abs(raw - scaled)) < 1e-3 * jnp.max(jnp.abs(raw))
