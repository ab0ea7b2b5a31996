"""Networks of dense layers only, for the theory: a multi-layer perceptron and a deep linear network."""

import jax
from flax import linen as nn

from svb_jax.models.layers import Network, dense


class _DenseNetwork(Network):
    """What both have in common."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the digits."""
        return (8, 8, 1)


class MLP(_DenseNetwork):
    """``depth`` dense layers, each but the last followed by BatchNorm and ReLU.

    Attributes:
      hidden: The size of the hidden layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models import MLP
      >>> variables = MLP(depth=2, hidden=6).init(jax.random.key(0), jnp.ones((4, 5)))
      >>> jax.tree.map(jnp.shape, variables["params"]["dense01"])
      {'kernel': (5, 6)}
    """

    hidden: int = 256

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits of a batch of images, or of vectors."""
        x = images.reshape(len(images), -1)
        for number in range(1, self.depth):
            x = dense(self.scaled(self.hidden), dtype=self.dtype, name=f"dense{number:02d}")(x)
            x = self.norm_relu(x, train, f"bn{number:02d}")
        return self.classify(x)


class DeepLinear(_DenseNetwork):
    """The product of ``depth`` matrices: the paper's deep linear network, without any nonlinearity.

    Attributes:
      hidden: The size of the hidden layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models import DeepLinear
      >>> inputs = jnp.eye(5)
      >>> model = DeepLinear(depth=3, hidden=5, num_classes=5)
      >>> product, variables = model.init_with_output(jax.random.key(0), inputs)
      >>> bool(jnp.allclose(product @ product.T, jnp.eye(5), atol=1e-6))  # orthogonal, as its factors are
      True
    """

    depth: int = 8
    hidden: int = 64

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the outputs for a batch of images, or of vectors."""
        del train  # It has nothing that differs; the argument is every network's.
        x = images.reshape(len(images), -1)
        for number in range(1, self.depth):
            x = dense(self.scaled(self.hidden), dtype=self.dtype, name=f"dense{number:02d}")(x)
        return self.classify(x)
