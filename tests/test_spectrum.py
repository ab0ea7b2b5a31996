"""Readings against matrices built from prescribed spectra, and convolutions against their dense matrices."""

import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from svb_jax import (
    conv_operator_singular_values,
    folded_singular_values,
    grouped_convolutions,
    plot_spectrum,
    scan_stacks,
    singular_values,
    spectrum_summary,
)


def orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.standard_normal((rows, columns)))[0]


def with_spectrum(rng, rows, columns, values):
    """Return a matrix (rows, columns) with these singular values."""
    rank = len(values)
    return orthonormal(rng, rows, rank) * np.asarray(values) @ orthonormal(rng, columns, rank).T


@pytest.fixture
def rng():
    return np.random.default_rng(0)


VALUES = np.array([2.5, 1.2, 0.9, 0.1])


@pytest.mark.parametrize("function", [singular_values, spectrum_summary, plot_spectrum])
def test_traced_parameters_are_answered_with_where_to_call_it(function):
    with pytest.raises(TypeError, match="got a traced 'dense/kernel': call it outside jit"):
        jax.jit(function)({"dense": {"kernel": jnp.eye(2)}})


@pytest.mark.parametrize("function", [singular_values, spectrum_summary, plot_spectrum])
def test_shapes_alone_have_no_spectrum(function):
    with pytest.raises(TypeError, match="got only the shape of 'dense/kernel'"):
        function({"dense": {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}})


class TestSingularValues:
    @pytest.mark.parametrize(("rows", "columns"), [(4, 9), (9, 4), (4, 4)])
    def test_reads_a_prescribed_spectrum_in_descending_order(self, rng, rows, columns):
        params = {
            "dense": {"kernel": jnp.asarray(with_spectrum(rng, rows, columns, VALUES)), "bias": jnp.ones(4)}
        }
        values = singular_values(params)
        assert list(values) == ["dense/kernel"]
        np.testing.assert_allclose(values["dense/kernel"], VALUES, rtol=2e-6)

    def test_a_convolution_kernel_is_the_papers_matrix(self, rng):
        kernel = with_spectrum(rng, 3 * 3 * 5, 4, VALUES).reshape(3, 3, 5, 4)
        np.testing.assert_allclose(
            singular_values({"kernel": jnp.asarray(kernel)})["kernel"], VALUES, rtol=2e-6
        )

    def test_a_leaf_of_several_matrices_has_a_row_for_each(self, rng):
        stack = np.stack([with_spectrum(rng, 6, 4, VALUES * scale) for scale in (1, 2, 3)])
        values = singular_values(
            {"blocks": {"kernel": jnp.asarray(stack)}}, dimension_numbers=scan_stacks("blocks")
        )
        np.testing.assert_allclose(values["blocks/kernel"], np.outer([1, 2, 3], VALUES), rtol=2e-6)

    def test_half_types_are_read_as_stored(self):
        kernel = jnp.diag(jnp.array([3.0, 1.0, 0.5], jnp.bfloat16))
        np.testing.assert_array_equal(singular_values({"kernel": kernel})["kernel"], [3.0, 1.0, 0.5])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_matrix_that_is_not_finite_reads_nan_and_spoils_no_other(self, bad):
        stack = jnp.stack([jnp.eye(4), jnp.eye(4).at[2, 1].set(bad), 2 * jnp.eye(4)])
        values = singular_values({"s": {"kernel": stack}}, dimension_numbers=scan_stacks("s"))["s/kernel"]
        np.testing.assert_array_equal(values, [[1] * 4, [np.nan] * 4, [2] * 4])

    def test_reads_arrays_on_many_devices(self, rng):
        mesh = jax.make_mesh((8,), ("d",))
        kernel = jnp.asarray(with_spectrum(rng, 8, 4, VALUES))
        for spec in (PartitionSpec(), PartitionSpec("d")):
            placed = jax.device_put(kernel, NamedSharding(mesh, spec))
            np.testing.assert_allclose(singular_values({"kernel": placed})["kernel"], VALUES, rtol=2e-6)

    def test_reads_convolutions_sharded_by_their_type(self, rng):
        mesh = jax.make_mesh((8,), ("d",))
        kernel = jnp.asarray(with_spectrum(rng, 3 * 8, 4, VALUES).reshape(1, 3, 8, 4))
        placed = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(None, None, "d")))
        assert any(jax.typeof(placed).sharding.spec)
        np.testing.assert_allclose(singular_values({"kernel": placed})["kernel"], VALUES, rtol=2e-6)
        (row,) = spectrum_summary({"kernel": placed}).rows
        assert row.sigma_max == pytest.approx(2.5, rel=2e-6)

    def test_float64_of_numpy_keeps_its_precision(self, rng):
        values = singular_values({"kernel": with_spectrum(rng, 9, 4, VALUES)})["kernel"]
        np.testing.assert_allclose(values, VALUES, rtol=1e-13)


