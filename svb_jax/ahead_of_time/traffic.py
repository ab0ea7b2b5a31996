"""How many bytes a collective brings to a chip."""

import re

from svb_jax.ahead_of_time.hlo import Instruction, Program


def received_bytes(program: Program, computation: str, instruction: Instruction, chips: int) -> float | None:
    """Return what a chip receives in a collective; None for everything else.

    Args:
      program: The program.
      computation: Where in it the instruction stands.
      instruction: Any instruction.
      chips: How many the program is for, where a collective names no groups.
    """
    kind = instruction.collective
    if kind is None:
        return None
    size, members = program.operand_bytes(computation, instruction), group_size(instruction, chips)
    if kind == "all-gather":
        return size * (members - 1)
    if kind == "all-reduce":
        return 2 * size * (members - 1) / members
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return size * (members - 1) / members


def group_size(instruction: Instruction, chips: int) -> int:
    """Return how many chips take part in one group of a collective.

    Example:
      >>> attributes = ", channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add"
      >>> group_size(Instruction("sum", "all-reduce", "f32[2]", ("x",), attributes), chips=8)
      4
    """
    by_iota = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.attributes)
    if by_iota:
        return int(by_iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.attributes)
    return len(listed[1].split(",")) if listed else chips
