"""Small tables, as text for a terminal and as HTML for a notebook."""

import html
from collections.abc import Sequence

Row = Sequence[str]


def text_table(title: str, header: Row, rows: Sequence[Row], left: Sequence[int] = (0,)) -> str:
    """Return a table whose columns in ``left`` are set to the left, and all others to the right."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Row) -> str:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([title, *map(line, table)])


def html_table(title: str, header: Row, rows: Sequence[Row], left: Sequence[int] = (0,)) -> str:
    """Return the same as HTML."""

    def line(row: Row, tag: str) -> str:
        sides = ["left" if column in left else "right" for column in range(len(row))]
        cells = [
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(title)}</caption>{line(header, 'th')}{body}</table>"
