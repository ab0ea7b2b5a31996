"""Each matrix is clipped by one device, whatever lies where, and comes back as it lay."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import svb_jax
from svb_jax._src.clip.assignment import assign
from svb_jax._src.clip.cpu import routes
from svb_jax._src.leaves import matrix_leaves, project_leaves, summarise
from tests.compiled_program import assert_only_taken_branches_work, expensive_operations
from tests.prescribed import EPSILON, before_and_after

MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

# Stacks (count, m, n) of all convolutions of WRN-28-10 and its classifier.
WRN_28_10 = [
    (1, 27, 16),
    (1, 144, 160),
    (1, 16, 160),
    (7, 1440, 160),
    (1, 1440, 320),
    (1, 160, 320),
    (7, 2880, 320),
    (1, 2880, 640),
    (1, 320, 640),
    (7, 5760, 640),
    (1, 640, 10),
]


def test_the_dearest_matrices_are_dealt_first_and_none_twice():
    counts = assign([(5, 4, 3), (3, 6, 2), (1, 9, 9)], num_owners=8)
    # The 9 x 9 matrix keeps one device busy, five take a 4 x 3 each, and two deal the 6 x 2 out.
    np.testing.assert_array_equal(counts, [[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 2, 1], [1] + [0] * 7])


@pytest.mark.parametrize("num_owners", [1, 2, 3, 8, 64])
def test_the_shares_add_up(num_owners):
    counts = assign(WRN_28_10, num_owners)
    np.testing.assert_array_equal(counts.sum(axis=1), [count for count, _, _ in WRN_28_10])


def test_no_device_of_eight_has_more_than_a_sixth_of_a_wide_residual_network():
    costs = np.array([max(m, n) * min(m, n) ** 2 for _, m, n in WRN_28_10])
    work = costs @ assign(WRN_28_10, num_owners=8)
    assert work.max() <= work.sum() / 6


def prescribed(*counts_and_shapes):
    """Return scanned kernels (count, rows, columns) of prescribed spectra, before and after."""
    before, after = {}, {}
    for index, (count, rows, columns) in enumerate(counts_and_shapes):
        pairs = [before_and_after(rows, columns, seed) for seed in range(count)]
        name = f"block{index}"
        before[name], after[name] = ({"kernel": np.float32([pair[i] for pair in pairs])} for i in (0, 1))
    return before, after


# Square, wide and tall ones of equal sides, a number of them that eight devices share evenly, fewer than
# devices, and one that is spoilt and must come back as it is.
BEFORE, AFTER = prescribed((3, 8, 8), (4, 8, 16), (4, 16, 8), (1, 24, 8))
BEFORE["block0"]["kernel"][2, 1, 1] = np.nan
AFTER["block0"]["kernel"][2] = BEFORE["block0"]["kernel"][2]
STACKS = svb_jax.scan_stacks("*")

SPECS = {
    "replicated": (P(), P(), P(), P()),
    "rows": (P(None, "d"), P(None, "d"), P(None, "d"), P(None, "d")),
    "columns": (P(None, None, "d"),) * 4,
    "longest": (P(None, "d"), P(None, None, "d"), P(None, "d"), P()),
}
SPECS_2D = {
    "both sides": (P(None, "a", "b"), P(None, "b", "a"), P(None, ("a", "b")), P(None, ("b", "a"), None)),
    "model alone": (P(None, None, "a"), P(None, "a"), P(), P(None, None, "b")),
    "batch": (P(), P("a", "b"), P("b", None, "a"), P(None, "a")),
}


def placements(kinds, names):
    """Return meshes, with axes of these kinds, and how the kernels lie on them."""
    meshes = {
        "1d": jax.make_mesh((8,), ("d",), axis_types=kinds[:1]),
        "2d": jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds),
    }
    return [
        pytest.param(meshes[size], specs[name], id=f"{' and '.join(kind.name for kind in kinds)}, {name}")
        for size, specs in (("1d", SPECS), ("2d", SPECS_2D))
        for name in specs
        if name in names
    ]


def shardings_of(mesh, specs):
    return {name: {"kernel": NamedSharding(mesh, spec)} for name, spec in zip(BEFORE, specs, strict=True)}


def assert_projected(result, shardings=None):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-6), jax.device_get(result), AFTER)
    if shardings is not None:
        assert_lie(result, shardings)


def assert_lie(result, shardings):
    for leaf, sharding in zip(jax.tree.leaves(result), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize(
    ("mesh", "specs"),
    placements((AxisType.Auto,) * 2, SPECS | SPECS_2D)
    + placements((AxisType.Explicit,) * 2, ("longest", "batch"))
    + placements((AxisType.Explicit, AxisType.Auto), ("batch", "model alone"))
    + placements((AxisType.Auto, AxisType.Explicit), ("batch",)),
)
def test_matrices_come_back_projected_and_as_they_lay(mesh, specs):
    shardings = shardings_of(mesh, specs)
    placed = jax.device_put(BEFORE, shardings)
    project = partial(svb_jax.project, epsilon=EPSILON, dimension_numbers=STACKS, mesh=mesh)
    assert_projected(jax.jit(partial(project, shardings=shardings))(placed), shardings)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_say_how_they_lie_outside_of_jit_and_keep_it_inside(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    shardings = shardings_of(mesh, SPECS["longest"])
    project = partial(svb_jax.project, epsilon=EPSILON, dimension_numbers=STACKS, mesh=mesh)
    placed = jax.device_put(BEFORE, shardings)
    assert_projected(project(placed), shardings)
    assert_projected(jax.jit(project)(placed), shardings)


def over_axis(params, **options):
    project = partial(svb_jax.project, epsilon=EPSILON, dimension_numbers=STACKS, axis_name="d", **options)
    return jax.shard_map(project, mesh=MESH, in_specs=P(), out_specs=P())(params)


def over_mesh(params, **options):
    return svb_jax.project(params, EPSILON, dimension_numbers=STACKS, mesh=MESH, **options)


@pytest.mark.parametrize("method", ["svd", "products"])
@pytest.mark.parametrize("share", [over_axis, over_mesh])
def test_replicated_matrices_are_shared_by_axis_and_by_mesh(share, method):
    assert_projected(jax.jit(partial(share, method=method))(BEFORE))


@pytest.fixture
def decompositions(monkeypatch):
    """Count the decompositions of each device by the route svd."""
    counted = Counter()
    clip_by_svd = routes.clip_by_svd

    def counting(matrix, *rest):
        jax.debug.callback(lambda device: counted.update([int(device)]), lax.axis_index("d"))
        return clip_by_svd(matrix, *rest)

    monkeypatch.setattr(routes, "clip_by_svd", counting)
    jax.clear_caches()
    yield counted
    jax.clear_caches()


@pytest.mark.parametrize("share", [over_axis, over_mesh])
def test_each_matrix_is_decomposed_once(share, decompositions):
    assert_projected(jax.jit(partial(share, method="svd"))(BEFORE))
    jax.effects_barrier()
    # Twelve matrices, of which one is spoilt; eight of them go alone, one to each device.
    assert sum(decompositions.values()) == 11
    assert max(decompositions.values()) <= 2


def seen(**options):
    leaves = matrix_leaves(BEFORE, STACKS)
    _, clipped = project_leaves(
        leaves,
        [jnp.asarray(leaf) for leaf in jax.tree.leaves(BEFORE)],
        [EPSILON] * len(leaves),
        centre=1.0,
        method="svd",
        **options,
    )
    return summarise(clipped, [leaf.matrix_shape for leaf in leaves])


def test_one_device_sees_what_eight_see():
    alone = jax.jit(partial(seen, axis_name=None, mesh=None))()
    shared = jax.jit(partial(seen, axis_name=None, mesh=MESH))()
    jax.tree.map(np.testing.assert_array_equal, shared, alone)
    assert [int(shared.num_skipped), int(shared.num_values)] == [1, 2 * 8 + 8 * 8 + 8]
    np.testing.assert_allclose(shared.sigma_min, 0.1, rtol=1e-5)
    np.testing.assert_allclose(shared.sigma_max, 3.0, rtol=1e-6)


def test_conv_and_grouped_kernels_sharded_on_inputs_or_outputs():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"inputs": (3, 3, 8, 16), "outputs": (3, 3, 8, 16), "grouped": (3, 3, 4, 16)}
    params = {
        name: {"kernel": jax.random.normal(key, shape)}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    specs = {
        "inputs": P(None, None, "a"),
        "outputs": P(None, None, None, ("a", "b")),
        "grouped": P(None, None, "b", "a"),
    }
    shardings = {name: {"kernel": NamedSharding(mesh, spec)} for name, spec in specs.items()}
    axes = {
        name: {"kernel": svb_jax.MatrixAxes((0, 1, 2), 3, 2 if name == "grouped" else 1)} for name in specs
    }
    project = partial(svb_jax.project, epsilon=EPSILON, dimension_numbers=axes)
    expected = project(params)
    result = jax.jit(partial(project, shardings=shardings))(jax.device_put(params, shardings))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-6), jax.device_get(result), expected)
    assert_lie(result, shardings)


def compiled_step(mesh, specs):
    """Return the program of an optimizer's step on sharded parameters, which are donated."""
    shardings = shardings_of(mesh, specs)
    tx = svb_jax.svb(
        optax.sgd(0.1), EPSILON, every=3, method="svd", dimension_numbers=STACKS, shardings=shardings
    )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    placed = jax.device_put(BEFORE, shardings)
    state = jax.device_put(tx.init(placed), NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=(0, 1)).lower(placed, state, placed).compile().as_text()


