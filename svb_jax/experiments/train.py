"""``svb train``: one training run, on one host or many."""

import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from svb_jax._src.lost_readers import silence
from svb_jax.training.config import TrainConfig
from svb_jax.training.hosts import Hosts


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a network with SGD, and with SVB or BBN if their epsilons are given.

    A first try, under a minute, with nothing to download:

        svb train --model convnet_8 --image-size 8 --epochs 5 --svb-epsilon 0.5

    A run can be stopped at any time, by Ctrl-C, SIGTERM or a crash: the same command continues it.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    tracker: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """Where to send the numbers besides metrics.jsonl: tensorboard, wandb, or your own module:Class."""
    hosts: Annotated[Hosts, tyro.conf.arg(name="")] = field(default_factory=Hosts)

    def run(self) -> None:
        """Train, and say what came out."""
        self.hosts.connect()
        # Importing the loop imports everything: not before the hosts are connected, nor for --help.
        from svb_jax.training.loop import train
        from svb_jax.training.trackers import make_trackers

        result = train(self.config, make_trackers(self.tracker))
        projected = result.test_error_projected
        after = "" if projected is None else f" ({projected:.2f} % after a final projection)"
        line = f"Test error {result.test_error:.2f} %{after}, {result.seconds:.0f} s: {self.config.run_dir}"
        try:
            print(line, flush=True)
        except OSError:
            # Nobody can read it, but the run is complete: the exit code must say so.
            silence(sys.stdout)
