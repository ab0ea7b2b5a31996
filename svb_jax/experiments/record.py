"""What is kept of a finished run: one small JSON, with its curve and the histograms of its spectrum."""

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from svb_jax._src.npz import load_npz
from svb_jax._src.regular_files import read_regular
from svb_jax.training.durable import RUN_FILES, altered, write_whole

# In a checkout that is where the committed records are.
RESULTS = Path("experiments/results")
BIN_WIDTH = 0.02

MOMENTS = ("initial", "final")
_KINDS = {
    **dict.fromkeys(("experiment", "row", "scale"), str),
    "seed": int,
    "metrics": list,
    **dict.fromkeys(("config", "result", "spectra"), dict),
}
LIMIT = 1e100
"""A larger number comes from no run, and would be too large for sums and axes."""
_BIN = re.compile("0|[1-9][0-9]{0,11}")

Histogram = Mapping[str, int]
"""From a bin's number to its count; bin 50 holds the singular values from 1.00 up to 1.02."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run: which one, how it was set up, what came out."""

    experiment: str
    row: str
    scale: str
    seed: int
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    """One entry an epoch."""
    spectra: Mapping[str, Mapping[str, Histogram]]
    """``initial`` and ``final``, each from a matrix's path to its histogram, in the order of the layers."""

    def __post_init__(self) -> None:
        # JSON can hold anything under these names.
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"its {name} is no {kind.__name__}")
        if not (self.metrics and all(_is_line(entry) for entry in self.metrics)):
            raise TypeError("its metrics are not numbers by epoch")
        if not _is_number(self.result.get("seconds")) or not self.result["seconds"] > 0:
            raise TypeError("its result has no seconds")
        odd = [name for name, value in self.result.items() if not _is_finding(value)]
        if odd:
            raise TypeError(f"its result's {odd[0]} is neither text nor numbers")
        if self.spectra.keys() != {*MOMENTS}:
            raise TypeError(f"its spectra are not {' and '.join(MOMENTS)}")
        if not all(map(_are_histograms, self.spectra.values())):
            raise TypeError("its spectra are not counts of singular values by bin")

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Epochs and values of a metric, where it was measured."""
        points = [(entry["epoch"], entry[key]) for entry in self.metrics if entry.get(key) is not None]
        return [epoch for epoch, _ in points], [value for _, value in points]


Runs = Mapping[str, Sequence[Record]]
"""The runs of one experiment at one scale, by row, in the order of the experiment."""


class DamagedRunError(ValueError):
    """A finished run whose files are no longer what it wrote."""


def is_complete(run_dir: Path) -> bool:
    """Whether a run folder holds a run that has come to its end."""
    return (run_dir / "result.json").is_file()


def read_run(run_dir: Path) -> Record:
    """Read a finished run's folder, ``<experiment>/<row>/<scale>/seed<N>``.

    Raises:
      FileNotFoundError: There is no finished run.
      DamagedRunError: One of its files was altered, or makes no sense.
    """
    if not is_complete(run_dir):
        raise FileNotFoundError(
            f"read_run needs the folder of a finished run, with result.json; got {run_dir}."
        )
    experiment, row, scale, seed = run_dir.parts[-4:]
    # Those that have no sums, from other programs, must at least make sense.
    damaged = altered(run_dir, RUN_FILES)
    if damaged:
        raise DamagedRunError(f"{', '.join(damaged)} in {run_dir} is damaged.")
    try:
        result = json.loads(read_regular(run_dir / "result.json"))
        lines = read_regular(run_dir / "metrics.jsonl").splitlines()
        return Record(
            experiment=experiment,
            row=row,
            scale=scale,
            seed=int(seed.removeprefix("seed")),
            config=dict(json.loads(read_regular(run_dir / "config.json"))),
            result=dict(result),
            metrics=_rounded(_one_an_epoch(map(json.loads, lines))),
            spectra=_histograms(run_dir / "spectrum.npz"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedRunError(
            f"The run in {run_dir} is damaged ({type(error).__name__}: {error})."
        ) from error


def path_of(experiment: str, row: str, scale: str, seed: int, results: Path = RESULTS) -> Path:
    """Where a run's record is kept."""
    return results / experiment / row / scale / f"seed{seed}.json"


