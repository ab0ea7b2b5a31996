"""Small arrays share a row, and each comes back out of it as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import svb_jax
from benchmarks.jax_steps import list_fusions
from svb_jax.cutting import computed_zero
from svb_jax.packing import LARGEST_TO_MIX, LARGEST_TO_STACK, join, pack_equal, pack_small, split

ZERO = computed_zero(jnp.int32(3))


def counted(*shapes, dtype=np.float32):
    """Return arrays whose entries are all different."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        jnp.arange(end - np.prod(shape), end, dtype=dtype).reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


def test_what_is_packed_comes_back():
    arrays = counted((2, 3), (4,), (2, 3), (), (0, 3), (1, 1, 2))
    packing = pack_small(arrays)
    [row] = packing.pack(arrays)
    assert row.shape == (6 + 4 + 6 + 1 + 0 + 2,)
    for array, back in zip(arrays, packing.unpack([row], arrays, ZERO), strict=True):
        np.testing.assert_array_equal(array, back)


def test_equal_shapes_stand_side_by_side_in_the_order_of_their_first():
    packing = pack_small(counted((4,), (2, 3), (4,), (2, 3), (5,)))
    assert packing.rows == ((0, 2, 1, 3, 4),)


def test_types_are_not_mixed():
    first = [jnp.ones(2), jnp.ones(2, jnp.bfloat16), jnp.ones(3)]
    assert pack_small(first).rows == ((0, 2), (1,))
    second = [jnp.ones(2), jnp.ones(2), jnp.ones(3, jnp.bfloat16)]
    assert pack_small(first, second).rows == ((0,), (1,), (2,))


def test_larger_arrays_stay_alone_or_share_a_row_with_their_equals_only():
    small, middle, large = jnp.ones(3), jnp.ones(LARGEST_TO_MIX + 1), jnp.ones((LARGEST_TO_STACK + 1, 1))
    other = jnp.ones((LARGEST_TO_MIX + 1, 1))
    arrays = [small, middle, large, middle, other, large, jnp.ones(LARGEST_TO_MIX)]
    assert pack_small(arrays).rows == ((0, 6), (1,), (2,), (3,), (4,), (5,))
    packing = pack_equal([*arrays, jnp.ones(3, jnp.bfloat16)])
    assert packing.rows == ((0,), (1, 3), (2,), (4,), (5,), (6,), (7,))
    # What is alone is not even flattened.
    assert packing.pack([*arrays, small])[2] is large


def test_joined_arrays_are_split_again():
    arrays = counted((2, 3), (4,))
    for kept in (arrays, arrays[:1]):
        for array, back in zip(kept, split(join(kept), [array.shape for array in kept]), strict=True):
            np.testing.assert_array_equal(array, back)


def test_more_layers_of_the_same_shapes_need_no_more_kernels():
    def different_kernels(num_layers):
        layers = [(3, 3, 4, 4)] * num_layers + [(4, 10)]
        params = [{"kernel": jnp.ones(shape), "scale": jnp.ones(shape[-1])} for shape in layers]
        batch_stats = [{"var": jnp.ones(shape[-1])} for shape in layers]
        tx = svb_jax.bbn(svb_jax.svb(optax.sgd(0.1), epsilon=0.5, every=3), epsilon=1.0, every=3)

        def step(grads, state, params):
            updates, state = tx.update(grads, state, params, batch_stats=batch_stats)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step).lower(params, tx.init(params), params).compile()
        return len(set(list_fusions(compiled.as_text())))

    assert different_kernels(num_layers=12) <= different_kernels(num_layers=6)
