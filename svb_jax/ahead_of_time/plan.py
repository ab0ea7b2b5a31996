"""What a compiled program plans: memory, size, cycles, operations and collectives."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from svb_jax.ahead_of_time.hlo import BOOKKEEPING, Instruction, Program
from svb_jax.ahead_of_time.traffic import received_bytes

Pick = Callable[[Sequence[float]], float]
Expected = Mapping[str, float]
"""From a named scope to the trips of the loop in it, or to the branch of the conditional in it."""
Measure = Callable[[str, Instruction], float | None]
"""From a computation's name and an instruction to a number; None to look into what it calls."""


class Place(NamedTuple):
    """An instruction and where it stands."""

    computation: str
    instruction: Instruction
    is_inside: bool
    """Whether that is inside a conditional."""
    is_part: bool
    """Whether it is part of an operation, such as a fusion."""

    @property
    def opcode(self) -> str:
        """What the instruction does."""
        return self.instruction.opcode

    @property
    def is_operation(self) -> bool:
        """Whether it does something of its own; the end of what began elsewhere does not."""
        return not (self.is_part or self.opcode in BOOKKEEPING or self.opcode.endswith("-done"))


@dataclass(frozen=True)
class Plan:
    """The compiler's figures for one program; sizes in bytes on one chip.

    A step that projects at times has a conditional for it. *Idle* is a step that takes the cheaper branch,
    *due* one that takes the dearer. All other conditionals choose by the data: they make least and most,
    unless it is said what to expect of them.

    Attributes:
      compile_seconds: To compile, without tracing.
      compile_cpu_seconds: Of all cores together, which other processes on the machine change less.
      trace_seconds: To trace and lower.
      code_bytes: Of the program on the chip.
      argument_bytes: Of its arguments.
      output_bytes: Of its results, donated arguments not counted.
      temp_bytes: Of all it needs in between.
      flops: As XLA counts them: a loop once, a conditional by its dearest branch.
      cycles_idle: Estimated, where nothing is due; None where something always is, or nothing is estimated.
      cycles_due: Estimated, where it is: least and most.
      data_dependent_loops: Loops whose trips are unknown and were not said; each counts as one trip.
      conditionals: How many stand outside of any other.
      operations_outside: Instructions outside of every conditional, those of a fusion as one.
      operations_inside: The same inside.
      collectives_outside: Kinds and numbers of collectives outside of every conditional.
      collectives_inside: The same inside.
      idle_traffic_bytes: Bytes that all chips together receive in collectives where nothing is due.
      due_traffic_bytes: Where it is.
      custom_calls: Library functions by name, decompositions among them.
    """

    compile_seconds: float
    compile_cpu_seconds: float
    trace_seconds: float
    code_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    flops: float
    cycles_idle: float | None
    cycles_due: tuple[float, float] | None
    data_dependent_loops: int
    conditionals: int
    operations_outside: int
    operations_inside: int
    collectives_outside: dict[str, int]
    collectives_inside: dict[str, int]
    idle_traffic_bytes: float | None
    due_traffic_bytes: float
    custom_calls: dict[str, int]

    @property
    def planned_bytes(self) -> int:
        """All memory that the program needs on a chip."""
        return self.code_bytes + self.argument_bytes + self.output_bytes + self.temp_bytes


