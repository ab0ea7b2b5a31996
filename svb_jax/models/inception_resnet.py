"""The pre-activation Inception-ResNet, for ImageNet and for CIFAR."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from svb_jax.models.layers import Block, Network, scale_channels


class Conv(NamedTuple):
    """One convolution of a branch."""

    features: int
    kernel_size: tuple[int, int] = (1, 1)


Branches = tuple[tuple[Conv, ...], ...]

BLOCK_A: Branches = (
    (Conv(32),),
    (Conv(32), Conv(32, (3, 3))),
    (Conv(32), Conv(48, (3, 3)), Conv(64, (3, 3))),
)
BLOCK_B: Branches = (
    (Conv(192),),
    (Conv(128), Conv(160, (1, 7)), Conv(192, (7, 1))),
)
BLOCK_C: Branches = (
    (Conv(192),),
    (Conv(192), Conv(224, (1, 3)), Conv(256, (3, 1))),
)
REDUCTION_A: Branches = (
    (Conv(384, (3, 3)),),
    (Conv(256), Conv(256, (3, 3)), Conv(384, (3, 3))),
)
REDUCTION_B: Branches = (
    (Conv(256), Conv(384, (3, 3))),
    (Conv(256), Conv(288, (3, 3))),
    (Conv(256), Conv(288, (3, 3)), Conv(320, (3, 3))),
)


def max_pool(x: jax.Array, padding: int = 0) -> jax.Array:
    """Take the maximum over 3 × 3 windows at stride 2."""
    pads = [(padding, padding), (padding, padding)]
    return nn.pool(x, -jnp.inf, jax.lax.max, (3, 3), (2, 2), pads)


class InceptionBlock(Block):
    """Parallel branches, joined by a 1 × 1 convolution and added to the input.

    Every convolution brings its own BatchNorm and ReLU before it. The joining one's are applied branch by
    branch, which is the same as after the concatenation and leaves each BatchNorm next to one convolution.

    Attributes:
      branches: The convolutions of each branch.
    """

    branches: Branches = BLOCK_A

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return the input plus what the branches make of it."""
        outputs = []
        for index, branch in enumerate(self.branches, start=1):
            y = x
            for number, layer in enumerate(branch, start=1):
                y = self.norm_relu(y, train, f"branch{index}_bn{number}")
                y = self.conv(*layer, name=f"branch{index}_conv{number}")(y)
            outputs.append(self.norm_relu(y, train, f"branch{index}_bn{len(branch) + 1}"))
        return x + self.conv(x.shape[-1], (1, 1), name="join")(jnp.concatenate(outputs, axis=-1))


class Reduction(Block):
    """Branches that end at stride 2 beside a pooling of the raw input, all concatenated.

    Attributes:
      branches: The convolutions of each branch.
      pads: Whether to pad the windows at stride 2, so that an even size is halved.
    """

    branches: Branches = REDUCTION_A
    pads: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return a map of half the size with more channels."""
        outputs = [max_pool(x, padding=int(self.pads))]
        for index, branch in enumerate(self.branches, start=1):
            y = x
            for number, layer in enumerate(branch, start=1):
                last = number == len(branch)
                padding = "VALID" if last and not self.pads else None
                y = self.norm_relu(y, train, f"branch{index}_bn{number}")
                y = self.conv(*layer, 2 if last else 1, padding, name=f"branch{index}_conv{number}")(y)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=-1)


class Stem(Block):
    """Inception-v4's stem, which Inception-ResNet-v2 shares: 299 × 299 × 3 to 35 × 35 × 384.

    Attributes:
      width: Multiplies every channel count.
    """

    width: float = 1.0

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return the features of a batch of images."""

        def layer(x: jax.Array, label: str, features: int, *arguments: object) -> jax.Array:
            return self.conv_norm_relu(x, train, label, scale_channels(features, self.width), *arguments)

        x = layer(images, "1", 32, (3, 3), 2, "VALID")
        x = layer(x, "2", 32, (3, 3), 1, "VALID")
        x = layer(x, "3", 64)
        x = jnp.concatenate([max_pool(x), layer(x, "4", 96, (3, 3), 2, "VALID")], axis=-1)
        short = layer(layer(x, "5a", 64, (1, 1)), "6a", 96, (3, 3), 1, "VALID")
        long = layer(layer(x, "5b", 64, (1, 1)), "6b", 64, (7, 1))
        long = layer(layer(long, "7b", 64, (1, 7)), "8b", 96, (3, 3), 1, "VALID")
        x = jnp.concatenate([short, long], axis=-1)
        return jnp.concatenate([layer(x, "9", 192, (3, 3), 2, "VALID"), max_pool(x)], axis=-1)


