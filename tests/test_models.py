"""The networks are the paper's: their counts, their shapes, how they are wired."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from svb_jax import models
from svb_jax.models.layers import conv

NAMES = list(models.MODELS)
DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
DOCUMENTED = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\d,]+) \|", DOCUMENT.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "layers", "digits", "millions"),
    [
        ("convnet_8", 8, 3, "0.075"),
        ("convnet_20", 20, 3, "0.270"),
        ("convnet_38", 38, 3, "0.561"),
        ("preact_resnet_20", 20, 3, "0.272"),
        ("preact_resnet_68", 68, 2, "1.05"),
        ("wrn_28_10", 28, 2, "36.48"),
        ("wrn_28_16", 28, 2, "93.34"),
        ("wrn_28_10_authors", 28, 2, "36.81"),
        ("wrn_28_16_authors", 28, 2, "94.20"),
        ("inception_resnet_cifar", 90, 1, "32.5"),
        ("inception_resnet_imagenet", 96, 1, "32.5"),
        ("mlp", 3, 3, "0.086"),
        ("deep_linear", 8, 3, "0.029"),
    ],
)
def test_layers_and_parameters_of_every_model(name, layers, digits, millions):
    counts = models.summary(name)
    assert counts.layers == layers
    # The reconstruction alone misses the paper's number of layers.
    assert models.MODELS[name].paper_layers in (None, 92 if name == "inception_resnet_cifar" else layers)
    assert (name, str(layers), f"{counts.parameters:,}") in DOCUMENTED
    assert f"{counts.parameters / 1e6:.{digits}f}" == millions


def test_standard_wide_resnet_is_the_published_one_without_its_bias():
    assert models.summary("wrn_28_10").parameters == 36_479_194 - 10


def test_counts_of_the_smallest_convnet_by_hand():
    counts = models.summary("convnet_8")
    shapes = [(3, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
    positions = [32 * 32] * 3 + [16 * 16] * 2 + [8 * 8] * 2
    kernels = [9 * inputs * outputs for inputs, outputs in shapes]
    assert counts.parameters == sum(kernels) + sum(2 * outputs for _, outputs in shapes) + 64 * 10
    assert counts.multiply_adds == np.dot(kernels, positions) + 64 * 10
    assert counts.matrices == {
        **{f"conv{i:02d}/kernel": (3, 3, *shape) for i, shape in enumerate(shapes, start=1)},
        "head/kernel": (64, 10),
    }


def test_summary_allocates_nothing():
    assert models.summary("wrn_28_16", width=1000.0).parameters > 9e13


def test_summary_of_a_model_equals_that_of_its_name():
    model = models.make("convnet_20", width=0.5, num_classes=7)
    assert models.summary(model) == models.summary("convnet_20", width=0.5, num_classes=7)
    assert models.summary(model, (16, 16, 3)).multiply_adds < models.summary(model).multiply_adds


@pytest.mark.parametrize("num_classes", [10, 100, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_output_shape(name, num_classes):
    # The depth between the first and the last layer does not matter to the output.
    model = models.make(name, num_classes=num_classes, depth=1)
    images = jax.ShapeDtypeStruct((2, *models.MODELS[name].input_shape), jnp.float32)
    logits, variables = jax.eval_shape(partial(model.init_with_output, jax.random.key(0)), images)
    assert logits.shape == (2, num_classes)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", ["inception_resnet_cifar", "inception_resnet_imagenet"])
def test_inception_resnet_ends_with_a_map_of_eight(name):
    model = models.make(name, depth=1)
    images = jax.ShapeDtypeStruct((2, *model.image_shape), jnp.float32)
    run = partial(model.init_with_output, jax.random.key(0), capture_intermediates=True)
    found = jax.eval_shape(run, images)[1]["intermediates"]
    sizes = [found[block]["__call__"][0].shape[1:] for block in ("a01", "b01", "c01")]
    expected = [(32, 32, 384), (16, 16, 1152), (8, 8, 2144)]
    if "imagenet" in name:
        expected = [(35, 35, 384), (17, 17, 1152), (8, 8, 2144)]
    assert sizes == expected


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("preact_resnet_20", ["conv1 bn1"]),
        ("wrn_28_10", ["conv1 stage1_unit01/bn1"]),
        ("wrn_28_10_authors", ["conv1 bn1", "conv2 bn2", "conv3 bn3"]),
    ],
)
def test_pairs_of_residual_networks_are_where_a_batch_norm_follows(name, first):
    units = [f"stage{stage}_unit01" for stage in (1, 2, 3)]
    expected = first + [f"{unit}/conv1 {unit}/bn2" for unit in units]
    got = [f"{kernel.removesuffix('/kernel')} {norm}" for kernel, norm in models.pairs(name, depth=1)]
    assert got == expected


def test_pairs_of_plain_networks_are_all_but_the_classifier():
    assert models.pairs("convnet_8") == tuple((f"conv{i:02d}/kernel", f"bn{i:02d}") for i in range(1, 8))
    assert models.pairs("mlp") == (("dense01/kernel", "bn01"), ("dense02/kernel", "bn02"))
    assert models.pairs("deep_linear") == ()


def test_inception_resnet_pairs_every_kernel_that_is_not_summed_concatenated_or_last():
    paired = {kernel for kernel, _ in models.pairs("inception_resnet_cifar", depth=1)}
    unpaired = set(models.summary("inception_resnet_cifar", depth=1).matrices) - paired
    joins = {f"{block}/join/kernel" for block in ("a01", "b01", "b02", "c01")}
    ends_a = {f"reduction_a/branch{end}/kernel" for end in ("1_conv1", "2_conv3")}
    ends_b = {f"reduction_b/branch{end}/kernel" for end in ("1_conv2", "2_conv2", "3_conv3")}
    assert unpaired == joins | ends_a | ends_b | {"head/kernel"}


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_has_one_scale_for_each_output_of_its_kernel(name):
    model = models.make(name, depth=1)
    images = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
    params = jax.eval_shape(partial(model.init, jax.random.key(0)), images)["params"]
    for kernel, norm in models.pairs(model):
        *owner, leaf = kernel.split("/")
        at = partial(_descend, params)
        assert at(owner)[leaf].shape[-1:] == at(norm.split("/"))["scale"].shape


def _descend(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def test_convolution_stays_centred_at_stride_two():
    images = jax.random.normal(jax.random.key(0), (1, 8, 8, 1))
    kernel = jnp.zeros((3, 3, 1, 1)).at[1, 1].set(1.0)
    output = conv(1, (3, 3), 2).apply({"params": {"kernel": kernel}}, images)
    np.testing.assert_array_equal(output, images[:, ::2, ::2])


def test_norm_can_be_replaced():
    def group_norm(*, train, name):
        return nn.GroupNorm(num_groups=1, name=name)

    model = models.make("convnet_8", norm=group_norm)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    assert list(jax.eval_shape(partial(model.init, jax.random.key(0)), images)) == ["params"]
    assert models.pairs(model) == ()


def test_conv_can_be_replaced():
    with_bias = models.summary("convnet_8", conv=partial(nn.Conv, use_bias=True))
    without = models.summary("convnet_8")
    assert with_bias.parameters - without.parameters == 3 * 16 + 2 * 32 + 2 * 64


def test_batch_norm_is_the_papers():
    model = models.make("mlp", depth=2, hidden=3)
    inputs = jax.random.normal(jax.random.key(1), (6, 2, 2, 1))
    variables = model.init(jax.random.key(0), inputs)
    kernel, head = (variables["params"][layer]["kernel"] for layer in ("dense01", "head"))
    z = inputs.reshape(6, 4) @ kernel
    logits, updated = model.apply(variables, inputs, train=True, mutable=["batch_stats"])
    expected = jnp.maximum(0, (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)) @ head
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    stats = updated["batch_stats"]["bn01"]
    np.testing.assert_allclose(stats["mean"], 0.1 * z.mean(0), atol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * z.var(0), atol=1e-6)


def test_axis_name_synchronises_batch_norm():
    images = jax.random.normal(jax.random.key(1), (8, 2, 2, 1))
    alone = models.make("mlp", depth=2, hidden=3)
    variables = alone.init(jax.random.key(0), images)
    together = models.make("mlp", depth=2, hidden=3, axis_name="devices")

    def run(model, images):
        return model.apply(variables, images, train=True, mutable=["batch_stats"])

    logits, stats = run(alone, images)
    split_logits, split_stats = jax.vmap(partial(run, together), axis_name="devices")(
        images.reshape(2, 4, 2, 2, 1)
    )
    np.testing.assert_allclose(split_logits.reshape(8, 10), logits, atol=1e-5)
    for whole, parts in zip(jax.tree.leaves(stats), jax.tree.leaves(split_stats), strict=True):
        np.testing.assert_allclose(parts, jnp.stack([whole, whole]), atol=1e-6)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"got 'wrn-28-10'\. Did you mean 'wrn_28_10'"):
        models.make("wrn-28-10")


@pytest.mark.parametrize("setting", [{"width": 0.0}, {"depth": 0}, {"num_classes": -1}])
def test_settings_must_be_positive(setting):
    with pytest.raises(ValueError, match=f"needs a positive {next(iter(setting))}; got"):
        models.make("convnet_20", **setting)


def test_width_multiplies_every_channel_count_and_keeps_one():
    shapes = list(models.summary("convnet_8", width=0.03).matrices.values())
    assert [shape[-1] for shape in shapes] == [1, 1, 1, 1, 1, 2, 2, 10]
