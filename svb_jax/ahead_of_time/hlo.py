"""The text of a compiled program (XLA's optimised HLO), as computations of instructions."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
BOOKKEEPING = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
"""What names values and computes nothing."""
_COPIES = {"bitcast", "convert", "copy", "copy-done", "copy-start"}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_SCOPE = re.compile(r'op_name="[^"]*?([^/"]+)/(?:while|cond)"')
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class Loop(NamedTuple):
    """A ``while``, whose trips are None where they depend on the data."""

    body: str
    condition: str
    trips: int | None


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    """Names of values; what a constant holds."""
    attributes: str
    is_root: bool = False
    scope: str = ""
    """The innermost ``jax.named_scope`` that a loop or a conditional stands in."""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, without the branches of a conditional."""
        return tuple(_CALLED.findall(self.attributes)) if self.opcode != "conditional" else ()

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """The branches of a conditional."""
        if self.opcode != "conditional":
            return ()
        listed = _BRANCHES.search(self.attributes)
        names = listed[1].split(",") if listed else _CALLED.findall(self.attributes)
        return tuple(name.strip().removeprefix("%") for name in names)

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's estimate, where it gives one."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def collective(self) -> str | None:
        """The kind of collective that it begins, if it does."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def custom_call(self) -> str | None:
        """The library's function that it calls, if it does."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else None


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Example:
      >>> program = Program.parse('''
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} add(%x, %x), backend_config={"estimated_cycles":"7"}
      ... }''')
      >>> [(each.opcode, each.cycles) for each in program.instructions(program.entry)]
      [('parameter', None), ('add', 7)]
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read what ``Compiled.as_text()`` returns."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = header[2]
                computations[current] = {}
                entry = current if header[1] else entry
            elif current and (found := _INSTRUCTION.match(line)):
                computations[current][found[2]] = _read(found[2], found[3], bool(found[1]))
            elif line.startswith("}"):
                current = ""
        return cls(computations, entry)

    def instructions(self, computation: str) -> Iterator[Instruction]:
        """Return a computation's instructions."""
        yield from self.computations.get(computation, {}).values()

    def loop(self, computation: str, instruction: Instruction) -> Loop:
        """Return a ``while`` of a computation with its number of trips."""
        found = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", instruction.attributes))
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes)
        trips = int(known[1]) if known else self._count_trips(computation, instruction, found["condition"])
        return Loop(found["body"], found["condition"], trips)

    def operand_bytes(self, computation: str, instruction: Instruction) -> int:
        """Return the size of all that an instruction reads."""
        values = self.computations[computation]
        return sum(shape_bytes(values[name].shape) for name in instruction.operands if name in values)

    def _count_trips(self, computation: str, loop: Instruction, condition: str) -> int | None:
        """Count from the first value to the limit that the condition names; None if either varies."""
        values = self.computations.get(condition, {})
        root = next((each for each in values.values() if each.is_root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        ends = [self._constant(values, name, computation, loop) for name in root.operands]
        return None if None in ends else max(0, ends[1] - ends[0])  # pyright: ignore

    def _constant(self, values: Computation, name: str, outer: str, loop: Instruction | None) -> int | None:
        """Return the constant that a value is, followed through copies and into what the loop begins with."""
        value = values.get(name)
        while value is not None and value.opcode in _COPIES:
            value = values.get(value.operands[0])
        if value is None:
            return None
        if value.opcode == "constant":
            return int(value.operands[0]) if re.fullmatch(r"-?\d+", value.operands[0]) else None
        if value.opcode != "get-tuple-element" or loop is None:
            return None
        start = self.computations[outer].get(loop.operands[0])
        index = re.search(r"\bindex=(\d+)", value.attributes)
        if start is None or start.opcode != "tuple" or index is None:
            return None
        return self._constant(self.computations[outer], start.operands[int(index[1])], outer, None)


def shape_bytes(shape: str) -> int:
    """Return the size of an array, or of a tuple of them, without padding.

    Example:
      >>> shape_bytes("(f32[3,16]{1,0:T(8,128)}, bf16[8], pred[])")
      209
    """
    sizes = re.findall(r"\b([a-z]+)(\d*)(?:e\w+)?\[([\d,]*)\]", shape)
    return sum(
        _item_bytes(kind, bits) * math.prod(map(int, filter(None, dims.split(","))))
        for kind, bits, dims in sizes
    )


def _item_bytes(kind: str, bits: str) -> int:
    return 1 if kind == "pred" else max(1, int(bits or 0) // 8)


def _read(name: str, text: str, is_root: bool) -> Instruction:
    """Read an instruction from its shape on."""
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    begin = text.index("(", shape_end)
    end = _closing(text, begin)
    inside = re.sub(r"/\*.*?\*/", "", text[begin + 1 : end])
    # Operands of older versions carry their shapes; the name is the last word.
    operands = tuple(word.split()[-1].removeprefix("%") for word in _split(inside))
    attributes = re.sub(r"metadata=\{[^}]*\}", "", text[end + 1 :])
    scope = _SCOPE.search(text, end)
    return Instruction(
        name=name,
        opcode=text[shape_end:begin].strip(),
        shape=text[:shape_end],
        operands=operands,
        attributes=attributes,
        is_root=is_root,
        scope=scope[1] if scope else "",
    )


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside of any bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _closing(text: str, begin: int) -> int:
    """Return where the bracket that opens at ``begin`` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, begin):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)
