"""Flip a random bit in any file of a run and of its data, and compare its end with that of a run in peace."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from svb_jax._src.npz import load_npz
from svb_jax.training import importing
from svb_jax.training.checkpoint import load_newest
from tests.faults.processes import Forked
from tests.faults.runs import QUICK_OPTIONS, assert_same_end, timeless
from tests.faults.tally import Tally
from tests.tiny_cifar import TINY10, write_tiny_cifar

OPTIONS = {**QUICK_OPTIONS, "dataset": "cifar10", "first": None, "batch_size": 10}


def survive_flips(
    folder: Path, trials: int, seed: int = 0, show: Callable[[str], None] = print, name: str = "*"
) -> Tally:
    """Flip bits, one in each trial.

    Args:
      folder: An empty one to work in.
      trials: How many.
      seed: Draws the files and the bits.
      show: Told of each trial.
      name: A pattern that the files' names must match.

    Returns:
      What became of them.
    """
    draw = random.Random(seed)
    tally = Tally("a flipped bit in any file of run, data or compiled steps", show)
    states = [_make_complete(folder), _make_unfinished(folder)]
    for number in range(trials):
        trial = folder / f"trial {number}"
        shutil.copytree(draw.choice(states), trial, copy_function=shutil.copy2)
        file = draw.choice(sorted(path for path in trial.rglob(name) if path.is_file()))
        bit = flip_a_bit(file, draw)
        tally.add(f"bit {bit} of {file.relative_to(trial)}", _go_on, trial, file, states[0])
        shutil.rmtree(trial)
    return tally


def flip_a_bit(file: Path, draw: random.Random) -> int | None:
    """Flip a random bit, and leave the file's time as it was, as a failing disk would.

    Returns:
      Which bit; None if the file is empty.
    """
    content, times = bytearray(file.read_bytes()), file.stat()
    if not content:
        return None
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return bit


def _train(state: Path) -> Forked:
    log = state.with_name(f"{state.name}.log")
    return Forked(_run_of(state), log, data_dir=state / "data", **OPTIONS)


def _run_of(state: Path) -> Path:
    # What it compiles is kept beside it.
    return state / "runs" / "run"


def _go_on(trial: Path, flipped: Path, peace: Path) -> str:
    code, output = _train(trial).end()
    assert "Traceback" not in output, output
    if code != 0:
        assert code == 1, f"It ended with {code}:\n{output}"
        assert any(words in output.splitlines()[-1] for words in ("damaged", "cannot be read")), output
        _mend(trial, flipped, peace)
        return "noticed"
    run, reference = _run_of(trial), _run_of(peace)
    _assert_same_results(run, reference)
    # A complete run does not read its checkpoints: whoever does is told, and can let it be made anew.
    if load_newest(run / "checkpoints")[1]:
        (run / "result.json").unlink()
        _finish_like(trial, peace)
        return "noticed"
    assert_same_end(run, reference)
    return "survived"


def _mend(trial: Path, flipped: Path, peace: Path) -> None:
    """Do what the sentence asked for, get the data again or start over, and compare the end."""
    if flipped.is_relative_to(trial / "data"):
        shutil.rmtree(trial / "data")
        shutil.copytree(peace / "data", trial / "data", copy_function=shutil.copy2)
    else:
        shutil.rmtree(_run_of(trial))
    _finish_like(trial, peace)


def _finish_like(trial: Path, peace: Path) -> None:
    _train(trial).finish()
    _assert_same_results(_run_of(trial), _run_of(peace))
    assert_same_end(_run_of(trial), _run_of(peace))


def _assert_same_results(run_dir: Path, reference: Path) -> None:
    results = [json.loads((path / "result.json").read_text()) for path in (run_dir, reference)]
    for result in results:
        # What is made anew tells when, and by which commit, it was.
        del result["seconds"], result["images_per_second"], result["commit"]
    assert results[0] == results[1], results
    assert timeless(run_dir / "metrics.jsonl") == timeless(reference / "metrics.jsonl")
    spectra = [load_npz(path / "spectrum.npz") for path in (run_dir, reference)]
    np.testing.assert_equal(*spectra)


def _make_complete(folder: Path) -> Path:
    """A finished run, with its data and what it compiled."""
    state = folder / "complete"
    write_tiny_cifar(TINY10, folder / "download")
    layouts = importing.LAYOUTS.copy()
    importing.LAYOUTS["cifar10"] = TINY10
    try:
        importing.import_archive("cifar10", folder / "download", state / "data")
    finally:
        importing.LAYOUTS.update(layouts)
    _train(state).finish()
    return state


def _make_unfinished(folder: Path) -> Path:
    """The same run, killed before its last epoch."""
    state = folder / "unfinished"
    shutil.copytree(folder / "complete", state, copy_function=shutil.copy2)
    run = _run_of(state)
    for name in ("result.json", "SHA256SUMS"):
        (run / name).unlink()
    shutil.rmtree(max((run / "checkpoints").iterdir(), key=lambda path: int(path.name)))
    return state
