"""Get the data sets that do not come with the package.

python -m experiments data download --name cifar10
python -m experiments data import --name cifar10 --from cifar-10-binary.tar.gz
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from svb_jax.training.data import load
from svb_jax.training.importing import download, import_archive

Name = Literal["cifar10", "cifar100"]

# Of the pixels and labels (Split.digest), in the order of the official files.
DIGESTS = {
    ("cifar10", "train"): "72c15e60c081b70e34054cb162580e0d24094d4efdce45b6c8c1fe5acc39221e",
    ("cifar10", "test"): "8353b1fbf11acba6dc8b5e9d2fb108294de95b6e979d31428bf914289e4189c5",
}


@dataclass(frozen=True, kw_only=True)
class Download:
    """Fetch the official archive, check its hash, and import it."""

    name: Name
    """Which data set."""
    data_dir: Path = Path("data")
    """Where the data sets are kept."""

    def run(self) -> None:
        """Do it, and say where the data set is."""
        _report(self.name, download(self.name, self.data_dir), self.data_dir)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import an official binary archive, or the folder that it unpacks to, from this disk."""

    name: Name
    """Which data set."""
    source: Annotated[Path, tyro.conf.arg(name="from")]
    """cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or its folder."""
    data_dir: Path = Path("data")
    """Where the data sets are kept."""

    def run(self) -> None:
        """Do it, and say where the data set is."""
        _report(self.name, import_archive(self.name, self.source, self.data_dir), self.data_dir)


def _report(name: Name, folder: Path, data_dir: Path) -> None:
    # Reading it back checks what was written, and leaves the pixels decoded for the first run.
    dataset = load(name, data_dir)
    print(f"{name} is ready in {folder}:")
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        found, known = images.digest(), DIGESTS.get((name, split))
        warning = f", but it should be {known}" if known not in (None, found) else ""
        print(f"  {split}: {len(images):,} images, SHA-256 {found}{warning}")
