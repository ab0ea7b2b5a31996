import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from svb_jax.training import streaming
from svb_jax.training.crops import central_box, cut, random_box
from svb_jax.training.records import decode_image, find_dataset
from svb_jax.training.sampling import batch_indices
from svb_jax.training.streaming import make_stream
from tests.small_imagenet import number_of, write_small_imagenet

NUM_TRAIN, NUM_TEST = 24, 10


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    write_small_imagenet(data_dir, NUM_TRAIN, NUM_TEST)
    return data_dir


def batches(data_dir, count=None, **options):
    options = {"split": "train", "batch_size": 8, "seed": 3, "image_size": 16} | options
    with contextlib.closing(make_stream("imagenet2012", data_dir, **options)) as stream:
        return list(itertools.islice(stream, count))


def assert_equal(streams, expected):
    for batch, other in zip(streams, expected, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            assert np.array_equal(batch[name], other[name])


def test_the_data_set_is_described(data_dir):
    stored = find_dataset("imagenet2012", data_dir)
    assert (stored.num_train, stored.num_test, stored.num_classes) == (NUM_TRAIN, NUM_TEST, 1000)


def test_training_follows_the_permutations(data_dir):
    stored = [int(e["file_name"][2:5]) for e in find_dataset("imagenet2012", data_dir).open("train")]
    assert sorted(stored) == list(range(NUM_TRAIN))
    for step, batch in enumerate(batches(data_dir, 7)):
        expected = [stored[index] for index in batch_indices(3, step, 8, NUM_TRAIN)]
        assert [number_of(image) for image in batch["image"]] == expected
        assert batch["label"].tolist() == [number % 10 for number in expected]
        assert (batch["image"].dtype, batch["image"].shape) == (np.uint8, (8, 16, 16, 3))
        assert (batch["label"].dtype, batch["label"].shape) == (np.int32, (8,))


def test_a_resumed_stream_goes_on_where_it_stopped_whatever_the_workers(data_dir):
    expected = batches(data_dir, 7)
    assert_equal(batches(data_dir, 4, start_step=3), expected[3:])
    assert_equal(batches(data_dir, 4, start_step=3, num_workers=2), expected[3:])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hosts_share_every_micro_batch(accumulate, data_dir):
    shares = [
        batches(data_dir, 4, process_index=index, process_count=2, accumulate=accumulate)
        for index in range(2)
    ]

    def join(*parts):
        pieces = [np.split(part, accumulate) for part in parts]
        return np.concatenate([piece for micro_batch in zip(*pieces, strict=True) for piece in micro_batch])

    joined = [
        {name: join(first[name], second[name]) for name in first}
        for first, second in zip(*shares, strict=True)
    ]
    assert_equal(joined, batches(data_dir, 4))


def test_seeds_change_the_order_and_the_crops(data_dir):
    first, second = (batches(data_dir, 3, seed=seed) for seed in (0, 1))
    numbers = [
        [number_of(image) for batch in stream for image in batch["image"]] for stream in (first, second)
    ]
    assert numbers[0] != numbers[1]
    assert sorted(numbers[0]) == sorted(numbers[1])


def test_an_example_gets_another_crop_in_every_epoch_and_is_mirrored_half_of_the_time(data_dir):
    images = np.concatenate([batch["image"] for batch in batches(data_dir, 48)]).astype(int)
    epochs = [{number_of(image): image.tobytes() for image in epoch} for epoch in np.split(images, 16)]
    for number in range(NUM_TRAIN):
        assert len({epoch[number] for epoch in epochs}) >= 14  # small pictures: two crops may agree
    # Green grows from left to right in every picture.
    mirrored = (images[:, :, 0, 1].mean(axis=1) > images[:, :, -1, 1].mean(axis=1)).mean()
    assert abs(mirrored - 0.5) < 5 * 0.5 / np.sqrt(len(images))


def test_without_augmentation_the_central_crop_is_used(data_dir):
    (batch,) = batches(data_dir, 1, augment=False)
    source = find_dataset("imagenet2012", data_dir).open("train")
    for index, image in zip(batch_indices(3, 0, 8, NUM_TRAIN), batch["image"], strict=True):
        photograph = decode_image(source[index]["image"])
        width, height = photograph.size
        side = 0.875 * min(width, height)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        assert np.abs(image.astype(int) - np.asarray(photograph.resize((16, 16), 2, box))).max() <= 1


@pytest.mark.parametrize(("hosts", "batch_size"), [(1, 4), (2, 4), (1, 5), (2, 16)])
def test_every_test_example_comes_exactly_once(hosts, batch_size, data_dir):
    shares = [
        batches(data_dir, split="test", batch_size=batch_size, process_index=index, process_count=hosts)
        for index in range(hosts)
    ]
    assert {len(share) for share in shares} == {-(-NUM_TEST // batch_size)}
    every = [batch for share in shares for batch in share]
    assert all(len(batch["image"]) == batch_size // hosts for batch in every)
    masks = np.concatenate([batch["mask"] for batch in every])
    images = np.concatenate([batch["image"] for batch in every])
    labels = np.concatenate([batch["label"] for batch in every])
    numbers = [number_of(image) for image in images[masks]]
    assert sorted(numbers) == list(range(NUM_TEST))
    assert labels[masks].tolist() == numbers
    assert not images[~masks].any()


def test_first_restricts_training_to_the_first_as_stored(data_dir):
    stored = [int(e["file_name"][2:5]) for e in find_dataset("imagenet2012", data_dir).open("train")]
    numbers = [number_of(image) for batch in batches(data_dir, 2, first=4) for image in batch["image"]]
    assert sorted(numbers) == sorted(stored[:4] * 4)
    with pytest.raises(ValueError, match="first between 1 and the 24 training images, got 25"):
        batches(data_dir, 1, first=25)


@pytest.mark.parametrize(("index", "count"), [(0, 3), (2, 2), (-1, 2)])
def test_hosts_that_do_not_fit_the_batch_are_refused(index, count, data_dir):
    with pytest.raises(ValueError, match="make_stream needs a batch_size that accumulate times"):
        batches(data_dir, 1, process_index=index, process_count=count)


def test_a_missing_imagenet_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no imagenet2012 in .*tfds build imagenet2012"):
        batches(tmp_path, 1)


def test_a_damaged_image_is_named(data_dir, monkeypatch):
    junk = [{"image": b"no JPEG at all", "label": 0}] * NUM_TEST
    monkeypatch.setattr(streaming, "_source", lambda dataset, split: junk)
    with pytest.raises(ValueError, match=r"Example 0 of test in .*imagenet2012.* is not an image"):
        batches(data_dir, 1, split="test")


def test_random_crops_cover_the_stated_areas_and_ratios():
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(500, 400, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() == top.min() == 0
    assert right.max() == 500
    assert bottom.max() == 400
    areas, ratios = (right - left) * (bottom - top) / 200_000, (right - left) / (bottom - top)
    assert 0.079 < areas.min() < 0.09
    assert 0.95 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < 1.35


def test_an_image_too_narrow_for_any_crop_gives_its_middle():
    assert random_box(1000, 10, np.random.default_rng(0)) == (495.0, 0.0, 505.0, 10.0)


def test_the_central_crop_is_a_square_of_seven_eighths():
    assert central_box(80, 160) == (5.0, 45.0, 75.0, 115.0)


def test_a_cut_is_the_box_mirrored_if_asked(data_dir):
    image = decode_image(find_dataset("imagenet2012", data_dir).open("train")[0]["image"])
    box = (4, 2, 20, 18)
    exact = np.asarray(image)[2:18, 4:20]
    assert np.array_equal(cut(image, box, 16), exact)
    assert np.array_equal(cut(image, box, 16, mirror=True), exact[:, ::-1])


ONE_BATCH_AND_WAIT = """
import sys, time
from pathlib import Path
from svb_jax.training.streaming import make_stream

options = dict(split="train", batch_size=4, image_size=8, num_workers=1)
stream = make_stream("imagenet2012", Path(sys.argv[1]), **options)
next(stream)
print("ready", flush=True)
time.sleep(600)
"""


def test_workers_end_when_their_run_is_killed(data_dir):
    run = subprocess.Popen(
        [sys.executable, "-c", ONE_BATCH_AND_WAIT, data_dir],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        run.kill()
        # The worker holds the other end of the pipe: it closes when the worker is gone.
        run.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
