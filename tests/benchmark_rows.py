"""Rows for the tests of the measuring itself: they sleep, fail, vanish, write down their calls."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import load_kernels
from benchmarks.workload import Task, Workload


def logged(task: Task) -> Workload:
    def run(argument: str) -> None:
        with Path(task["log"]).open("a") as log:
            log.write(argument)
        time.sleep(task.get("sleep", 0))

    return Workload(run=run, fresh=lambda: task["letter"], facts={"letter": task["letter"]})


def failing(task: Task) -> Workload:
    raise KeyError(task["key"])


def vanishing(task: Task) -> Workload:
    def run(_: None) -> None:
        os._exit(task["code"])

    return Workload(run=run)


def stretched(task: Task) -> Workload:
    """Give back its kernels, the last one longer by a part."""

    def run(_: None) -> Any:
        kernels = load_kernels(Path(task["kernels"]))
        last = list(kernels)[-1]
        return kernels | {last: kernels[last] * (1 + task["part"])}

    return Workload(run=run, kernels=lambda kernels: kernels)


def allocating(task: Task) -> Workload:
    def run(_: None) -> None:
        held = np.ones(task["megabytes"] << 17)
        time.sleep(0.1)
        held.fill(0)

    return Workload(run=run)


def clocked(task: Task) -> Workload:
    return Workload(run=lambda _: task["claim"], seconds=float)
