"""Each device decomposes its share, and only that; every device ends up with all results."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from svb_jax import projection, routes, together
from svb_jax.sharing import balanced_counts, clip_stacks
from svb_jax.stacks import Stacks
from tests.compiled_program import expensive_operations
from tests.prescribed import LOWER, UPPER, before_and_after

MESH = jax.make_mesh((8,), ("d",))

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
    counts = balanced_counts([(5, 4, 3), (3, 6, 2), (1, 9, 9)], num_devices=8)
    # The 9 x 9 matrix keeps one device busy, five take a 4 x 3 each, and two deal the 6 x 2 out.
    np.testing.assert_array_equal(counts, [[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 2, 1], [1] + [0] * 7])


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 64])
def test_the_shares_add_up(num_devices):
    counts = balanced_counts(WRN_28_10, num_devices)
    np.testing.assert_array_equal(counts.sum(axis=1), [count for count, _, _ in WRN_28_10])


def test_no_device_of_eight_has_more_than_a_sixth_of_a_wide_residual_network():
    costs = np.array([max(m, n) * min(m, n) ** 2 for _, m, n in WRN_28_10])
    work = costs @ balanced_counts(WRN_28_10, num_devices=8)
    assert work.max() <= work.sum() / 6


def prescribed_stacks():
    """Return two rows of stacks before and after, the third matrix of the first one spoilt."""
    pairs = {
        "4 x 3": [before_and_after(4, 3, seed) for seed in range(5)],
        "6 x 2": [before_and_after(6, 2, seed) for seed in range(3)],
        "8 x 8": [before_and_after(8, 8)],
    }
    before, after = (
        {key: np.stack([pair[i] for pair in stack]) for key, stack in pairs.items()} for i in (0, 1)
    )
    before["4 x 3"][2, 1, 1] = np.nan
    after["4 x 3"][2] = before["4 x 3"][2]
    return as_rows(before), as_rows(after)


def as_rows(stacks):
    first, second, third = (jnp.asarray(stack, jnp.float32) for stack in stacks.values())
    return [Stacks.of([first, second]), Stacks.of([third])]


def clip(stacks, method, axis_name=None, mesh=None):
    bands = [[(LOWER, UPPER)] * len(row.shapes) for row in stacks]
    return clip_stacks(stacks, bands, method, axis_name, mesh)


def over_axis(stacks, method):
    def per_device(stacks):
        return clip(stacks, method, axis_name="d")

    return jax.shard_map(per_device, mesh=MESH, in_specs=P(), out_specs=P())(stacks)


def over_mesh(stacks, method):
    return clip(stacks, method, mesh=MESH)


def over_two_axes(stacks, method):
    return clip(stacks, method, mesh=jax.make_mesh((4, 2), ("a", "b")))


@pytest.fixture
def decompositions(monkeypatch):
    """Count the decompositions of each device by the route svd."""
    counted = Counter()
    clip_by_svd = routes._clip_by_svd

    def counting(matrix, *band):
        jax.debug.callback(lambda device: counted.update([int(device)]), lax.axis_index("d"))
        return clip_by_svd(matrix, *band)

    monkeypatch.setattr(routes, "_clip_by_svd", counting)
    projection._clip_stacks.clear_cache()
    yield counted
    projection._clip_stacks.clear_cache()


@pytest.mark.parametrize("share", [over_axis, over_mesh])
def test_each_device_decomposes_its_share_only(share, decompositions):
    before, after = prescribed_stacks()
    clipped, reading = jax.jit(share, static_argnames="method")(before, method="svd")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), clipped, after)
    jax.effects_barrier()
    shares = balanced_counts([shape for row in before for shape in row.shapes], 8).sum(axis=0)
    spoilt = 3  # The 4 x 3 matrices belong to devices 1 to 5, and the third of them is not decomposed.
    expected = {device: int(count) for device, count in enumerate(shares) if device != spoilt}
    assert decompositions == expected
    assert sum(decompositions.values()) == 8
    assert int(reading.skipped) == 1
    assert int(reading.exact) == 8


# On accelerators a share of a stack is decomposed together; the route polar takes that way everywhere.
@pytest.mark.parametrize("route", ["svd", "auto"])
def test_shares_taken_together_are_the_same(route, monkeypatch):
    monkeypatch.setattr(projection, "by_products", together.by_route(routes.ROUTES[route]))
    projection._clip_stacks.clear_cache()
    before, after = prescribed_stacks()
    clipped, reading = jax.jit(over_two_axes, static_argnames="method")(before, method="polar")
    projection._clip_stacks.clear_cache()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), clipped, after)
    assert int(reading.skipped) == 1
    assert int(reading.values) == 4 * 3 + 3 * 2 + 8


def test_one_device_reads_what_eight_read():
    before, _ = prescribed_stacks()
    _, alone = jax.jit(clip, static_argnames="method")(before, method="svd")
    _, shared = jax.jit(over_mesh, static_argnames="method")(before, method="svd")
    jax.tree.map(np.testing.assert_array_equal, shared, alone)
    np.testing.assert_allclose(shared.smallest, 0.1, rtol=1e-5)
    np.testing.assert_allclose(shared.largest, 3.0, rtol=1e-6)


def test_what_runs_on_every_step_would_be_found_in_a_program():
    def decompose(x):
        return jnp.linalg.svd(lax.psum(x, "d"), compute_uv=False)

    step = jax.shard_map(decompose, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    always, conditionals = expensive_operations(jax.jit(step).lower(jnp.eye(3)).compile().as_text())
    assert {"all-reduce", "lapack_sgesdd_ffi"} <= {line.strip(" (").split('"')[-1] for line in always}
    assert conditionals == []