class InceptionResNet(Network):
    """Inception-ResNet-v2 with pre-activation: a reconstruction, as its authors never released theirs.

    The paper takes the network of Szegedy et al. (2016, figure 15) with ``depth``, 2 ``depth`` and ``depth``
    blocks of types A, B and C, turns its modules into pre-activation ones, and for CIFAR replaces the stem by
    three convolutions, BatchNorm and ReLU after each, that keep the 32 × 32 map and raise 3 channels to 384.
    What that leaves open is settled by the 32.5M parameters which the paper prints: every convolution brings
    its own BatchNorm and ReLU before it, as in the ResNet that the authors did release, and the three
    convolutions for CIFAR have 384 channels each. This gives 32.46M at 10 classes and, with the original
    stem, 32.52M at 1000. The number of layers does not match: the paper prints 92, the longest path here has
    90 (CIFAR) and 96 (ImageNet).

    Attributes:
      stem: The channels of the convolutions before the first block, or ``None`` for the original stem, which
        wants images of at least 75 × 75; without it the reductions are padded, so that 32 × 32 ends as 8 × 8.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models import InceptionResNet
      >>> model = InceptionResNet(depth=1, width=0.1)
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> variables["params"]["a01"]["join"]["kernel"].shape
      (1, 1, 12, 38)
    """

    depth: int = 5
    stem: tuple[int, ...] | None = (384, 384, 384)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of ImageNet's or of CIFAR's images."""
        return (299, 299, 3) if self.stem is None else (32, 32, 3)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits of a batch of images."""
        x = self.embed(images, train)
        x = self.stage(x, train, "a", BLOCK_A, self.depth)
        x = self.reduce(x, train, "reduction_a", REDUCTION_A)
        x = self.stage(x, train, "b", BLOCK_B, 2 * self.depth)
        x = self.reduce(x, train, "reduction_b", REDUCTION_B)
        x = self.stage(x, train, "c", BLOCK_C, self.depth)
        return self.classify(self.norm_relu(x, train, "final_bn"))

    def embed(self, images: jax.Array, train: bool) -> jax.Array:
        """Apply the stem."""
        if self.stem is None:
            return Stem(self.conv, self.norm, self.width, name="stem")(images, train)
        x = images
        for number, channels in enumerate(self.stem, start=1):
            x = self.conv_norm_relu(x, train, str(number), self.scaled(channels))
        return x

    def stage(self, x: jax.Array, train: bool, letter: str, branches: Branches, count: int) -> jax.Array:
        """Apply ``count`` blocks in turn."""
        for number in range(1, count + 1):
            block = InceptionBlock(self.conv, self.norm, self.widen(branches), name=f"{letter}{number:02d}")
            x = block(x, train)
        return x

    def reduce(self, x: jax.Array, train: bool, name: str, branches: Branches) -> jax.Array:
        """Halve the map."""
        pads = self.stem is not None
        return Reduction(self.conv, self.norm, self.widen(branches), pads, name=name)(x, train)

    def widen(self, branches: Branches) -> Branches:
        """Return the branches as ``width`` has them."""
        return tuple(
            tuple(layer._replace(features=self.scaled(layer.features)) for layer in branch)
            for branch in branches
        )
