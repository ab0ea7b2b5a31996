"""Wall time that continues over restarts, and throughput without the first, compiling, step."""

import time


class Clock:
    """Seconds since the run began, restarts included and pauses between them not."""

    def __init__(self, seconds: float = 0.0):
        self._begin = time.monotonic() - seconds

    def seconds(self) -> float:
        """Return the seconds so far."""
        return time.monotonic() - self._begin


class Throughput:
    """Images a second, from the first finished step to the last."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self._num_steps = 0
        self._first = self._last = time.monotonic()

    def finish_step(self) -> None:
        """Note that a step has finished."""
        self._last = time.monotonic()
        if self._num_steps == 0:
            self._first = self._last
        self._num_steps += 1

    def rate(self) -> float | None:
        """Return images a second; None before the second step."""
        if self._num_steps < 2:
            return None
        return self.batch_size * (self._num_steps - 1) / (self._last - self._first)
