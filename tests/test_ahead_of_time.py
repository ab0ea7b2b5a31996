"""What is read off a compiled program: from small texts with known answers, and from a compilation on CPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from svb_jax.ahead_of_time import MissingCompilerError, Program, Target, compile_plan, find_target
from svb_jax.ahead_of_time.fusions import list_fusions
from svb_jax.ahead_of_time.plan import figures

# As the TPU's compiler writes it: a conditional of which one branch loops, and one collective in each place.
STEP = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %twice = f32[8,4]{1,0:T(8,128)} add(%p, %p)
  ROOT %four = f32[8,4]{1,0:T(8,128)} add(%twice, %twice), metadata={op_name="jit(f)/add (x) -> {y"}
}

%body (carry: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %carry = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %value = f32[8,4]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %fusion.2 = f32[8,4]{1,0:T(8,128)} fusion(%value), kind=kLoop, calls=%fused, CYCLES(100)
  ROOT %next = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) tuple(%count, %fusion.2)
}

%condition (carry.1: (s32[], f32[8,4])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %limit = s32[]{:T(128)} LIMIT
  ROOT %less = pred[]{:T(512)} compare(%count.1, %limit), direction=LT
}

%idle (x.1: f32[8,4]) -> f32[8,4] {
  ROOT %x.1 = f32[8,4]{1,0:T(8,128)} parameter(0)
}

%due (x.2: f32[8,4]) -> f32[8,4] {
  %x.2 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %gathered = f32[64,4]{1,0:T(8,128)} all-gather(%x.2), replica_groups=[1,8]<=[8], dimensions={0}, CYCLES(50)
  %first = s32[]{:T(128)} constant(2)
  %copied = s32[]{:T(128)} copy(%first)
  %start = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) tuple(%copied, %x.2)
  %loop = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8,4]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}

ENTRY %main (is_due: s32[], x: f32[8,4]) -> f32[8,4] {
  %is_due = s32[]{:T(128)} parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} parameter(1)
  %mean = f32[8,4]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, CYCLES(9)
  %fusion.1 = f32[8,4]{1,0:T(8,128)} fusion(%mean), kind=kLoop, calls=%fused, CYCLES(7)
  ROOT %cond = f32[8,4]{1,0:T(8,128)} conditional(%is_due, %fusion.1, /*index=2*/%fusion.1), branch_computations={%idle, %due}
}
"""  # noqa: E501


def read(limit: str = "constant(12)") -> dict:
    estimate = r'backend_config={"window_config":{"estimated_cycles":"\1"}}'
    text = re.sub(r"CYCLES\((\d+)\)", estimate, STEP.replace("LIMIT", limit))
    return figures(Program.parse(text), chips=8)


def test_cycles_of_a_loop_count_by_its_trips_and_of_a_conditional_by_its_branch():
    found = read()
    assert found["cycles_idle"] == 9 + 7
    # From 2 to 12: the counter does not begin at zero.
    assert found["cycles_due"] == (9 + 7 + 50 + 10 * 100,) * 2
    assert found["data_dependent_loops"] == 0


def test_a_loop_whose_limit_is_not_known_counts_once_and_is_said():
    found = read("get-tuple-element(%carry.1), index=1")
    assert found["data_dependent_loops"] == 1
    assert found["cycles_due"] == (9 + 7 + 50 + 100,) * 2


def test_what_is_expected_of_a_loop_and_of_a_conditional_counts():
    scoped = """%body (a: f32[2]) -> f32[2] {
  ROOT %a = f32[2]{0} copy(%a), backend_config={"estimated_cycles":"7"}
}

%runs (b: f32[2]) -> pred[] {
  ROOT %b = pred[] parameter(0)
}

%loops (c: f32[2]) -> f32[2] {
  ROOT %w = f32[2]{0} while(%c), condition=%runs, body=%body, metadata={op_name="jit(f)/pass/cond/root/while"}
}

%rests (d: f32[2]) -> f32[2] {
  ROOT %d = f32[2]{0} parameter(0)
}

ENTRY %main (e: f32[2]) -> f32[2] {
  ROOT %o = f32[2]{0} conditional(%p, %e, %e), branch_computations={%rests, %loops}, metadata={op_name="jit(f)/pass/cond"}
}
"""  # noqa: E501
    program = Program.parse(scoped)
    unknown = figures(program, 1, is_scheduled=False)
    assert (unknown["cycles_due"], unknown["data_dependent_loops"]) == ((0, 7), 1)
    known = figures(program, 1, is_scheduled=False, expected={"pass": 1, "root": 2.5})
    assert (known["cycles_due"], known["data_dependent_loops"]) == ((17.5, 17.5), 0)
    assert figures(program, 1, is_scheduled=False, expected={"pass": 0})["cycles_due"] == (0, 0)


