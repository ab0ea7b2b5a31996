"""What a network consists of, found by tracing it and without allocating anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import core

from svb_jax.models.layers import Network
from svb_jax.models.registry import make


@dataclass(frozen=True)
class Summary:
    """The counts of a network.

    Attributes:
      layers: The weight layers on the longest path from input to output. The standard Wide ResNet is counted
        as its authors do: every convolution, with the projections and without the classifier.
      parameters: The number of trainable numbers.
      multiply_adds: The products in all convolutions and matrix multiplications, for one image.
      matrices: Each kernel's path and shape, in the order of use.
    """

    layers: int
    parameters: int
    multiply_adds: int
    matrices: dict[str, tuple[int, ...]]


def summary(
    model: str | Network, image_shape: tuple[int, int, int] | None = None, **settings: Any
) -> Summary:
    """Count a network's layers, parameters and multiply-adds, without allocating any of them.

    Args:
      model: A name in :data:`svb_jax.models.MODELS`, or a network.
      image_shape: Height, width and channels of an image; the network's own if not given.
      **settings: What to pass to :func:`svb_jax.models.make` beside the name.

    Returns:
      The counts.

    Example:
      >>> import svb_jax.models
      >>> counts = svb_jax.models.summary("wrn_28_16_authors")
      >>> counts.layers, f"{counts.parameters / 1e6:.1f}M", f"{counts.multiply_adds / 1e9:.1f}G"
      (28, '94.2M', '14.3G')
      >>> next(iter(counts.matrices.items()))
      ('conv1/kernel', (3, 3, 3, 16))
    """
    model, image = _resolve(model, image_shape, settings)
    variables, calls = _trace(model, image)
    jaxpr = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False))(variables, image).jaxpr
    depths, multiply_adds = _measure(jaxpr, [0] * len(jaxpr.invars))
    matrices = {call.path + "/kernel": call.kernel for call in calls if call.kernel}
    convolutions = sum(len(shape) == 4 for shape in matrices.values())
    return Summary(
        layers=convolutions if model.counts_projections else max(depths),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(variables["params"])),
        multiply_adds=multiply_adds,
        matrices=matrices,
    )


def pairs(
    model: str | Network, image_shape: tuple[int, int, int] | None = None, **settings: Any
) -> tuple[tuple[str, str], ...]:
    """Return the kernels that a BatchNorm follows directly, each with the path of that BatchNorm.

    With these the spectrum of what a layer really does, its kernel with the normalisation folded in, can be
    computed. A kernel whose output is summed or concatenated first is not among them.

    Args:
      model: A name in :data:`svb_jax.models.MODELS`, or a network.
      image_shape: Height, width and channels of an image; the network's own if not given.
      **settings: What to pass to :func:`svb_jax.models.make` beside the name.

    Returns:
      The path of each such kernel and of its BatchNorm, in the order of use.

    Example:
      >>> import svb_jax.models
      >>> for kernel, norm in svb_jax.models.pairs("preact_resnet_20", depth=1)[:3]:
      ...     print(kernel, norm)
      conv1/kernel bn1
      stage1_unit01/conv1/kernel stage1_unit01/bn2
      stage2_unit01/conv1/kernel stage2_unit01/bn2
    """
    _, calls = _trace(*_resolve(model, image_shape, settings))
    kernel_of_output = {id(call.output): call.path + "/kernel" for call in calls if call.kernel}
    return tuple(
        (kernel_of_output[id(call.input)], call.path)
        for call in calls
        if call.is_batch_norm and id(call.input) in kernel_of_output
    )


def _resolve(
    model: str | Network, image_shape: Sequence[int] | None, settings: dict[str, Any]
) -> tuple[Network, jax.ShapeDtypeStruct]:
    """Return the network and one image for it, in the abstract."""
    network = make(model, **settings) if isinstance(model, str) else model
    shape = network.image_shape if image_shape is None else image_shape
    return network, jax.ShapeDtypeStruct((1, *shape), jnp.float32)


class _Call(NamedTuple):
    """A module as it was called; the tracers tell which output is which input."""

    path: str
    input: Any
    output: Any
    kernel: tuple[int, ...] | None
    is_batch_norm: bool


def _trace(model: Network, image: jax.ShapeDtypeStruct) -> tuple[Any, list[_Call]]:
    """Return the model's variables in the abstract, and the calls of its modules in order."""
    calls = []

    def record(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = method(*args, **kwargs)
        if context.method_name == "__call__":
            params = context.module.variables.get("params", {})
            stats = context.module.variables.get("batch_stats", {})
            kernel = params["kernel"].shape if "kernel" in params else None
            path = "/".join(context.module.path)
            calls.append(_Call(path, args[0], output, kernel, "scale" in params and "var" in stats))
        return output

    with nn.intercept_methods(record):
        variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), image)
    return variables, calls


def _measure(jaxpr: core.Jaxpr, input_depths: Sequence[int]) -> tuple[list[int], int]:
    """Return how many weight layers lie before each output, and the multiply-adds of all."""
    depths = dict(zip(jaxpr.invars, input_depths, strict=True))
    total = 0

    def depth_of(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else depths.get(atom, 0)

    for equation in jaxpr.eqns:
        before = [depth_of(atom) for atom in equation.invars]
        nested = [value for value in equation.params.values() if isinstance(value, core.ClosedJaxpr)]
        if nested:
            after, multiply_adds = _measure(nested[0].jaxpr, before)
        else:
            multiply_adds = _multiply_adds(equation)
            after = [max(before, default=0) + (multiply_adds > 0)] * len(equation.outvars)
        depths.update(zip(equation.outvars, after, strict=True))
        total += multiply_adds
    return [depth_of(atom) for atom in jaxpr.outvars], total


def _multiply_adds(equation: core.JaxprEqn) -> int:
    """Return the products in one convolution or matrix multiplication, and 0 for anything else."""
    numbers: Any = equation.params.get("dimension_numbers")
    outputs = prod(_shape(equation.outvars[0]))
    match equation.primitive.name:
        case "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            return outputs * prod(kernel) // kernel[numbers.rhs_spec[0]]
        case "dot_general":
            (contracted, _), _ = numbers
            return outputs * prod(_shape(equation.invars[0])[axis] for axis in contracted)
    return 0


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape
