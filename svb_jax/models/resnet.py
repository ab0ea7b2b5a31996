"""Pre-activation residual networks: the paper's ResNet, and Wide ResNets in two versions."""

import jax
from flax import linen as nn

from svb_jax.models.layers import Block, Network


class Unit(Block):
    """Two pre-activated 3 × 3 convolutions, added to their input or to a projection of it.

    Attributes:
      features: The number of output channels.
      strides: The first convolution's, and the projection's.
      shares_activation: Whether the projection takes the first convolution's BatchNorm and ReLU, or brings
        its own.
    """

    features: int = 16
    strides: int = 1
    shares_activation: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return the input plus what the two convolutions make of it."""
        activated = self.norm_relu(x, train, "bn1")
        residual = self.conv(self.features, (3, 3), self.strides, name="conv1")(activated)
        residual = self.norm_relu(residual, train, "bn2")
        residual = self.conv(self.features, name="conv2")(residual)
        if x.shape == residual.shape:
            return x + residual
        projected = activated if self.shares_activation else self.norm_relu(x, train, "shortcut_bn")
        return self.conv(self.features, (1, 1), self.strides, name="shortcut_conv")(projected) + residual


class PreactResNet(Network):
    """A pre-activation residual network of three stages of ``depth`` units.

    As it stands it is the authors' ResNet of 6 ``depth`` + 2 layers: a first convolution followed by
    BatchNorm and ReLU, identity shortcuts, and where the map is sub-sampled a projection with a BatchNorm
    and ReLU of its own. Wide ResNets multiply ``stages``; their standard version leaves the first
    convolution bare and lets a projection share the unit's activation, and the authors' own widens the
    features over three first convolutions, so that the first stage needs no projection.

    Attributes:
      stem: The channels of the convolutions before the first stage.
      stages: The channels of the stages.
      normalizes_stem: Whether BatchNorm and ReLU follow the convolutions of the stem.
      shares_activation: Whether a projection shares the unit's first BatchNorm and ReLU.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from svb_jax.models import PreactResNet
      >>> model = PreactResNet(depth=1, width=0.5)
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> variables["params"]["head"]["kernel"].shape
      (32, 10)
    """

    stem: tuple[int, ...] = (16,)
    stages: tuple[int, ...] = (16, 32, 64)
    normalizes_stem: bool = True
    shares_activation: bool = False

    @property
    def counts_projections(self) -> bool:
        """True of the standard Wide ResNet: the 28 layers in its name are its convolutions."""
        return self.shares_activation

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits of a batch of images."""
        x = images
        for number, channels in enumerate(self.stem, start=1):
            if self.normalizes_stem:
                x = self.conv_norm_relu(x, train, str(number), self.scaled(channels))
            else:
                x = self.conv(self.scaled(channels), name=f"conv{number}")(x)
        for stage, channels in enumerate(self.stages, start=1):
            for number in range(1, self.depth + 1):
                x = Unit(
                    self.conv,
                    self.norm,
                    self.scaled(channels),
                    strides=2 if stage > 1 and number == 1 else 1,
                    shares_activation=self.shares_activation,
                    name=f"stage{stage}_unit{number:02d}",
                )(x, train)
        return self.classify(self.norm_relu(x, train, "final_bn"))
