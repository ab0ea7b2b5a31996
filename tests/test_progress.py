"""What a person sees of a run, and what happens when nobody can see it."""

import os
import sys
from types import SimpleNamespace

import pytest

from svb_jax.experiments.__main__ import main
from svb_jax.training import loop
from svb_jax.training.progress import Display

LINE = {"epoch": 1, "train_loss": 2.5, "test_error": 90.0}


@pytest.mark.parametrize("kind", ["full disk", "pipe", "terminal"])
def test_a_run_whose_output_nobody_can_read_goes_on(kind, monkeypatch):
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    os.close(reader)
    if kind == "full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    # Closing it would raise as well, if something were still to be written.
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with Display(total_steps=4, steps_per_epoch=4) as display:
            display.say("Continuing.")
            display.step(1, {"train_loss": 2.5})
            display.epoch(LINE)
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull


def test_a_complete_run_that_cannot_say_so_has_not_failed(monkeypatch):
    result = SimpleNamespace(test_error=5.0, test_error_projected=None, seconds=1.0)
    monkeypatch.setattr(loop, "train", lambda *_: result)
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["train"]) == 0


def test_a_run_without_any_output_goes_on(monkeypatch):
    # What Python makes of a descriptor that was closed before it started.
    monkeypatch.setattr(sys, "stderr", None)
    with Display(total_steps=4, steps_per_epoch=4) as display:
        display.epoch(LINE)