@pytest.mark.parametrize("name", ["replicated", "longest"])
def test_nothing_is_exchanged_on_steps_that_are_not_due(name):
    assert_only_taken_branches_work(compiled_step(MESH, SPECS[name]))


def test_sharded_matrices_are_not_gathered():
    _, [[_, taken]] = expensive_operations(compiled_step(MESH, (P(None, "d"),) * 4))
    # The figures of a round are gathered; of its matrices there is one exchange in and one out.
    kinds = Counter(line.strip(" (") for line in taken if "lapack" not in line)
    assert kinds == {"all-to-all": 4, "all-gather": 2}


def test_what_runs_on_every_step_would_be_found_in_a_program():
    def decompose(x):
        return jnp.linalg.svd(lax.psum(x, "d"), compute_uv=False)

    step = jax.shard_map(decompose, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    always, conditionals = expensive_operations(jax.jit(step).lower(jnp.eye(3)).compile().as_text())
    assert {"all-reduce", "lapack_sgesdd_ffi"} <= {line.strip(" (").split('"')[-1] for line in always}
    assert conditionals == []


def gradient_of_projected(params, **where):
    def loss(params):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(svb_jax.project(params, 0.3, **where)))

    return jax.grad(loss)(params)


GAUSSIAN = {
    "a": {"kernel": jax.random.normal(jax.random.key(0), (8, 4))},
    "b": {"kernel": jax.random.normal(jax.random.key(1), (3, 3, 4, 8))},
    "c": {"kernel": jax.random.normal(jax.random.key(2), (8, 4))},
}


class TestGradients:
    """What devices share has the gradient of what they do not."""

    def check(self, gradient):
        expected = gradient_of_projected(GAUSSIAN)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-6), gradient, expected)

    @pytest.mark.parametrize("shape", [(8,), (4, 2)])
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("is_sharded", [False, True])
    def test_over_a_mesh(self, shape, kind, is_sharded):
        mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))
        spec = P(*[None] * 3, mesh.axis_names) if is_sharded else P()
        params = {"b": {"kernel": jax.device_put(GAUSSIAN["b"]["kernel"], NamedSharding(mesh, spec))}}
        with jax.set_mesh(mesh):
            params = jax.device_put(GAUSSIAN, NamedSharding(mesh, P())) | params
            self.check(jax.jit(partial(gradient_of_projected, mesh=mesh))(params))

    @pytest.mark.parametrize("check_vma", [False, True])
    def test_over_an_axis(self, check_vma):
        gradient = partial(gradient_of_projected, axis_name="d")
        mapped = jax.shard_map(gradient, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=check_vma)
        self.check(jax.jit(mapped)(GAUSSIAN))
