"""Get the data sets that do not come with the package.

svb data download --name cifar10
svb data import --name cifar10 --from cifar-10-binary.tar.gz
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from svb_jax.training.data import load
from svb_jax.training.importing import download, import_archive

Name = Literal["cifar10", "cifar100"]


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
    modified: bool = False
    """Take a data set that is not known to be the official one; every run on it says so."""

    def run(self) -> None:
        """Do it, and say where the data set is."""
        folder = import_archive(self.name, self.source, self.data_dir, modified=self.modified)
        _report(self.name, folder, self.data_dir)


def _report(name: Name, folder: Path, data_dir: Path) -> None:
    # Reading it back checks what was written, and leaves the pixels decoded for the first run.
    dataset = load(name, data_dir)
    print(f"{name} is ready in {folder} ({dataset.origin}):")
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        print(f"  {split}: {len(images):,} images, SHA-256 {images.digest()}")