class TestSpectrumSummary:
    def test_figures_of_a_prescribed_spectrum(self, rng):
        params = {"a": {"kernel": jnp.asarray(with_spectrum(rng, 9, 4, VALUES))}}
        (row,) = spectrum_summary(params, epsilon=0.25).rows
        assert (row.path, row.num_matrices, row.shape) == ("a/kernel", 1, (4, 9))
        assert row.sigma_min == pytest.approx(0.1, rel=1e-5)
        assert row.sigma_max == pytest.approx(2.5, rel=1e-5)
        assert row.condition_number == pytest.approx(25, rel=1e-5)
        assert row.share_in_band == 0.5  # 1.2 and 0.9 of [0.8, 1.25]
        short = np.asarray(params["a"]["kernel"], np.float64).T
        assert row.orthogonality_distance == pytest.approx(
            np.linalg.norm(short @ short.T - np.eye(4)), rel=1e-9
        )

    def test_a_leaf_of_several_matrices_gives_its_worst(self):
        stack = jnp.stack([jnp.diag(jnp.array([2.0, 1.0])), jnp.diag(jnp.array([0.9, 0.3]))])
        (row,) = spectrum_summary({"s": {"kernel": stack}}, 1.0, dimension_numbers=scan_stacks("s")).rows
        assert row.num_matrices == 2
        assert (row.sigma_min, row.sigma_max) == pytest.approx((0.3, 2.0))
        assert row.condition_number == pytest.approx(3.0)
        assert row.share_in_band == 0.75
        assert row.orthogonality_distance == pytest.approx(3.0)

    @pytest.mark.parametrize(("distance", "share"), [(0.9, 1.0), (1.1, 0.0)])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 5e-6), (np.float64, 1e-12)])
    def test_the_bands_edge_counts_to_what_computing_in_the_type_leaves(
        self, distance, share, dtype, tolerance
    ):
        step = 1 + tolerance * distance
        kernel = np.diag([1.5 * step, 2 / 3 / step]).astype(dtype)
        (row,) = spectrum_summary({"kernel": kernel}, epsilon=0.5).rows
        assert row.share_in_band == share

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("shape", [(16, 16), (3, 3, 16, 32), (64, 256), (1, 7)])
    @pytest.mark.parametrize("epsilon", [0.01, 0.5, 4.0])
    def test_a_half_type_is_in_band_after_projecting_and_out_of_it_when_it_is(self, dtype, shape, epsilon):
        rng = np.random.default_rng(0)
        columns = shape[-1]
        rows = math.prod(shape) // columns
        # The exact projection, rounded once: values on both ends of the band.
        ends = np.resize([1 + epsilon, 1 / (1 + epsilon)], min(rows, columns))
        projected = jnp.asarray(with_spectrum(rng, rows, columns, ends).reshape(shape), dtype)
        (row,) = spectrum_summary({"kernel": projected}, epsilon).rows
        assert row.share_in_band == 1
        beyond = jnp.asarray(
            with_spectrum(rng, rows, columns, ends * (1 + epsilon) * 1.05).reshape(shape), dtype
        )
        assert spectrum_summary({"kernel": beyond}, epsilon).rows[0].share_in_band < 1

    def test_a_singular_matrix_has_an_infinite_condition_number(self):
        params = {"a": {"kernel": jnp.diag(jnp.array([1.0, 0.0]))}, "b": {"kernel": jnp.zeros((2, 2))}}
        assert [row.condition_number for row in spectrum_summary(params).rows] == [math.inf, math.inf]

    def test_a_matrix_of_lower_rank_prints_inf_and_an_ill_conditioned_one_few_digits(self, rng):
        columns = rng.standard_normal((9, 2))
        params = {
            "lower rank": {"kernel": np.hstack([columns, columns])},
            "tiny": {"kernel": np.diag([1.0, 1e-110])},
            "ill": {"kernel": np.diag([1.0, 1e-12])},
            "well": {"kernel": np.diag([1.0, 0.25])},
        }
        printed = [line.split() for line in str(spectrum_summary(params)).splitlines()[2:]]
        assert sorted(words[-3] for words in printed) == ["1.0e+12", "4.00", "inf", "inf"]

    def test_a_notebook_shows_a_table(self):
        page = spectrum_summary({"<a>": {"kernel": jnp.eye(2)}})._repr_html_()
        assert page.count("<tr>") == 2
        assert ">&lt;a&gt;/kernel</td>" in page

    def test_a_matrix_that_is_not_finite_reads_nan(self):
        (row,) = spectrum_summary({"kernel": jnp.full((2, 2), jnp.nan)}).rows
        assert math.isnan(row.sigma_max)
        assert math.isnan(row.condition_number)
        assert row.share_in_band == 0

    def test_columns_line_up(self):
        params = {"a": {"kernel": jnp.eye(2)}, "a_longer_name": {"kernel": 100 * jnp.ones((3, 3, 10, 7))}}
        lines = str(spectrum_summary(params)).splitlines()[1:]
        assert len({len(line) for line in lines}) == 1
        assert lines[2].split()[:5] == ["a_longer_name/kernel", "1", "7", "x", "90"]

    @pytest.mark.parametrize("epsilon", [-0.1, math.nan, math.inf])
    def test_refuses_a_band_that_is_none(self, epsilon):
        with pytest.raises(ValueError, match="spectrum_summary needs a finite epsilon >= 0, got"):
            spectrum_summary({"kernel": jnp.eye(2)}, epsilon)


