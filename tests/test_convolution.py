"""Gradients laid out by hand are those of XLA's own convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from svb_jax.models.convolution import convolve


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 1), (0, 2)]])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize(
    ("size", "window"), [((6, 7), (3, 3)), ((7, 8), (3, 3)), ((5, 8), (1, 1)), ((9, 9), (1, 7))]
)
def test_values_and_gradients_are_those_of_the_plain_convolution(size, window, strides, padding):
    keys = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[0], (2, *size, 3))
    kernel = jax.random.normal(keys[1], (*window, 3, 4))

    def plain(images, kernel):
        return lax.conv_general_dilated(
            images, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def ours(images, kernel):
        return convolve(images, kernel, strides, padding)

    expected, expected_vjp = jax.vjp(plain, images, kernel)
    actual, actual_vjp = jax.vjp(ours, images, kernel)
    change = jax.random.normal(keys[2], expected.shape)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for got, wanted in zip(actual_vjp(change), expected_vjp(change), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_nothing_is_fused_with_the_transpositions_of_the_kernel_gradient():
    def loss(images, kernel):
        return jnp.sum(convolve(jnp.sin(images), kernel, (1, 1), "SAME") ** 2)

    program = jax.jit(jax.grad(loss, argnums=1)).lower(jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 4)))
    text = program.compile().as_text()
    # XLA inlines calls, and then fuses what the transpositions are computed from into them.
    assert text is not None
    assert " call(" in text


def test_what_it_does_not_do_is_said():
    with pytest.raises(ValueError, match=r"convolve needs NHWC images .* got .* 2 groups"):
        convolve(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 1, 4)), (1, 1), "SAME", feature_group_count=2)
