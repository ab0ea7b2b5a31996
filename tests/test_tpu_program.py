"""The programs that the TPU's own compiler makes of a training step: their structure, never a time.

Compiled ahead of time, in a process of its own, where libtpu is installed.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: pip install libtpu"
)

UPDATE = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import svb_jax
from svb_jax import models
from svb_jax.ahead_of_time import compile_plan, find_target

devices = find_target("v5e-8").devices()
model = models.make("convnet_8")
variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), train=False))

mesh = Mesh(np.array(devices), ("chips",))
sgd = optax.sgd(0.1, momentum=0.9, nesterov=True)
tx = svb_jax.bbn(svb_jax.svb(sgd, 0.5, every=391, axis_name="chips"), 1.0, every=391)

def update(params, opt_state, grads, batch_stats):
    updates, opt_state = tx.update(grads, opt_state, params, batch_stats=batch_stats)
    return optax.apply_updates(params, updates), opt_state

params, batch_stats = variables["params"], variables["batch_stats"]
arguments = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P())),
    (params, jax.eval_shape(tx.init, params), params, batch_stats),
)
mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
jitted = jax.jit(mapped, donate_argnums=(0, 1))
plan, _ = compile_plan(lambda: jitted.lower(*arguments), len(devices))
print(json.dumps(dataclasses.asdict(plan)))
"""


@pytest.fixture(scope="module")
def plan():
    """Return what the compiler plans for the update of a ConvNet of 8 layers on 8 chips."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", UPDATE],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


def test_nothing_is_decomposed(plan):
    # On TPUs eigh, SVD and QR all end in custom calls: EighTpu, QrDecompositionBlock, Cholesky.
    names = " ".join(plan["custom_calls"])
    assert not re.search("eigh|svd|qr|householder|cholesky|lu_?decomposition", names, re.IGNORECASE)


def test_each_bound_has_one_conditional(plan):
    assert plan["conditionals"] == 2


def test_no_collective_stands_outside_of_the_conditional(plan):
    assert plan["collectives_outside"] == {}
    assert plan["idle_traffic_bytes"] == 0 < plan["due_traffic_bytes"]
