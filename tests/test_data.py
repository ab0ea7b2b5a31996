import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from svb_jax._src.npz import load_npz
from svb_jax.training import importing, records
from svb_jax.training.cifar_binary import CIFAR10
from svb_jax.training.data import Split, average_down, load
from svb_jax.training.pixels import save_pixels
from svb_jax.training.records import find_dataset
from tests.tiny_cifar import TINY10, write_tiny_cifar


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A data folder with a tiny CIFAR-10, and what it holds."""
    data_dir = tmp_path_factory.mktemp("data")
    expected = write_tiny_cifar(TINY10, data_dir / "download")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importing.LAYOUTS, "cifar10", TINY10)
        importing.import_archive("cifar10", data_dir / "download", data_dir)
    return data_dir, expected


def test_digits_are_scikit_learns_enlarged_four_times():
    digits, original = load("digits"), load_digits()
    assert (len(digits.train), len(digits.test), digits.num_classes, digits.mirror) == (1437, 360, 10, False)
    images = np.concatenate([digits.train.images, digits.test.images])
    assert (images.shape, images.dtype) == ((1797, 32, 32, 3), np.uint8)
    for row, column, channel in [(0, 0, 0), (9, 14, 1), (17, 20, 2), (31, 31, 0)]:
        grey = original.images[:, row // 4, column // 4] * 255 / 16
        assert np.abs(images[:, row, column, channel] - grey).max() <= 0.5
    assert np.array_equal(np.concatenate([digits.train.labels, digits.test.labels]), original.target)
    assert digits.train.labels.dtype == np.int32


def test_native_digits_lose_nothing():
    native = load("digits", image_size=8).train.images
    assert native.shape == (1437, 8, 8, 3)
    assert np.array_equal(native, load("digits").train.images[:, ::4, ::4])
    assert len(np.unique(native)) == 17


def test_first_cuts_the_training_images_only():
    whole, cut = load("digits"), load("digits", first=5)
    assert np.array_equal(cut.train.images, whole.train.images[:5])
    assert np.array_equal(cut.train.labels, whole.train.labels[:5])
    assert len(cut.test) == 360


@pytest.mark.parametrize("first", [0, -1, 1438])
def test_first_must_be_a_number_of_images_that_there_are(first):
    with pytest.raises(ValueError, match=f"between 1 and the 1437 training images, got {first}"):
        load("digits", first=first)


def test_holdout_takes_the_last_training_images_in_place_of_the_test_set():
    whole, held = load("digits"), load("digits", holdout=37, first=100)
    assert np.array_equal(held.test.images, whole.train.images[-37:])
    assert np.array_equal(held.test.labels, whole.train.labels[-37:])
    assert np.array_equal(held.train.images, whole.train.images[:100])
    assert len(load("digits", holdout=37).train) == 1400


@pytest.mark.parametrize("holdout", [0, -1, 1437])
def test_holdout_must_leave_images_to_train_on(holdout):
    with pytest.raises(ValueError, match=f"below the 1437 training images, got {holdout}"):
        load("digits", holdout=holdout)


@pytest.mark.parametrize("image_size", [32, 20])
def test_the_synthetic_images_are_always_the_same_and_can_be_learned(image_size):
    data = load("synthetic", image_size=image_size)
    assert data.train.images.shape == (512, image_size, image_size, 3)
    again = load("synthetic", image_size=image_size)
    assert data.train.digest() == again.train.digest() != data.test.digest()
    means = np.stack([data.train.images[data.train.labels == label].mean(axis=0) for label in range(10)])
    distances = ((data.test.images[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert np.array_equal(distances.argmin(axis=1), data.test.labels)


def test_averaging_takes_blocks_of_pixels_and_rounds():
    image = np.zeros((1, 4, 4, 2), np.uint8)
    image[0, :2, :2, 0] = [[1, 2], [3, 5]]  # mean 2.75
    image[0, 2:, :2, 1] = 255
    assert average_down(image, 2)[0, :, :, 0].tolist() == [[3, 0], [0, 0]]
    assert average_down(image, 2)[0, :, :, 1].tolist() == [[0, 0], [255, 0]]
    assert average_down(image, 4).tolist() == image.tolist()


@pytest.mark.parametrize("size", [0, 3, 64])
def test_a_size_that_does_not_divide_is_refused(size):
    with pytest.raises(ValueError, match=f"divides 32, got {size}"):
        average_down(np.zeros((1, 32, 32, 3), np.uint8), size)


def test_a_digest_sees_pixels_labels_and_order():
    images, labels = np.arange(12, dtype=np.uint8).reshape(2, 2, 1, 3), np.array([1, 2], np.int32)
    other_image, other_label = images.copy(), labels.copy()
    other_image[0, 0, 0, 0] ^= 1
    other_label[1] = 3
    splits = [
        Split(images, labels),
        Split(images[::-1], labels[::-1]),
        Split(other_image, labels),
        Split(images, other_label),
    ]
    assert len({split.digest() for split in splits}) == 4


def test_unknown_names_are_refused_with_those_that_there_are():
    known = r"digits, cifar10, cifar100, synthetic \(or, to train on as a stream, imagenet2012\)"
    with pytest.raises(ValueError, match=rf"{known}, got 'cifar-10'. Did you mean 'cifar10'\?"):
        load("cifar-10")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_missing_data_set_says_both_ways_to_get_it(name, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load(name, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert f"data download --name {name}" in str(error.value)
    assert f"data import --name {name} --from cifar-{name[5:]}-binary.tar.gz" in str(error.value)


def test_an_unfinished_data_set_counts_as_missing(tmp_path):
    unfinished = tmp_path / "cifar10" / "incomplete.A1B2C3_3.0.2"
    unfinished.mkdir(parents=True)
    (unfinished / "dataset_info.json").write_text(json.dumps({"fileFormat": "array_record"}))
    with pytest.raises(FileNotFoundError, match="There is no cifar10"):
        load("cifar10", tmp_path)


def test_another_file_format_is_refused(tmp_path):
    folder = tmp_path / "cifar10" / "3.0.2"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(json.dumps({"fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match="array_record, got tfrecord"):
        load("cifar10", tmp_path)


def test_images_come_in_the_order_of_the_official_files(cifar):
    data_dir, expected = cifar
    dataset = load("cifar10", data_dir)
    for split, (images, labels) in zip((dataset.train, dataset.test), expected.values(), strict=True):
        assert np.array_equal(split.images, images)
        assert np.array_equal(split.labels, labels)
    assert dataset.num_classes == 10
    assert dataset.mirror


@pytest.fixture
def own_cifar(cifar, tmp_path):
    """A copy of the tiny CIFAR-10 with its pixels decoded, its folder, and what it holds."""
    data_dir, expected = cifar
    shutil.copytree(data_dir, tmp_path / "data", copy_function=shutil.copy2)
    load("cifar10", tmp_path / "data")
    return tmp_path / "data", find_dataset("cifar10", tmp_path / "data").folder, expected["train"]


def test_decoded_pixels_are_read_instead_of_the_records(own_cifar, monkeypatch):
    data_dir, _, (images, labels) = own_cifar
    monkeypatch.setattr(records, "_decode_split", None)
    train = load("cifar10", data_dir).train
    assert np.array_equal(train.images, images)
    assert np.array_equal(train.labels, labels)


def test_kept_pixels_that_were_not_decoded_here_are_not_believed(own_cifar):
    data_dir, folder, (images, labels) = own_cifar
    kept = folder / "decoded_train.npz"
    whole, arrays = kept.read_bytes(), load_npz(kept)
    others = [
        {"images": images[:3], "labels": labels[:3]},
        {"images": np.zeros_like(images)},
        {"labels": np.full_like(arrays["labels"], 99)},
        {"images": images.astype(np.float32)},
        {"images": images[::-1]},
        {"labels": labels.astype(np.int64)},
        {"source": "other records"},
    ]
    for other in others:
        np.savez(kept, **{**arrays, **other})
        train = load("cifar10", data_dir).train
        assert np.array_equal(train.images, images)
        assert np.array_equal(train.labels, labels)
        assert train.labels.dtype == np.int32
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 40):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.integers(8))]) + whole[place + 1 :])
        assert np.array_equal(load("cifar10", data_dir).train.images, images)
    for damaged in (whole[:-200], b""):
        kept.write_bytes(damaged)
        assert np.array_equal(load("cifar10", data_dir).train.images, images)


def test_consistent_pixels_of_another_data_set_are_not_believed(own_cifar):
    data_dir, folder, (images, labels) = own_cifar
    save_pixels(folder, "train", images[::-1], labels.astype(np.int32))
    assert np.array_equal(load("cifar10", data_dir).train.images, images)


def test_damaged_records_are_told_and_never_trained_on(own_cifar):
    data_dir, folder, (images, _) = own_cifar
    files = [path for path in folder.iterdir() if not path.name.startswith("decoded")]
    contents = {path: path.read_bytes() for path in files}
    rng = np.random.default_rng(1)
    for file in files:
        for place in rng.integers(0, len(contents[file]), 4):
            (folder / "decoded_train.npz").unlink(missing_ok=True)
            damaged = bytearray(contents[file])
            damaged[place] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            try:
                assert np.array_equal(load("cifar10", data_dir).train.images, images)
            except (OSError, ValueError) as error:
                assert "is damaged" in str(error) or "must be stored as" in str(error), error  # noqa: PT017
        file.write_bytes(contents[file])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["dataset_info.json", "features.json", "cifar10-train.array_record-00000-of-00001"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_files_that_never_end_are_told(name, make, own_cifar):
    data_dir, folder, _ = own_cifar
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(OSError, match=rf"is damaged \(.*Not a regular file: .*{name}"):
        load("cifar10", data_dir)


def test_a_description_that_promises_too_many_images_is_told(own_cifar):
    data_dir, folder, _ = own_cifar
    (folder / "decoded_train.npz").unlink()
    path = folder / "dataset_info.json"
    path.write_text(path.read_text().replace('"20"', '"900000000000"'))
    with pytest.raises(OSError, match=r"is damaged \(Unable to allocate"):
        load("cifar10", data_dir)


@pytest.mark.slow
def test_the_real_cifar10_has_its_digest():
    if not Path("data/cifar10").exists():
        pytest.skip("needs svb data download --name cifar10")
    dataset = load("cifar10")
    assert np.bincount(dataset.train.labels).tolist() == [5000] * 10
    assert np.bincount(dataset.test.labels).tolist() == [1000] * 10
    assert {"train": dataset.train.digest(), "test": dataset.test.digest()} == CIFAR10.digests
