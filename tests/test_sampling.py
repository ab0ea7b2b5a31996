import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svb_jax.training.sampling import batch_indices, example_at, steps_per_epoch


def stream(seed, batch_size, num_examples, steps):
    return np.concatenate([batch_indices(seed, step, batch_size, num_examples) for step in range(steps)])


def test_every_epoch_is_a_permutation_though_batches_cross_its_end():
    epochs = stream(seed=3, batch_size=4, num_examples=10, steps=10).reshape(4, 10)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4


def test_a_batch_may_be_larger_than_the_data_set():
    batch = batch_indices(0, 0, batch_size=7, num_examples=3)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_batches_of_every_size_cut_the_same_stream(batch_size, num_examples, seed):
    expected = [example_at(seed, position, num_examples) for position in range(3 * batch_size)]
    assert stream(seed, batch_size, num_examples, steps=3).tolist() == expected


def test_a_batch_depends_on_nothing_that_was_asked_before():
    expected = batch_indices(5, 7, 16, 100).copy()
    for step in (0, 1000, 20, 3):
        batch_indices(5, step, 16, 100)[:] = 0
    assert np.array_equal(batch_indices(5, 7, 16, 100), expected)


def test_seeds_name_different_streams():
    assert not np.array_equal(batch_indices(0, 0, 50, 50), batch_indices(1, 0, 50, 50))


def test_indices_are_int64():
    assert batch_indices(0, 0, 4, 10).dtype == np.int64


@pytest.mark.parametrize(("examples", "batch", "steps"), [(50_000, 128, 391), (50_000, 64, 782), (8, 4, 2)])
def test_an_epoch_takes_as_many_steps_as_the_paper_counts(examples, batch, steps):
    assert steps_per_epoch(examples, batch) == steps


@pytest.mark.parametrize(("step", "batch", "examples"), [(-1, 4, 10), (0, 0, 10), (0, 4, 0)])
def test_impossible_batches_are_refused(step, batch, examples):
    with pytest.raises(ValueError, match="batch_indices needs"):
        batch_indices(0, step, batch, examples)