def save(record: Record, results: Path = RESULTS) -> Path:
    """Write a record, whole or not at all, and return where."""
    path = path_of(record.experiment, record.row, record.scale, record.seed, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {key: json.dumps(value) for key, value in dataclasses.asdict(record).items()}
    # A line a field and a line an epoch: what changes can be read in a diff.
    fields["metrics"] = "[\n  " + ",\n  ".join(map(json.dumps, record.metrics)) + "\n ]"
    lines = ",\n".join(f' "{key}": {value}' for key, value in fields.items())
    write_whole(path, f"{{\n{lines}\n}}\n".encode())
    return path


def load(path: Path) -> Record:
    """Read a record that :func:`save` wrote.

    Raises:
      ValueError: It cannot be read, makes no sense, or is that of another run than its path says.
    """
    try:
        record = Record(**json.loads(read_regular(path)))
        if path.parts[-4:] != path_of(*_identity(record)).parts[-4:]:
            raise ValueError(f"it is that of {path_of(*_identity(record), Path())}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"load needs the record of a run, got {path}: {error}") from error
    return record


def collect(results: Path = RESULTS, runs: Path = Path("runs")) -> list[Record]:
    """Every finished run: the records, and the folders of runs that are not among them."""
    records = {_identity(record): record for record in map(load, sorted(results.glob("*/*/*/seed*.json")))}
    for run_dir in sorted(runs.glob("*/*/*/seed*")):
        if is_complete(run_dir):
            try:
                record = read_run(run_dir)
            except DamagedRunError as error:
                # The others can still be reported; running this one again mends it.
                print(f"Left out: {error} Run it again to make it anew.", file=sys.stderr)
                continue
            records.setdefault(_identity(record), record)
    return list(records.values())


def merge(histograms: Iterator[Histogram]) -> Histogram:
    """Add histograms up.

    Example:
      >>> merge(iter([{"50": 3}, {"49": 1, "50": 2}]))
      {'49': 1, '50': 5}
    """
    total = Counter()
    for histogram in histograms:
        total.update(histogram)
    return {key: total[key] for key in sorted(total, key=int)}


def histogram(values: np.ndarray) -> Histogram:
    """Count singular values in bins of 0.02; those of a network that diverged may be in none.

    Example:
      >>> histogram(np.array([0.999, 1.0, 1.01, 3.3]))
      {'49': 1, '50': 2, '165': 1}
    """
    flat = np.ravel(values)
    bins = fine_bin(flat[np.isfinite(flat)])
    return {
        str(number): int(count) for number, count in zip(*np.unique(bins, return_counts=True), strict=True)
    }


def fine_bin(values: ArrayLike) -> np.ndarray:
    """The numbers of the bins that hold these values.

    Example:
      >>> fine_bin([0.999, 1.0, 3.3]).tolist()
      [49, 50, 165]
    """
    # A value that float32 leaves just under a bin's edge, such as the ones of an orthogonal matrix, is on it.
    return np.floor(np.asarray(values) / BIN_WIDTH + 1e-3).astype(int)


def _is_number(value: Any) -> bool:
    # In Python a boolean is an integer.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not LIMIT < abs(value) < math.inf


def _is_line(entry: Any) -> bool:
    """Return whether these are an epoch's metrics: numbers by name, None where there was none to measure."""
    is_line = isinstance(entry, dict) and all(value is None or _is_number(value) for value in entry.values())
    return is_line and _is_number(entry.get("epoch")) and math.isfinite(entry["epoch"])


def _is_finding(value: Any) -> bool:
    """Return whether this may stand in a result: text, a number, numbers in lists, or None."""
    return value is None or isinstance(value, str) or _are_numbers(value)


def _are_numbers(value: Any) -> bool:
    return all(map(_are_numbers, value)) if isinstance(value, list) else _is_number(value)


def _are_histograms(spectra: Any) -> bool:
    """Return whether these are counts by bin, by the path of a matrix."""
    return bool(spectra) and isinstance(spectra, dict) and all(map(_is_histogram, spectra.values()))


def _is_histogram(histogram: Any) -> bool:
    if not isinstance(histogram, dict):
        return False
    are_counts = all(isinstance(count, int) and 0 < count < LIMIT for count in histogram.values())
    return are_counts and all(map(_BIN.fullmatch, histogram))


def _identity(record: Record) -> tuple[str, str, str, int]:
    return record.experiment, record.row, record.scale, record.seed


def _one_an_epoch(entries: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last entry of each epoch: a resumed run may have written one twice."""
    return list({entry["epoch"]: entry for entry in entries}.values())


def _rounded(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return [{key: short(value) for key, value in entry.items()} for entry in entries]


def _histograms(spectrum: Path) -> dict[str, dict[str, Histogram]]:
    arrays = load_npz(spectrum)
    moments = {moment: {} for moment in MOMENTS}
    # The classifier is the last layer whatever its name.
    for key in sorted(arrays, key=lambda key: ("/head" in key, key)):
        moment, _, path = key.partition("/")
        moments[moment][path] = histogram(arrays[key])
    return moments
