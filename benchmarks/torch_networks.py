"""The plain ConvNet and the pre-activation ResNet in PyTorch, layer by layer those of ``svb_jax.models``."""

import importlib
from typing import Any

# By name, because PyTorch is not among what this project installs.
torch: Any = importlib.import_module("torch")
nn = torch.nn

STAGES = (16, 32, 64)


def make(family: str, depth: int, width: float) -> Any:
    """Return a ``ConvNet`` or a ``PreactResNet`` of 6 ``depth`` + 2 layers, all channels times ``width``."""
    stages = [max(1, round(width * channels)) for channels in STAGES]
    return {"ConvNet": _convnet, "PreactResNet": _preact_resnet}[family](depth, stages)


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> Any:
    """Return a convolution without bias."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Unit(nn.Module):
    """Two pre-activated convolutions, added to their input or to a projection of it."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.residual = nn.Sequential(
            *norm_relu(inputs),
            conv(inputs, outputs, stride),
            *norm_relu(outputs),
            conv(outputs, outputs),
        )
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(*norm_relu(inputs), conv(inputs, outputs, stride, size=1))

    def forward(self, x: Any) -> Any:
        """Return the input plus what the two convolutions make of it."""
        return self.shortcut(x) + self.residual(x)


def norm_relu(channels: int) -> list[Any]:
    """Return BatchNorm and ReLU."""
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def _convnet(depth: int, stages: list[int]) -> Any:
    modules, inputs = [conv(3, stages[0]), *norm_relu(stages[0])], stages[0]
    for stage, channels in enumerate(stages):
        for index in range(2 * depth):
            stride = 2 if stage > 0 and index == 0 else 1
            modules += [conv(inputs, channels, stride), *norm_relu(channels)]
            inputs = channels
    return nn.Sequential(*modules, *_classifier(inputs))


def _preact_resnet(depth: int, stages: list[int]) -> Any:
    modules, inputs = [conv(3, stages[0]), *norm_relu(stages[0])], stages[0]
    for stage, channels in enumerate(stages):
        for index in range(depth):
            modules.append(Unit(inputs, channels, stride=2 if stage > 0 and index == 0 else 1))
            inputs = channels
    return nn.Sequential(*modules, *norm_relu(inputs), *_classifier(inputs))


def _classifier(channels: int) -> list[Any]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10, bias=False)]