def compile_plan(
    lower: Callable[[], jax.stages.Lowered],
    chips: int,
    *,
    is_scheduled: bool = True,
    expected: Expected = MappingProxyType({}),
) -> tuple[Plan, Program]:
    """Trace and compile a program, and return what the compiler plans beside the program itself.

    Args:
      lower: Traces and lowers it.
      chips: How many devices it is for.
      is_scheduled: Whether its outermost conditionals ask if a projection is due, and not about the data.
      expected: What loops and conditionals that go by the data will do, by the name of their scope.
    """
    begin = time.perf_counter()
    lowered = lower()
    traced, cpu = time.perf_counter(), time.process_time()
    with _no_cache():
        compiled = lowered.compile()
    compile_seconds, compile_cpu_seconds = time.perf_counter() - traced, time.process_time() - cpu
    program = Program.parse(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    plan = Plan(
        compile_seconds=compile_seconds,
        compile_cpu_seconds=compile_cpu_seconds,
        trace_seconds=traced - begin,
        code_bytes=memory.generated_code_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
        **figures(program, chips, is_scheduled, expected),
    )
    return plan, program


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Compile anew: a program that comes from a cache says nothing about the time it takes."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def figures(
    program: Program, chips: int, is_scheduled: bool = True, expected: Expected = MappingProxyType({})
) -> dict[str, Any]:
    """Return what the text of a program says, by the names of ``Plan``."""

    def cycles(_: str, instruction: Instruction) -> float | None:
        return instruction.cycles

    def traffic(computation: str, instruction: Instruction) -> float | None:
        return received_bytes(program, computation, instruction, chips)

    places = list(reached(program))
    has_cycles = any(place.instruction.cycles is not None for place in places)
    outermost = max if is_scheduled else None
    due = tuple(add_up(program, cycles, outermost or pick, pick, expected) for pick in (min, max))
    return {
        "cycles_idle": add_up(program, cycles, min, min, expected) if has_cycles and is_scheduled else None,
        "cycles_due": due if has_cycles else None,
        "idle_traffic_bytes": chips * add_up(program, traffic, min, min, expected) if is_scheduled else None,
        "due_traffic_bytes": chips * add_up(program, traffic, max, max, expected),
        **counts(program, places, expected),
    }


def counts(program: Program, places: Sequence[Place], expected: Expected) -> dict[str, Any]:
    """Count conditionals, loops, operations, collectives and custom calls."""
    instructions = [place.instruction for place in places]
    loops = [each for each in places if each.opcode == "while" and each.instruction.scope not in expected]
    found: dict[str, Any] = {
        "data_dependent_loops": sum(
            program.loop(each.computation, each.instruction).trips is None for each in loops
        ),
        "conditionals": sum(each.opcode == "conditional" and not each.is_inside for each in places),
        "custom_calls": dict(Counter(each.custom_call for each in instructions if each.custom_call)),
    }
    for where, is_inside in (("outside", False), ("inside", True)):
        there = [each for each in places if each.is_inside == is_inside]
        kinds = (each.instruction.collective for each in there)
        found[f"operations_{where}"] = sum(each.is_operation for each in there)
        found[f"collectives_{where}"] = dict(Counter(kind for kind in kinds if kind))
    return found


def add_up(program: Program, measure: Measure, outermost: Pick, nested: Pick, expected: Expected) -> float:
    """Add up a measure over a program: a loop's body by its trips, one branch of a conditional.

    Args:
      program: The program.
      measure: The number of an instruction.
      outermost: Chooses among the branches of a conditional that stands in no other.
      nested: Chooses among the branches of the others.
      expected: Overrides both, and says the trips of loops that go by the data.
    """
    known: dict[tuple[str, bool], float] = {}

    def total(computation: str, is_inside: bool) -> float:
        key = computation, is_inside
        if key not in known:
            known[key] = sum(
                value(computation, each, is_inside) for each in program.instructions(computation)
            )
        return known[key]

    def value(computation: str, instruction: Instruction, is_inside: bool) -> float:
        if instruction.branches:
            branches = [total(branch, True) for branch in instruction.branches]
            if instruction.scope in expected:
                return branches[int(expected[instruction.scope])]
            return (nested if is_inside else outermost)(branches)
        if instruction.opcode == "while":
            loop = program.loop(computation, instruction)
            trips = expected.get(instruction.scope, 1) if loop.trips is None else loop.trips
            return trips * (total(loop.body, is_inside) + total(loop.condition, is_inside))
        own = measure(computation, instruction)
        return sum(total(name, is_inside) for name in instruction.called) if own is None else own

    return total(program.entry, False)


def reached(program: Program) -> Iterator[Place]:
    """Return every instruction that the program can reach, each once."""
    pending, seen = [(program.entry, False, False)], {program.entry}
    while pending:
        computation, is_inside, is_part = pending.pop()
        for instruction in program.instructions(computation):
            yield Place(computation, instruction, is_inside, is_part)
            # A fusion is one operation, and so is a reduction with the sum that it applies.
            part = is_part or instruction.opcode not in ("while", "call", "conditional")
            called = [(name, is_inside, part) for name in instruction.called]
            for place in [*called, *((branch, True, is_part) for branch in instruction.branches)]:
                if place[0] not in seen:
                    seen.add(place[0])
                    pending.append(place)