def test_operations_and_collectives_inside_and_outside_of_the_conditional():
    found = read()
    assert found["conditionals"] == 1
    # A fusion is one operation, and the sum inside of a reduction is none.
    assert found["operations_outside"] == 3
    assert found["operations_inside"] == len(["all-gather", "copy", "while", "fusion", "compare"])
    assert found["collectives_outside"] == {"all-reduce": 1}
    assert found["collectives_inside"] == {"all-gather": 1}


def test_bytes_that_all_chips_receive():
    found, size = read(), 8 * 4 * 4
    reduced = 8 * 2 * size * 3 / 4
    assert found["idle_traffic_bytes"] == reduced
    assert found["due_traffic_bytes"] == reduced + 8 * 7 * size


def test_branches_inside_of_the_due_one_make_a_range():
    inner = """%cheap (c: f32[2]) -> f32[2] {
  ROOT %c = f32[2]{0} copy(%c), backend_config={"estimated_cycles":"1"}
}

%dear (d: f32[2]) -> f32[2] {
  ROOT %d = f32[2]{0} copy(%d), backend_config={"estimated_cycles":"30"}
}

%due (e: f32[2]) -> f32[2] {
  ROOT %c2 = f32[2]{0} conditional(%p, %e, %e), true_computation=%cheap, false_computation=%dear
}

%idle (f: f32[2]) -> f32[2] {
  ROOT %f = f32[2]{0} parameter(0)
}

ENTRY %main (g: f32[2]) -> f32[2] {
  ROOT %c1 = f32[2]{0} conditional(%p, %g, %g), branch_computations={%idle, %due}
}
"""
    program = Program.parse(inner)
    assert figures(program, 1)["cycles_due"] == (1, 30)
    assert figures(program, 1)["cycles_idle"] == 0
    # Without a schedule the outer one, too, goes by the data.
    assert figures(program, 1, is_scheduled=False)["cycles_due"] == (0, 30)
    assert figures(program, 1, is_scheduled=False)["cycles_idle"] is None


def test_a_compiled_program_is_read_as_it_was_written():
    def step(due, x):
        def loop(x):
            return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ x), x)

        return jax.lax.cond(due, loop, lambda x: x, x)

    arguments = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan, program = compile_plan(lambda: jax.jit(step).lower(*arguments), chips=1)
    loops = [
        program.loop(name, instruction)
        for name in program.computations
        for instruction in program.instructions(name)
        if instruction.opcode == "while"
    ]
    assert [loop.trips for loop in loops] == [5]
    assert plan.conditionals == 1
    assert plan.data_dependent_loops == 0
    assert plan.argument_bytes == 1 + 8 * 8 * 4
    assert plan.cycles_due is None
    assert plan.compile_seconds > 0


def test_a_missing_compiler_is_named_with_what_to_install():
    absent = Target(
        name="v5e-1",
        platform="tpu",
        topology="v5e:1x1",
        chips=1,
        memory_bytes=0,
        packages=("no_such_compiler",),
        install="pip install no_such_compiler",
    )
    with pytest.raises(MissingCompilerError, match="v5e-1 needs no_such_compiler: pip install"):
        absent.devices()
    with pytest.raises(ValueError, match=r"needs a target out of v5e-1, .*; got 'v5e-3'"):
        find_target("v5e-3")


def test_fusions_that_differ_in_their_names_alone_are_equal():
    program = """HloModule step

%first (x.1: f32[2]) -> f32[2] {
  %x.1 = f32[2]{0} parameter(0)
  ROOT %sum.1 = f32[2]{0} add(%x.1, %x.1), metadata={op_name="a/add"}
}

%second (x.2: f32[2]) -> f32[2] {
  %x.2 = f32[2]{0} parameter(0)
  ROOT %sum.2 = f32[2]{0} add(%x.2, %x.2), metadata={op_name="b/add"}
}

%third (x.3: f32[2]) -> f32[2] {
  %x.3 = f32[2]{0} parameter(0)
  ROOT %product.1 = f32[2]{0} multiply(%x.3, %x.3), metadata={op_name="b/mul"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} fusion(%a), kind=kLoop, calls=%first, metadata={op_name="a/add"}
  %c = f32[2]{0} fusion(%b), kind=kLoop, calls=%second
  %d = f32[2]{0} fusion(%c), kind=kCustom, calls=%first
  ROOT %e = f32[2]{0} fusion(%d), kind=kLoop, calls=%third
}
"""
    first, second, third = list_fusions(program)
    assert first == second != third
