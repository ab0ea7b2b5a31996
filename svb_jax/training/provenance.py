"""Where an imported data set comes from and what it must hold, kept beside its records."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from svb_jax.training.cifar_binary import Origin
from svb_jax.training.durable import altered, write_sums, write_whole

FILE = "imported.json"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What is known of a data set; nothing of one that TFDS itself has built."""

    origin: Origin = "unverified"
    # Not hashed, as no dict can be: a data set is a key where its files are kept open.
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Of each split's pixels and labels."""


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write it beside the records, with a sum."""
    content = (json.dumps(asdict(provenance), indent=2) + "\n").encode()
    write_whole(folder / FILE, content)
    write_sums(folder, {FILE: content})


def read_provenance(folder: Path) -> Provenance:
    """Return what an import wrote.

    Args:
      folder: Of a data set's version.

    Returns:
      What is known of it.

    Raises:
      OSError: The file is damaged.
    """
    if altered(folder, [FILE]):
        raise OSError(f"{folder / FILE} is damaged. Remove {folder}, and import the data set again.")
    path = folder / FILE
    return Provenance(**json.loads(path.read_bytes())) if path.is_file() else Provenance()
