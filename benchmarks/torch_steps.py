"""Training steps in PyTorch, plain and projecting as the authors' code does; and parts of them.

Runs in an interpreter that has PyTorch, and needs nothing else but NumPy.
"""

import importlib
from typing import Any

import numpy as np

from benchmarks import torch_networks
from benchmarks.kernels import drifted_kernels
from benchmarks.torch_rows import clip_singular_values, fastest
from benchmarks.workload import Task, Workload

# By name, because PyTorch is not among what this project installs.
torch: Any = importlib.import_module("torch")

LAYOUTS = ("channels_last", "contiguous_format")
EPSILON = 0.5
BATCH_NORM_EPSILON = 1.0


def train(task: Task) -> Workload:
    """One step of training in the faster memory layout; with ``task["projects"]``, SVB and BBN follow."""
    return fastest(lambda layout: _train(task, layout), list(LAYOUTS))


def forward(task: Task) -> Workload:
    """The loss of a batch, in training mode."""
    return fastest(lambda layout: _loss(task, layout, with_gradients=False), list(LAYOUTS))


def gradients(task: Task) -> Workload:
    """The loss of a batch and its gradients."""
    return fastest(lambda layout: _loss(task, layout, with_gradients=True), list(LAYOUTS))


def convolution(task: Task) -> Workload:
    """One 3 × 3 convolution or a gradient of it; ``task["part"]``: ``forward``, ``input`` or ``kernel``."""
    return fastest(lambda layout: _convolution(task, layout), list(LAYOUTS))


def project(network: Any) -> None:
    """Bound every weight matrix by its SVD and every BatchNorm's scales around their mean, in place."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                matrix = module.weight.reshape(len(module.weight), -1)
                clipped = clip_singular_values(matrix, 1 / (1 + EPSILON), 1 + EPSILON)
                module.weight.copy_(clipped.reshape(module.weight.shape))
            if isinstance(module, torch.nn.BatchNorm2d):
                deviation = (module.running_var + module.eps).sqrt()
                ratio = module.weight / deviation
                mean = ratio.mean()
                bounded = (ratio / mean).clamp(1 / (1 + BATCH_NORM_EPSILON), 1 + BATCH_NORM_EPSILON)
                module.weight.copy_(mean * deviation * bounded)


def _train(task: Task, layout: str) -> Workload:
    network, images, labels = _network(task, layout)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    begin = {name: value.clone() for name, value in network.state_dict().items()}

    def run(_: None) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        if task.get("projects"):
            project(network)

    facts = {"layout": layout, "parameters": sum(value.numel() for value in network.parameters())}
    return Workload(run=run, fresh=lambda: network.load_state_dict(begin), facts=facts)


def _loss(task: Task, layout: str, with_gradients: bool) -> Workload:
    network, images, labels = _network(task, layout)

    def run(_: None) -> None:
        with torch.set_grad_enabled(with_gradients):
            loss = torch.nn.functional.cross_entropy(network(images), labels)
        if with_gradients:
            network.zero_grad()
            loss.backward()

    return Workload(run=run, facts={"layout": layout})


def _convolution(task: Task, layout: str) -> Workload:
    size, channels = task["size"], task["channels"]
    memory_format = getattr(torch, layout)
    images = torch.ones(task["batch"], channels, size, size).to(memory_format=memory_format)
    kernel = torch.ones(channels, channels, 3, 3).to(memory_format=memory_format)
    is_wanted = [task["part"] == "input", task["part"] == "kernel", False]

    def run(_: None) -> Any:
        if task["part"] == "forward":
            return torch.nn.functional.conv2d(images, kernel, padding=1)
        # The images stand for the gradient of the output, which has their shape.
        return torch.ops.aten.convolution_backward(
            images, images, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, is_wanted
        )

    return Workload(run=run, facts={"layout": layout})


def _network(task: Task, layout: str) -> tuple[Any, Any, Any]:
    """Return a network with drifted kernels, and a batch of images and labels for it."""
    memory_format = getattr(torch, layout)
    network = torch_networks.make(task["family"], task["depth"], task["width"])
    matrices = {name: value for name, value in network.named_parameters() if value.dim() > 1}
    shapes = {name: (*value.shape[1:], value.shape[0]) for name, value in matrices.items()}
    with torch.no_grad():
        for name, kernel in drifted_kernels(shapes, task["condition"]).items():
            matrices[name].copy_(torch.from_numpy(np.moveaxis(kernel, -1, 0).copy()))
    shape = task["batch"], 3, task["image_size"], task["image_size"]
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    batch = torch.from_numpy(images).to(memory_format=memory_format)
    return network.to(memory_format=memory_format), batch, torch.arange(task["batch"]) % 10
