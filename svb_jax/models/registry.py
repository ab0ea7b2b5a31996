"""Every network by its name, with the counts that the paper prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from svb_jax._src.suggestions import did_you_mean
from svb_jax.models.convnet import ConvNet
from svb_jax.models.dense import MLP, DeepLinear
from svb_jax.models.inception_resnet import InceptionResNet
from svb_jax.models.layers import Network, batch_norm, conv
from svb_jax.models.resnet import PreactResNet


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One network of the table.

    Attributes:
      constructor: The module's class.
      settings: The arguments that make it this network.
      num_classes: The number of outputs, unless another is asked for.
      paper_layers: The number of layers that the paper prints, if it prints one.
      paper_parameters: The number of parameters that the paper prints, in its own digits.
    """

    constructor: type[Network]
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_classes: int = 10
    paper_layers: int | None = None
    paper_parameters: str | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return self.constructor(**self.settings).image_shape


def _wide_resnet(factor: int, paper_parameters: str) -> dict[str, Entry]:
    """Return both versions of a Wide ResNet of 28 layers."""
    wide = {"depth": 4, "stages": (16 * factor, 32 * factor, 64 * factor)}
    standard = {"normalizes_stem": False, "shares_activation": True}
    authors = {"stem": (16, 8 * factor, 16 * factor)}
    entry = partial(Entry, constructor=PreactResNet, paper_layers=28, paper_parameters=paper_parameters)
    return {
        f"wrn_28_{factor}": entry(settings=wide | standard),
        f"wrn_28_{factor}_authors": entry(settings=wide | authors),
    }


MODELS: Mapping[str, Entry] = MappingProxyType(
    {
        "convnet_8": Entry(constructor=ConvNet, settings={"depth": 1}),
        "convnet_20": Entry(constructor=ConvNet, settings={"depth": 3}, paper_layers=20),
        "convnet_38": Entry(constructor=ConvNet, settings={"depth": 6}, paper_layers=38),
        "preact_resnet_20": Entry(constructor=PreactResNet, settings={"depth": 3}),
        "preact_resnet_68": Entry(constructor=PreactResNet, settings={"depth": 11}, paper_layers=68),
        **_wide_resnet(10, paper_parameters="36.5M"),
        **_wide_resnet(16, paper_parameters="94.2M"),
        "inception_resnet_cifar": Entry(
            constructor=InceptionResNet, paper_layers=92, paper_parameters="32.5M"
        ),
        "inception_resnet_imagenet": Entry(
            constructor=InceptionResNet, settings={"stem": None}, num_classes=1000
        ),
        "mlp": Entry(constructor=MLP),
        "deep_linear": Entry(constructor=DeepLinear),
    }
)


def find(name: str) -> Entry:
    """Return a network's entry, or raise ``ValueError`` with the nearest name."""
    if name in MODELS:
        return MODELS[name]
    raise ValueError(
        f"svb_jax.models needs one of {', '.join(MODELS)}; got {name!r}.{did_you_mean(name, MODELS)}"
    )


def make(
    name: str,
    *,
    num_classes: int | None = None,
    width: float = 1.0,
    depth: int | None = None,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
    **overrides: Any,
) -> Network:
    """Return a network by its name.

    Args:
      name: A name in :data:`MODELS`.
      num_classes: The number of outputs; the entry's own if not given.
      width: Multiplies every channel count (rounded, at least 1), for scaled-down studies and tests.
      depth: The X in 6X + 2 layers (in 6X + 4, for Wide ResNets); the blocks of the first stage of X, 2X
        and X of an Inception-ResNet; the number of dense layers of the others. The entry's if not given.
      dtype: The type to compute in; parameters and BatchNorm statistics stay float32.
      axis_name: The mapped axis over which BatchNorm averages its statistics.
      **overrides: Further fields of the module, such as ``norm=`` for another normalisation (called as
        ``norm(train=..., name=...)``) or ``conv=``; those then carry their own ``dtype``.

    Returns:
      A ``flax.linen.Module``, called on images (NHWC) and ``train``.

    Example:
      >>> import jax, jax.numpy as jnp, svb_jax.models
      >>> model = svb_jax.models.make("mlp", width=0.25, depth=2)
      >>> images = jnp.ones((2, 8, 8, 1))
      >>> variables = model.init(jax.random.key(0), images, train=False)
      >>> logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
      >>> logits.shape, list(updated)
      ((2, 10), ['batch_stats'])
    """
    entry = find(name)
    fields = {
        "conv": partial(conv, dtype=dtype),
        "norm": partial(batch_norm, dtype=dtype, axis_name=axis_name),
        **entry.settings,
        **overrides,
        "num_classes": entry.num_classes if num_classes is None else num_classes,
        "width": width,
        "dtype": dtype,
    }
    if depth is not None:
        fields["depth"] = depth
    for field_name in ("num_classes", "width", "depth"):
        if fields.get(field_name, 1) <= 0:
            raise ValueError(f"svb_jax.models.make needs a positive {field_name}; got {fields[field_name]}.")
    return entry.constructor(**fields)
