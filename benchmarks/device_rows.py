"""The projection shared over virtual CPU devices, and what its compiled program says about it."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import svb_jax
from benchmarks.jax_rows import compiled_facts, load_params
from benchmarks.workload import Task, Workload
from svb_jax.ahead_of_time.hlo import Program
from svb_jax.ahead_of_time.plan import figures


def shared(task: Task) -> Workload:
    """Our projection, shared over ``task["devices"]`` devices; the first row of its process."""
    devices = task["devices"]
    jax.config.update("jax_num_cpu_devices", devices)
    params, epsilon = load_params(task), task["epsilon"]
    mesh = jax.make_mesh((devices,), ("devices",))
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    project = jax.jit(lambda params: svb_jax.project(params, epsilon, mesh=mesh))
    compiled, facts = compiled_facts(lambda: project.lower(replicated))
    alone = jax.jit(lambda params: svb_jax.project(params, epsilon))(params)
    differences = jax.tree.map(_largest_difference, compiled(replicated), alone)
    found = figures(Program.parse(compiled.as_text()), devices, is_scheduled=False)
    facts |= {name: found[name] for name in ("collectives_outside", "collectives_inside", "custom_calls")}
    facts["traffic_bytes"] = found["due_traffic_bytes"]
    facts["difference_from_one_device"] = max(jax.tree.leaves(differences))
    return Workload(run=lambda _: jax.block_until_ready(compiled(replicated)), facts=facts)


def _largest_difference(one: jax.Array, other: jax.Array) -> float:
    return float(np.max(np.abs(np.asarray(one) - np.asarray(other))))
