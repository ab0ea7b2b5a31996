"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

import io
import math
import sys
import time
from typing import Any, TextIO, cast

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from svb_jax._src.lost_readers import silence

REFRESH_SECONDS = 1.0
"""Reading the device is not free: the live numbers are this old at most."""
QUIET_SECONDS = 60.0
"""Without a terminal, an epoch that takes longer gets a line in between."""


class Display:
    """Shows a run's progress, on the first host only.

    Examples:
      >>> with Display(total_steps=100, steps_per_epoch=10, file=sys.stdout) as display:
      ...     display.epoch({"epoch": 1, "train_loss": 2.3, "train_error": 90.0, "test_error": 88.5,
      ...                    "images_per_second": 1200.0})
      epoch 1/10  loss 2.300  train 90.00 %  test 88.50 %  1200 images/s
    """

    def __init__(self, total_steps: int, steps_per_epoch: int, file: TextIO | None = None):
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self._is_quiet = jax.process_index() != 0
        lasting = cast(TextIO, _Lasting(file or sys.stderr))
        self._console = Console(file=lasting, quiet=self._is_quiet, highlight=False, soft_wrap=True)
        self._bar = _make_bar(self._console) if self._console.is_terminal and not self._is_quiet else None
        self._last_look = time.monotonic()
        self._test_error: float | None = None

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self.total_steps, numbers="compiling")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        """Show a sentence of its own line."""
        self._console.print(sentence, markup=False)

    def wants_step(self) -> bool:
        """Return whether it is time to look at a step's numbers."""
        wait = QUIET_SECONDS if self._bar is None else REFRESH_SECONDS
        return not self._is_quiet and time.monotonic() - self._last_look >= wait

    def step(self, step: int, numbers: dict[str, Any]) -> None:
        """Show a step's numbers."""
        self._last_look = time.monotonic()
        epoch = (step - 1) // self.steps_per_epoch + 1
        text = _words({"test_error": self._test_error, **numbers})
        if self._bar is None:
            self.say(f"step {step}/{self.total_steps}  {text}")
        else:
            self._bar.update(self._task, completed=step, numbers=f"epoch {epoch}  {text}")

    def epoch(self, line: dict[str, Any]) -> None:
        """Show an epoch's line of metrics."""
        self._last_look = time.monotonic()
        self._test_error = line["test_error"]
        epochs = self.total_steps // self.steps_per_epoch
        self.say(f"epoch {line['epoch']}/{epochs}  {_words(line)}")
        if self._bar is not None:
            self._bar.update(self._task, completed=line["epoch"] * self.steps_per_epoch)


class _Lasting:
    """A stream that falls silent when it fails: a run must not end because its terminal was closed."""

    def __init__(self, stream: TextIO | None):
        # Python has no stream at all where the descriptor was closed before it started.
        self._stream = stream or io.StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write, if anybody can read it."""
        try:
            self._stream.write(text)
        except OSError:
            silence(self._stream)

    def flush(self) -> None:
        """Flush, if anybody can read it."""
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def _make_bar(console: Console) -> Progress:
    columns = BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.fields[numbers]}"), console=console)


_FORMATS = {
    "train_loss": "loss {:.3f}",
    "train_error": "train {:.2f} %",
    "test_error": "test {:.2f} %",
    "images_per_second": "{:.0f} images/s",
    "svb/sigma_min": "σ min {:.3f}",
    "svb/sigma_max": "σ max {:.3f}",
    "svb/share_clipped": "{:.0%} clipped",
}


def _words(numbers: dict[str, Any]) -> str:
    """Return the numbers that are known; those of a projection are not before the first one."""
    is_projected = bool(numbers.get("svb/step"))
    known = {
        name: float(numbers[name])
        for name in _FORMATS
        if numbers.get(name) is not None and (is_projected or not name.startswith("svb/"))
    }
    return "  ".join(_FORMATS[name].format(value) for name, value in known.items() if not math.isnan(value))
