"""The shape of the core: what a step runs through on an accelerator, and what it costs if nothing is due."""

import functools
import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import svb_jax
from tests.compiled_program import outside_of_conditionals

CORE = Path(svb_jax.__file__).parent / "_src"
CPU = CORE / "clip" / "cpu"
PARAMS = {
    "conv": {"kernel": jnp.ones((3, 3, 2, 4))},
    "dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
}


@functools.cache
def modules_of_a_due_step() -> set[str]:
    """Return the core's modules that run while a step is traced, but for what only CPUs need."""
    tx = svb_jax.svb(optax.sgd(0.1), epsilon=0.5)
    state = tx.init(PARAMS)
    entered = set()

    def look(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE) and not is_below_cpu(frame):
            entered.add(str(path.relative_to(CORE)))

    jax.clear_caches()
    sys.setprofile(look)
    try:
        jax.jit(tx.update).trace(PARAMS, state, PARAMS)
    finally:
        sys.setprofile(None)
    return entered


def is_below_cpu(frame) -> bool:
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(CPU):
            return True
        frame = frame.f_back
    return False


def test_a_due_step_runs_through_few_modules():
    modules = modules_of_a_due_step()
    assert {"transforms.py", "apply_every.py", "leaves.py", "clip/products.py"} <= modules
    assert len(modules) <= 9, sorted(modules)


def test_the_compute_path_is_short():
    lines = {module: num_code_lines((CORE / module).read_text()) for module in modules_of_a_due_step()}
    assert sum(lines.values()) <= 1000, lines


def num_code_lines(source: str) -> int:
    without_docstrings = re.sub(r'r?""".*?"""', "", source, flags=re.DOTALL)
    lines = map(str.strip, without_docstrings.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def step_in_chain(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init(PARAMS)


def step_with_bound_after(tx, bound):
    step, state = step_in_chain(tx)

    def step_and_bound(grads, states, params):
        params, state = step(grads, states[0], params)
        params, bound_state = bound.apply(params, states[1])
        return params, (state, bound_state)

    return step_and_bound, (state, bound.init(PARAMS))


def program_for_tpu(step, state) -> str:
    jitted = jax.jit(step, donate_argnums=(1, 2))
    return jitted.trace(PARAMS, state, PARAMS).lower(lowering_platforms=("tpu",)).as_text()


def array_operations(program: str) -> Counter:
    """Return the operations outside of conditionals that make more than a single number."""
    made = re.findall(r"= \"?stablehlo\.(\w+)\"?.*(?:->|:) tensor<\d[^>]*>$", program, flags=re.MULTILINE)
    return Counter(name for name in made if name != "constant")


SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    "bounded",
    [
        step_in_chain(svb_jax.svb(SGD, 0.5, every=2)),
        step_with_bound_after(SGD, svb_jax.bound_singular_values(0.5, every=2)),
    ],
)
def test_a_step_that_is_not_due_has_the_operations_of_the_inner_optimizer_alone(bounded):
    alone = array_operations(outside_of_conditionals(program_for_tpu(*step_in_chain(SGD))))
    operations = array_operations(outside_of_conditionals(program_for_tpu(*bounded)))
    assert alone.total() > 0
    assert operations - alone == Counter()