def dense_operator(kernel, input_shape, strides=(1, 1), groups=1, padding="CIRCULAR"):
    """Return Flax's convolution as the float64 matrix that it multiplies flattened images by."""
    with jax.enable_x64(True):
        conv = nn.Conv(
            kernel.shape[3],
            kernel.shape[:2],
            strides=strides,
            padding=padding,
            feature_group_count=groups,
            use_bias=False,
            param_dtype=jnp.float64,
        )
        image_shape = (*input_shape, kernel.shape[2] * groups)
        size = math.prod(image_shape)
        images = jnp.eye(size).reshape(size, *image_shape)
        rows = conv.apply({"params": {"kernel": jnp.asarray(kernel)}}, images)
        return np.asarray(rows).reshape(size, -1).T


class TestConvOperator:
    @pytest.mark.parametrize(
        ("kernel_shape", "input_shape", "strides", "groups"),
        [
            ((3, 3, 2, 3), (4, 6), (1, 1), 1),
            ((3, 3, 3, 2), (5, 7), (1, 1), 1),
            ((1, 1, 3, 4), (4, 4), (1, 1), 1),
            ((2, 5, 2, 2), (6, 5), (1, 1), 1),
            ((3, 3, 2, 3), (4, 6), (2, 2), 1),
            ((3, 2, 2, 5), (6, 4), (3, 1), 1),
            ((1, 1, 2, 3), (4, 4), (2, 2), 1),
            ((2, 2, 2, 9), (4, 4), (2, 2), 1),
            ((7, 5, 1, 2), (3, 4), (1, 2), 1),
            ((3, 3, 2, 6), (4, 3), (1, 1), 3),
            ((3, 3, 1, 4), (4, 4), (2, 2), 4),
        ],
        ids=str,
    )
    def test_equals_the_dense_matrix_that_flax_applies(self, rng, kernel_shape, input_shape, strides, groups):
        kernel = rng.standard_normal(kernel_shape)
        dense = dense_operator(kernel, input_shape, strides, groups)
        expected = np.linalg.svd(dense, compute_uv=False)
        values = conv_operator_singular_values(kernel, input_shape, strides=strides, groups=groups)
        assert values.shape == expected.shape == (min(dense.shape),)
        np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)

    def test_one_stride_stands_for_both(self, rng):
        kernel = rng.standard_normal((3, 3, 2, 2))
        np.testing.assert_array_equal(
            conv_operator_singular_values(kernel, (4, 4), strides=2),
            conv_operator_singular_values(kernel, (4, 4), strides=(2, 2)),
        )

    def test_an_orthogonal_reshaped_kernel_may_be_far_from_an_orthogonal_map(self):
        # Three taps of 1/sqrt(3) are a unit row: the constant image grows by sqrt(3), a wave of three dies.
        kernel = np.full((1, 3, 1, 1), 1 / np.sqrt(3))
        reshaped = singular_values({"kernel": jnp.asarray(kernel)})["kernel"]
        np.testing.assert_allclose(reshaped, [1.0], rtol=1e-6)
        values = conv_operator_singular_values(kernel, (1, 6))
        expected = np.abs(1 + 2 * np.cos(2 * np.pi * np.arange(6) / 6)) / np.sqrt(3)
        np.testing.assert_allclose(values, np.sort(expected)[::-1], atol=1e-14)
        assert values[0] == pytest.approx(np.sqrt(3))
        assert values[-1] == pytest.approx(0, abs=1e-14)

    def test_a_single_tap_is_its_reshaped_kernel_wherever_it_sits(self, rng):
        kernel = np.zeros((3, 3, 4, 4))
        kernel[2, 0] = with_spectrum(rng, 4, 4, VALUES)
        np.testing.assert_allclose(
            conv_operator_singular_values(kernel, (5, 4)), np.repeat(VALUES, 20), rtol=1e-12
        )

    def test_patches_that_do_not_overlap_have_the_reshaped_kernels_spectrum(self, rng):
        kernel = with_spectrum(rng, 2 * 3 * 2, 4, VALUES).reshape(2, 3, 2, 4)
        values = conv_operator_singular_values(kernel, (4, 6), strides=(2, 3))
        np.testing.assert_allclose(values, np.repeat(VALUES, 4), rtol=1e-12)

    @pytest.mark.parametrize(("strides", "overlap"), [((1, 1), 9), ((2, 2), 4), ((3, 1), 3), ((3, 3), 1)])
    def test_the_largest_value_is_bounded_by_how_often_a_pixel_is_read(self, rng, strides, overlap):
        for _ in range(5):
            kernel = with_spectrum(rng, 9 * 2, 4, VALUES).reshape(3, 3, 2, 4)
            values = conv_operator_singular_values(kernel, (6, 6), strides=strides)
            assert values[0] <= np.sqrt(overlap) * VALUES[0] * (1 + 1e-12)

    @pytest.mark.parametrize(("strides", "overlap"), [((1, 1), 9), ((3, 1), 3), ((3, 3), 1)])
    def test_equal_taps_attain_the_bound(self, strides, overlap):
        kernel = np.full((3, 3, 1, 1), 1 / 3)
        values = conv_operator_singular_values(kernel, (6, 6), strides=strides)
        assert values[0] == pytest.approx(np.sqrt(overlap), rel=1e-12)

    def test_zero_padding_cannot_exceed_the_circular_map_on_the_padded_image(self, rng):
        kernel = rng.standard_normal((3, 3, 2, 3))
        zero_padded = np.linalg.norm(dense_operator(kernel, (4, 4), padding="SAME"), ord=2)
        assert zero_padded <= conv_operator_singular_values(kernel, (6, 6))[0]

    def test_half_types_and_kernels_that_are_not_finite(self):
        one = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
        np.testing.assert_array_equal(conv_operator_singular_values(one, (2, 2)), np.ones(4))
        assert np.isnan(conv_operator_singular_values(one * jnp.nan, (2, 2))).all()

    @pytest.mark.parametrize(
        ("kernel_shape", "arguments", "sentence"),
        [
            ((3, 2, 4), {}, r"needs a kernel \(height, width, in, out\), got shape \(3, 2, 4\)"),
            (
                (3, 3, 2, 4),
                {"input_shape": (4,)},
                r"needs the image's height and width as input_shape, got \(4,\)",
            ),
            ((3, 3, 2, 4), {"input_shape": (4, 0)}, r"needs the image's height and width .* got \(4, 0\)"),
            ((3, 3, 2, 4), {"strides": 3}, r"needs strides that divide input_shape \(4, 4\), got \(3, 3\)"),
            ((3, 3, 2, 4), {"strides": (1, 0)}, r"needs strides that divide .* got \(1, 0\)"),
            ((3, 3, 2, 4), {"groups": 3}, "needs groups that divide the 4 outputs, got 3"),
        ],
    )
    def test_refuses_what_is_no_convolution(self, kernel_shape, arguments, sentence):
        with pytest.raises(ValueError, match=f"conv_operator_singular_values {sentence}"):
            conv_operator_singular_values(np.ones(kernel_shape), **{"input_shape": (4, 4), **arguments})


