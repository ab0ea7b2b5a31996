"""All hosts must run the same run: compared before the first step, and the field named that differs."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from svb_jax.training.config import TrainConfig, describe, differences, to_fields

OWN = {"run_dir", "data_dir", "workers"}
"""What a host may have of its own: the folders may be mounted elsewhere."""


def agree(config: TrainConfig) -> None:
    """Check that every host was started with the same configuration.

    Hosts that differ would train parameters that belong to neither, or wait for each other for ever.

    Args:
      config: This host's.

    Raises:
      ValueError: A host has another one, on every host alike; the message names the fields.
    """
    if jax.process_count() == 1:
        return
    everyone = gather(to_fields(config))
    for host, fields in enumerate(everyone):
        # Against the first one, so that all hosts tell the same.
        different = differences(fields, everyone[0], OWN)
        if different:
            raise ValueError(
                f"train needs the same configuration on every host: host {host} has {describe(different)} as "
                "host 0 has."
            )


def agree_on_the_end(run_dir: Path, is_complete: bool) -> None:
    """Check that the run is complete for all hosts or for none: some would wait for the others for ever.

    Args:
      run_dir: This host's.
      is_complete: Whether this host finds a complete run there.

    Raises:
      ValueError: The hosts do not see the same folder; on every host alike.
    """
    if jax.process_count() == 1:
        return
    everyone = gather(is_complete)
    if any(everyone) and not all(everyone):
        raise ValueError(
            f"train needs a run_dir that all hosts see: host {everyone.index(True)} finds a complete run in "
            f"{run_dir}, host {everyone.index(False)} does not."
        )


def agree_on_the_data(dataset: str, digest: str | None) -> None:
    """Check that all hosts have the same images and labels.

    Args:
      dataset: Its name.
      digest: Of this host's, None if it is not known.

    Raises:
      ValueError: They have not; on every host alike.
    """
    if jax.process_count() == 1:
        return
    everyone = gather(digest)
    for host, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                f"train needs the same data on every host: host {host} has other images or labels of "
                f"{dataset} than host 0."
            )


def gather(value: Any) -> list[Any]:
    """Return a JSON value of every host, in their order.

    Examples:
      >>> gather({"seed": 3})
      [{'seed': 3}]
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    return [
        json.loads(row[:length].astype(np.uint8).tobytes()) for row, length in zip(rows, lengths, strict=True)
    ]
