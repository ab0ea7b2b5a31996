"""Every test runs on eight virtual CPU devices, with no environment variable set."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Of networks and of training, where libraries broadcast arrays of different ranks.
BROADCASTING = {
    "test_batch_norm",
    "test_checkpoint",
    "test_data_import",
    "test_documentation",
    "test_experiments_deep_linear",
    "test_experiments_run",
    "test_faults",
    "test_linen",
    "test_models",
    "test_stopping",
    "test_trackers",
    "test_training",
    "test_transformer",
}


@pytest.fixture(autouse=True)
def rank_promotion(request):
    with jax.numpy_rank_promotion("allow" if request.path.stem in BROADCASTING else "raise"):
        yield