class ConvBatchNorm(nn.Module):
    groups: int = 1
    use_scale: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (1, 1), use_bias=False, feature_group_count=self.groups)(x)
        return nn.BatchNorm(use_running_average=True, use_bias=False, use_scale=self.use_scale, epsilon=1e-3)(
            x
        )


def linen_layer(rng, groups=1, use_scale=True):
    """Return a layer's variables, and the matrix that Flax makes of its convolution and BatchNorm."""
    scale = {"BatchNorm_0": {"scale": rng.uniform(0.2, 3, 4)}} if use_scale else {}
    variables = {
        "params": {"Conv_0": {"kernel": rng.standard_normal((1, 1, 6 // groups, 4))}, **scale},
        "batch_stats": {"BatchNorm_0": {"mean": np.zeros(4), "var": rng.uniform(0.2, 3, 4)}},
    }
    variables = jax.tree.map(jnp.asarray, variables)
    layer = ConvBatchNorm(groups=groups, use_scale=use_scale)
    matrix = jax.jit(layer.apply)(variables, jnp.eye(6).reshape(6, 1, 1, 6)).reshape(6, 4)
    return variables, np.asarray(matrix, np.float64)


PAIRS = [("Conv_0/kernel", "BatchNorm_0")]


class TestFoldedSingularValues:
    @pytest.mark.parametrize("use_scale", [True, False])
    def test_equals_the_map_that_flax_applies(self, rng, use_scale):
        variables, matrix = linen_layer(rng, use_scale=use_scale)
        folded = folded_singular_values(**variables, pairs=PAIRS, bn_epsilon=1e-3)
        assert list(folded) == ["Conv_0/kernel"]
        expected = np.linalg.svd(matrix, compute_uv=False)
        np.testing.assert_allclose(folded["Conv_0/kernel"], expected, rtol=1e-5)

    def test_every_group_has_its_own_scales(self, rng):
        variables, matrix = linen_layer(rng, groups=2)
        folded = folded_singular_values(
            **variables,
            pairs=PAIRS,
            bn_epsilon=1e-3,
            dimension_numbers=grouped_convolutions({PAIRS[0][0]: 2}),
        )
        for group, values in enumerate(folded["Conv_0/kernel"]):
            block = matrix[3 * group : 3 * group + 3, 2 * group : 2 * group + 2]
            np.testing.assert_allclose(values, np.linalg.svd(block, compute_uv=False), rtol=1e-5)

    def test_scanned_layers_each_have_their_own(self):
        params = {"s": {"kernel": jnp.stack([jnp.eye(2)] * 3), "scale": jnp.arange(1.0, 7.0).reshape(3, 2)}}
        stats = {"s": {"var": jnp.full((3, 2), 4.0)}}
        folded = folded_singular_values(
            params, stats, [("s/kernel", "s")], bn_epsilon=0.0, dimension_numbers=scan_stacks("s")
        )
        np.testing.assert_allclose(folded["s/kernel"], [[1.0, 0.5], [2.0, 1.5], [3.0, 2.5]])

    def test_reads_nnx_states(self):
        class Layer(nnx.Module):
            def __init__(self):
                self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
                self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

        layer = Layer()
        layer.linear.kernel[...] = jnp.eye(2)
        layer.norm.scale[...] = jnp.array([3.0, 1.0])
        layer.norm.var[...] = jnp.array([1.0, 0.25])
        params, stats = nnx.state(layer, nnx.Param), nnx.state(layer, nnx.BatchStat)
        folded = folded_singular_values(params, stats, [("linear/kernel", "norm")], bn_epsilon=0.0)
        np.testing.assert_allclose(folded["linear/kernel"], [3.0, 2.0], rtol=1e-6)

    def test_reads_haikus_and_equinoxs_statistics(self):
        params = {"linear": {"w": jnp.eye(2)}, "batch_norm": {"scale": jnp.array([[3.0, 1.0]])}}
        state = {"batch_norm/~/var_ema": {"average": jnp.array([[1.0, 0.25]]), "hidden": jnp.zeros((1, 2))}}
        folded = folded_singular_values(params, state, [("linear/w", "batch_norm")], bn_epsilon=0.0)
        np.testing.assert_allclose(folded["linear/w"], [3.0, 2.0], rtol=1e-6)

        def layers():
            norm = eqx.nn.BatchNorm(2, "batch", mode="ema")
            return {"linear": eqx.nn.Linear(2, 2, key=jax.random.key(0)), "norm": norm}

        model, state = eqx.nn.make_with_state(layers)()
        model = eqx.tree_at(
            lambda m: (m["linear"].weight, m["norm"].weight), model, (jnp.eye(2), jnp.array([3.0, 1.0]))
        )
        state = state.set(model["norm"].ema_state_index, (jnp.zeros(2), jnp.array([1.0, 0.25])))
        params = eqx.filter(model, eqx.is_array)
        folded = folded_singular_values(params, state, [("linear/weight", "norm")], bn_epsilon=0.0)
        np.testing.assert_allclose(folded["linear/weight"], [3.0, 2.0], rtol=1e-6)

    @pytest.mark.parametrize(
        ("pairs", "sentence"),
        [
            (
                [("Conv_1/kernel", "BatchNorm_0")],
                "needs the path of a weight matrix in pairs, got 'Conv_1/kernel'; the nearest: 'Conv_0/ker",
            ),
            (
                [("Conv_0/kernel", "BatchNorm")],
                "needs the path of a BatchNorm in batch_stats in pairs, got 'BatchNorm'; the nearest: 'Bat",
            ),
            (PAIRS * 2, "needs one BatchNorm a kernel, got two for 'Conv_0/kernel'"),
        ],
    )
    def test_refuses_pairs_that_are_none(self, rng, pairs, sentence):
        variables, _ = linen_layer(rng)
        with pytest.raises(ValueError, match=f"folded_singular_values {sentence}"):
            folded_singular_values(**variables, pairs=pairs)

    def test_refuses_a_network_without_batch_norm(self):
        with pytest.raises(ValueError, match="got 'norm'; there is none"):
            folded_singular_values({"kernel": jnp.eye(2)}, {}, [("kernel", "norm")])

    def test_refuses_a_batch_norm_of_other_channels(self):
        stats = {"norm": {"var": jnp.ones(3)}}
        with pytest.raises(ValueError, match="got 'norm' of 3 channels after 'kernel' of 2 outputs"):
            folded_singular_values({"kernel": jnp.eye(2)}, stats, [("kernel", "norm")])


def test_huge_values_are_printed_with_an_exponent():
    params = {"kernel": np.diag(np.array([1e30, 2.0, 1.0], np.float32))}
    *_, row = str(spectrum_summary(params)).splitlines()
    assert row.split() == ["kernel", "1", "3", "x", "3", "1.0000", "1.0e+30", "inf", "33.3%", "1.0e+60"]
