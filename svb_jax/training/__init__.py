"""Training under spectral constraints: data, a data-parallel loop, checkpoints, many hosts."""

from svb_jax._src.extras import needs_extra

with needs_extra("svb_jax.training", "train"):
    from svb_jax.training.checkpoint import Checkpoint, CheckpointError, load_checkpoint, load_newest
    from svb_jax.training.config import TrainConfig
    from svb_jax.training.hosts import Hosts
    from svb_jax.training.loop import Diverged, train
    from svb_jax.training.run_folder import Result
    from svb_jax.training.stopping import Interrupted
    from svb_jax.training.trackers import TensorBoard, Tracker, WeightsAndBiases

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Diverged",
    "Hosts",
    "Interrupted",
    "Result",
    "TensorBoard",
    "Tracker",
    "TrainConfig",
    "WeightsAndBiases",
    "load_checkpoint",
    "load_newest",
    "train",
]
