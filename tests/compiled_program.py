"""What a compiled program does on every run, and what only inside the branches of its conditionals."""

import re

COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
EXPENSIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?\("
    r"|custom_call_target=\"lapack_\w+"
)


def expensive_operations(program: str) -> tuple[list[str], list[list[list[str]]]]:
    """Return the decompositions and collectives of a compiled program.

    Returns:
      Those that run every time, and for each conditional that is reached every time, those in each of its
      branches or anything that they call.
    """
    computations, entry = _computations(program)
    always = _reached(computations, entry, into_branches=False)
    conditionals = [
        [
            _expensive(_reached(computations, name.strip(" %"), into_branches=True))
            for name in branches.split(",")
        ]
        for line in always
        for branches in BRANCHES.findall(line)
    ]
    return _expensive(always), conditionals


def assert_only_taken_branches_work(program: str) -> None:
    """Check that a step that is not due neither decomposes nor talks to other devices."""
    always, conditionals = expensive_operations(program)
    assert always == []
    untaken = [branches[0] for branches in conditionals]
    assert untaken == [[] for _ in conditionals]
    decomposing = [taken for _, taken in conditionals if any("lapack" in line for line in taken)]
    assert len(decomposing) == 1


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    computations, entry, lines = {}, "", []
    for line in program.splitlines():
        if header := COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _reached(computations: dict[str, list[str]], name: str, *, into_branches: bool) -> list[str]:
    lines = list(computations[name])
    for line in computations[name]:
        called = CALLED.findall(line)
        if into_branches:
            called += [branch.strip(" %") for group in BRANCHES.findall(line) for branch in group.split(",")]
        for other in called:
            lines += _reached(computations, other, into_branches=into_branches)
    return lines


def _expensive(lines: list[str]) -> list[str]:
    return [found[0] for line in lines if (found := EXPENSIVE.search(line))]


def outside_of_conditionals(program: str) -> str:
    """Return the lines of a lowered program's main function that are in no branch of a conditional."""
    kept, depth, inside = [], 0, None
    for line in program.partition("func.func public @main")[2].splitlines():
        if inside is None:
            kept.append(line)
            if "stablehlo.case" in line:
                inside = depth
        depth += line.count("{") - line.count("}")
        if inside is not None and depth <= inside and "}" in line:
            inside = None
        if depth <= 0 and line.strip() == "}":
            break
    return "\n".join(kept)
