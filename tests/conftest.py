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

# Of the core, whose own computations make no NaN of what has none.
CHECKED_FOR_NANS = {
    "test_batch_norm",
    "test_bound",
    "test_in_place",
    "test_leaves",
    "test_products",
    "test_projection_stats",
    "test_schedules",
    "test_transforms",
}


@pytest.fixture(autouse=True)
def nan_checks(request):
    is_checked = request.path.stem in CHECKED_FOR_NANS and "nan_inputs" not in request.keywords
    with jax.debug_nans(is_checked):
        yield


@pytest.fixture(autouse=True)
def rank_promotion(request):
    with jax.numpy_rank_promotion("allow" if request.path.stem in BROADCASTING else "raise"):
        yield
