"""Numbers and tables as text."""

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"


def digits(value: float) -> str:
    """Return a number in three digits, or all of those before its point.

    Example:
      >>> digits(0.012345), digits(1.2345), digits(12345.6)
      ('0.0123', '1.23', '12346')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def seconds(value: float) -> str:
    """Return a time in three digits.

    Example:
      >>> seconds(0.01234), seconds(12.34)
      ('12.3 ms', '12.3 s')
    """
    return f"{digits(value)} s" if value >= 1 else f"{digits(1000 * value)} ms"


def times(value: float | None) -> str:
    """Return a ratio.

    Example:
      >>> times(3.14159), times(None)
      ('3.14×', '–')
    """
    return ABSENT if value is None else f"{digits(value)}×"


def percent(value: float, digits: int = 2) -> str:
    """Return a share with its sign.

    Example:
      >>> percent(0.0123)
      '+1.23 %'
    """
    return f"{100 * value:+.{digits}f} %"


def megabytes(value: float | None) -> str:
    """Return a size of memory.

    Example:
      >>> megabytes(146_000_000)
      '146 MB'
    """
    return ABSENT if value is None else f"{digits(value / 1e6)} MB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned, the first to the left and the others to the right.

    Example:
      >>> print(table(["row", "time"], [["auto", "1 s"], ["floor", "0.5 s"]]))
      | row   |  time |
      |:------|------:|
      | auto  |   1 s |
      | floor | 0.5 s |
    """
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), f"|{'|'.join(rule)}|", *map(line, rows)])


def spread(result: dict[str, Any]) -> str:
    """Return the range of a row's rounds."""
    return f"{seconds(result['least'])} – {seconds(result['most'])}"


def is_measured(result: dict[str, Any] | None) -> bool:
    """Return whether a row is there and has times."""
    return result is not None and "median" in result


def reasons(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a list of the rows that have no times, each with its reason; empty if there are none."""
    lines = [
        f"- {result['label']}: {result['status']}, {result['detail']}"
        for result in rows.values()
        if not is_measured(result)
    ]
    return ["\n".join(lines)] if lines else []
