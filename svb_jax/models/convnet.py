"""The plain ConvNet of the paper's controlled studies."""

import jax
from flax import linen as nn

from svb_jax.models.layers import Network


def convolutions(stages: tuple[int, ...], depth: int) -> list[tuple[int, int]]:
    """Return the channels and strides of the plain network's convolutions.

    Example:
      >>> convolutions((16, 32), depth=1)
      [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1)]
    """
    later = [
        (channels, 2 if stage > 0 and index == 0 else 1)
        for stage, channels in enumerate(stages)
        for index in range(2 * depth)
    ]
    return [(stages[0], 1), *later]


class ConvNet(Network):
    """A plain network of 6 ``depth`` + 2 weight layers, each convolution followed by BatchNorm and ReLU.

    A first 3 × 3 convolution, then three stages of 2 ``depth``, the second and third of which begin with
    stride 2; global average pooling and a classifier.

    Attributes:
      stages: The channels of the three stages; the first convolution has the first stage's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models import ConvNet
      >>> model = ConvNet(depth=1, width=0.5)
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> variables["params"]["head"]["kernel"].shape
      (32, 10)
    """

    stages: tuple[int, ...] = (16, 32, 64)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits of a batch of images."""
        x = images
        for number, (channels, strides) in enumerate(convolutions(self.stages, self.depth), start=1):
            x = self.conv_norm_relu(x, train, f"{number:02d}", self.scaled(channels), (3, 3), strides)
        return self.classify(x)
