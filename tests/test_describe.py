"""What would be bounded, as a table: checked against what bounding then does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import svb_jax
from svb_jax import MatrixAxes, by_path, describe, grouped_convolutions, project, scan_stacks
from svb_jax._src.paths import named_leaves

CONV, HEAD = {"kernel": jnp.ones((3, 3, 2, 4)), "bias": jnp.ones(4)}, {"kernel": jnp.ones((4, 10))}
PARAMS = {
    "conv": CONV,
    "head": HEAD,
    "tokens": {"embedding": jnp.ones((9, 4))},
    "empty": {"kernel": jnp.ones((0, 3))},
}


def rows(*arguments, **options):
    return {row.path: row for row in describe(*arguments, **options).rows}


def test_every_leaf_has_a_row_that_says_how_it_is_read_or_why_not():
    found = rows(PARAMS, 0.5)
    assert list(found) == ["conv/bias", "conv/kernel", "empty/kernel", "head/kernel", "tokens/embedding"]
    kernel = found["conv/kernel"]
    assert (kernel.num_matrices, kernel.matrix_shape, kernel.axes) == (1, (4, 18), "in 0, 1, 2; out 3")
    np.testing.assert_allclose(kernel.band, (2 / 3, 1.5))
    assert {path: row.left_alone for path, row in found.items() if not row.num_matrices} == {
        "conv/bias": "not called kernel, w or weight",
        "empty/kernel": "has no entries",
        "tokens/embedding": "not called kernel, w or weight",
    }


def test_bands_follow_patterns_schedules_and_centres():
    found = rows(
        PARAMS, {"head": lambda count: 1.0 / (1 + count), "*": 0.25}, centre=lambda out, inputs: out / 2
    )
    np.testing.assert_allclose(found["head/kernel"].band, (2.5, 10))
    np.testing.assert_allclose(found["conv/kernel"].band, (1.6, 2.5))


@pytest.mark.parametrize(
    "where",
    ["head", ["head"], svb_jax.paths("head"), {"conv": False, "head": True, "tokens": False, "empty": False}],
)
def test_where_leaves_leaves_out(where):
    found = rows(PARAMS, where=where)
    assert [path for path, row in found.items() if row.num_matrices] == ["head/kernel"]
    assert found["conv/kernel"].left_alone == "outside where"


def test_stacks_groups_and_left_out_leaves_are_told():
    params = {"blocks": {"kernel": jnp.ones((5, 3, 4))}, "conv": CONV, "odd": {"kernel": jnp.ones((2, 3, 4))}}
    numbers = scan_stacks("blocks", inner=grouped_convolutions({"conv": 2}, inner=by_path({"odd": None})))
    found = rows(params, dimension_numbers=numbers)
    assert found["blocks/kernel"].num_matrices == 5
    assert found["blocks/kernel"].axes == "in 1; out 2; each of 0"
    assert (found["conv/kernel"].num_matrices, found["conv/kernel"].matrix_shape) == (2, (2, 18))
    assert found["conv/kernel"].axes == "in 0, 1, 2; out 3; 2 groups"
    assert found["odd/kernel"].left_alone == "left out by dimension_numbers"


class Tokens(eqx.Module):
    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell


KEY = jax.random.key(0)
NETWORKS = {
    "dict": PARAMS,
    "equinox": eqx.filter(
        Tokens(eqx.nn.Embedding(8, 4, key=KEY), eqx.nn.GRUCell(4, 4, key=KEY)), eqx.is_array
    ),
    "nnx": nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("params", NETWORKS.values(), ids=NETWORKS)
def test_what_is_told_is_what_moves(params):
    large = jax.tree.map(lambda leaf: 9 * jnp.ones_like(leaf), params)
    found = rows(large, 0.5)
    moved = project(large, 0.5, method="svd")
    for leaf in named_leaves(moved):
        assert bool(jnp.any(leaf.value != 9)) == (found[leaf.label].num_matrices > 0)


def test_shapes_are_enough():
    assert describe(jax.eval_shape(lambda: PARAMS)) == describe(PARAMS)


def test_an_embedding_of_equinox_is_called_one():
    assert rows(NETWORKS["equinox"])["embedding/weight"].left_alone == "embedding"


def test_it_prints_as_text_and_as_html():
    described = describe(PARAMS)
    lines = str(described).split("\n")
    assert lines[0] == "2 matrices in 2 of 5 leaves would be bounded"
    assert len(lines) == 2 + len(described.rows)
    page = described._repr_html_()
    assert page.count("<tr>") == 1 + len(described.rows)
    assert ">conv/kernel</td>" in page


def test_it_raises_where_bounding_would():
    for wrong in (describe, svb_jax.bound_singular_values(0.5).init):
        with pytest.raises(ValueError, match="cannot tell how 'blocks/kernel'"):
            wrong({"blocks": {"kernel": jnp.ones((5, 3, 4))}})
    with pytest.raises(ValueError, match=r"describe's epsilon found no leaf that 'haed' matches"):
        describe(PARAMS, {"haed": 0.1, "*": 0.5})
    with pytest.raises(ValueError, match=r"describe's epsilon needs a pattern for every matrix"):
        describe(PARAMS, {"head": 0.1})
    with pytest.raises(ValueError, match=r"describe needs a finite epsilon >= 0, got -1"):
        describe(PARAMS, -1.0)


def test_muons_axes_are_described_too():
    numbers = {"kernel": optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)}
    (row,) = describe({"kernel": jnp.ones((3, 3, 2, 4))}, dimension_numbers=numbers).rows
    assert row.matrix_shape == (4, 18)
    (row,) = describe({"kernel": jnp.ones((3, 4))}, dimension_numbers={"kernel": MatrixAxes(1, 0)}).rows
    assert row.matrix_shape == (3, 4)
