"""Data sets that TFDS prepared on disk as ArrayRecord, opened without TensorFlow."""

import json
from pathlib import Path
from typing import Any

HOW_TO_GET = {
    "cifar10": "`python -m experiments data download --name cifar10`, or, without a network, "
    "`python -m experiments data import --name cifar10 --from cifar-10-binary.tar.gz`",
    "cifar100": "`python -m experiments data download --name cifar100`, or, without a network, "
    "`python -m experiments data import --name cifar100 --from cifar-100-binary.tar.gz`",
    "imagenet2012": "TFDS, which needs TensorFlow and the archives from https://image-net.org: "
    "`tfds build imagenet2012 --file_format=array_record`",
}


def open_builder(name: str, data_dir: Path) -> Any:
    """Open the newest version of a data set under ``data_dir``.

    Args:
      name: The TFDS name.
      data_dir: The folder that holds one folder a data set.

    Returns:
      The TFDS builder: ``.info`` describes the data set, ``.as_data_source`` reads it.

    Raises:
      FileNotFoundError: The data set is not there; the message says how to get it.
      ValueError: It is there, in another format than ArrayRecord.
    """
    # TFDS's own answer to a missing data set speaks of file formats and conversion: look first.
    versions = {path.parent: _version(path.parent) for path in (data_dir / name).glob("*/dataset_info.json")}
    whole = [folder for folder, version in versions.items() if version]
    if not whole:
        raise FileNotFoundError(f"No {name} in {data_dir.resolve()}. Get it by {HOW_TO_GET[name]}.")
    folder = max(whole, key=lambda path: versions[path])
    file_format = json.loads((folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise ValueError(f"{name} must be stored as array_record to be read; {folder} holds {file_format}.")
    import tensorflow_datasets as tfds  # takes seconds: only for those who read such a data set

    return tfds.builder_from_directory(folder)


def _version(folder: Path) -> tuple[int, ...]:
    """Return a version folder's numbers; none for an unfinished one, such as 3.0.2.incomplete.A1B2C3."""
    parts = folder.name.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
