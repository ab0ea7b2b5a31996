"""The networks of the paper in Flax, proven by their counts."""

from svb_jax._src.extras import needs_extra

with needs_extra("svb_jax.models", "train"):
    from svb_jax.models.convnet import ConvNet
    from svb_jax.models.dense import MLP, DeepLinear
    from svb_jax.models.inception_resnet import InceptionResNet
    from svb_jax.models.inspection import Summary, pairs, summary
    from svb_jax.models.nnx_convnet import NNXConvNet
    from svb_jax.models.registry import MODELS, Entry, make
    from svb_jax.models.resnet import PreactResNet

__all__ = [
    "MLP",
    "MODELS",
    "ConvNet",
    "DeepLinear",
    "Entry",
    "InceptionResNet",
    "NNXConvNet",
    "PreactResNet",
    "Summary",
    "make",
    "pairs",
    "summary",
]
