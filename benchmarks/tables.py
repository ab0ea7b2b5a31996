"""Any measurement as Markdown: a table for each section, a line for each row, a column for all that is known.

A section is a title, rows by name, and ratios: what to divide by which row's. How a number is written follows
from its name: ``_seconds``, ``_bytes``, ``_share``.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Section = Mapping[str, Any]

ABSENT = "–"
HIDDEN = {"label", "status", "detail", "facts", "seconds", "least", "most"}


def section(title: str, rows: Mapping[str, Row], plot: str = "median", **ratios: str) -> dict[str, Any]:
    """Return a section.

    Args:
      title: What stands above it.
      rows: By name.
      plot: The figure that its picture shows.
      **ratios: Rows to compare with, by the name of the figure that is compared.
    """
    return {"title": title, "rows": dict(rows), "plot": plot, "ratios": ratios}


def render(result: Mapping[str, Any]) -> str:
    """Return everything that one command measured, as Markdown."""
    blocks = [f"## {result['command'].capitalize()}", _surroundings(result)]
    for each in result["sections"]:
        blocks += [f"### {each['title']}", table(each), *_reasons(each["rows"])]
    return "\n\n".join(blocks)


def figure(row: Row | None, name: str) -> Any:
    """Return a row's figure; None where it has none."""
    return None if row is None else row.get(name, row.get("facts", {}).get(name))


def ratios(part: Section, name: str, key: str, base: str) -> list[float]:
    """Return a figure over another row's; times round by round, which drifts of the machine do not reach."""
    rows = part["rows"]
    key = "seconds" if key == "median" else key
    mine, other = figure(rows[name], key), figure(rows.get(base), key)
    if mine is None or other is None:
        return []
    pairs = zip(_several(mine), _several(other), strict=True)
    return [one / two for one, two in pairs if two]


def table(part: Section) -> str:
    """Return a section as a table; what no row has is no column.

    Example:
      >>> rows = {"auto": {"label": "svb_jax auto", "median": 2.0, "seconds": [2.0], "temp_bytes": 3e6},
      ...         "floor": {"label": "two products", "median": 0.5, "seconds": [0.5]}}
      >>> print(table(section("Projection", rows, median="floor")))
      | row          | median | to floor | temp bytes |
      |:-------------|-------:|---------:|-----------:|
      | svb_jax auto | 2.00 s |    4.00× |    3.00 MB |
      | two products | 500 ms |    1.00× |          – |
    """
    rows = part["rows"]
    names = dict.fromkeys(key for row in rows.values() for key in (*row, *row.get("facts", {})))
    keys = sorted((key for key in names if key not in HIDDEN and _is_known(rows, key)), key="median".__ne__)
    header, lines = ["row"], [[row["label"]] for row in rows.values()]
    for key in keys:
        header.append(key.replace("_", " "))
        for line, row in zip(lines, rows.values(), strict=True):
            line.append(_cell(row, key))
        for base in part["ratios"].get(key, "").split():
            if base in rows:
                header.append(f"to {base}")
                for line, name in zip(lines, rows, strict=True):
                    line.append(_range(ratios(part, name, key, base)))
    return markdown(header, lines)


def number(key: str, value: Any) -> str:
    """Return a figure as text.

    Example:
      >>> number("compile_seconds", 0.0123), number("temp_bytes", 3e8), number("cycles", 1234567)
      ('12.3 ms', '300 MB', '1.23 M')
      >>> number("error", 1.2e-7), number("overhead_share", 0.0123), number("layout", "channels_last")
      ('1.2e-07', '+1.23 %', 'channels_last')
    """
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    if isinstance(value, Sequence):
        return " – ".join(number(key, one) for one in dict.fromkeys((min(value), max(value))))
    if key == "median" or key.endswith("seconds"):
        return f"{_digits(value)} s" if value >= 1 else f"{_digits(1000 * value)} ms"
    if key.endswith("share"):
        return f"{100 * value:+.2f} %"
    unit = "B" if key.endswith("bytes") else ""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    if isinstance(value, int):
        return f"{value:,} {unit}".strip()
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else _digits(value)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are aligned, the first to the left and the others to the right."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]

    def padded(line: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return f"| {' | '.join([first.strip().ljust(widths[0]), *others])} |"

    return "\n".join([padded(header), f"|{'|'.join(rule)}|", *map(padded, lines)])


def _cell(row: Row, key: str) -> str:
    value = figure(row, key)
    if value is None:
        return row["status"] if key == "median" and "status" in row else ABSENT
    text = number(key, value)
    if key != "median" or len(row["seconds"]) == 1:
        return text
    return f"{text} ({number(key, [row['least'], row['most']])})"


def _range(values: Sequence[float]) -> str:
    """Return the median of ratios, and the middle half of them."""
    if not values:
        return ABSENT
    middle = f"{_digits(statistics.median(values))}×"
    if len(values) == 1 or min(values) == max(values):
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({_digits(low)} – {_digits(high)})"


def _is_known(rows: Mapping[str, Row], key: str) -> bool:
    return any(figure(row, key) is not None for row in rows.values())


def _several(value: Any) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value]


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _reasons(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        f"- {row['label']}: {row['status']}, {row['detail']}" for row in rows.values() if "detail" in row
    ]
    return ["\n".join(lines)] if lines else []


def _surroundings(result: Mapping[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    commit = where["commit"][:12] + (" with changes" if where["has_uncommitted_changes"] else "")
    chosen = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    variables = ", ".join(f"{key}={value}" for key, value in where["variables"].items()) or "none"
    return (
        f"{where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 1e9:.0f} GB. "
        f"Load at the start {where['load_average']:.2f}. Variables that set threads: {variables}. "
        f"{versions}. Commit {commit}, {where['date']}. Settings: {chosen}. Times are medians over rounds, "
        "with the least and the most; ratios are medians within rounds, with the middle half."
    )
