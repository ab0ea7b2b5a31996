"""Every test runs on eight virtual CPU devices, with no environment variable set."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Tests of the core, which broadcasts nothing by accident.
CORE = {
    "test_clip",
    "test_clip_derivative",
    "test_cpu",
    "test_distribute",
    "test_leaves",
    "test_optax",
    "test_products",
    "test_projection_stats",
    "test_transforms",
}


@pytest.fixture(autouse=True)
def rank_promotion(request):
    with jax.numpy_rank_promotion("raise" if request.path.stem in CORE else "allow"):
        yield
