"""Whole networks projected again and again in a plain process, under a time limit.

Concurrent decompositions have been seen to hang XLA's thread pool on CPU from the second run on, so each of
these runs in a process of its own, which can be ended.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import math
import sys
import jax
import jax.numpy as jnp
import numpy
num_devices, model, repeats = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", num_devices)
import svb_jax
from svb_jax import models
shapes = models.summary(model).matrices
# Normal matrices: the longer the better conditioned, so that every route is taken.
params = {}
for number, (path, shape) in enumerate(shapes.items()):
    outputs = shape[-1]
    inputs = math.prod(shape) // outputs
    values = numpy.random.default_rng(number).standard_normal(shape, numpy.float32)
    params[path] = {"kernel": jnp.asarray(values / max(inputs, outputs) ** 0.5)}
if num_devices == 1:
    project = jax.jit(lambda params: svb_jax.project(params, 0.2))
else:
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)), params)
    project = jax.pmap(lambda params: svb_jax.project(params, 0.2, axis_name="d"), axis_name="d")
for _ in range(repeats):
    projected = jax.block_until_ready(project(params))
if num_devices > 1:
    projected = jax.tree.map(lambda x: x[0], projected)
summary = svb_jax.spectrum_summary({k: v for k, v in list(projected.items())[:4]}, 0.2)
assert all(row.share_in_band == 1 for row in summary.rows), summary
print("projected", len(shapes), "matrices", repeats, "times")
"""


@pytest.mark.parametrize(
    ("num_devices", "model", "repeats"),
    [
        (1, "wrn_28_10", 20),
        (8, "convnet_38", 3),
        pytest.param(8, "wrn_28_10", 3, marks=pytest.mark.slow),
    ],
)
def test_projecting_a_whole_network_repeatedly_ends(num_devices, model, repeats):
    command = [sys.executable, "-c", SCRIPT, str(num_devices), model, str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{repeats} times" in done.stdout
