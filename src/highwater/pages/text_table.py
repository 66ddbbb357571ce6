"""A table as text: its rows, before anybody decides how they are drawn, and aligned columns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text, before anybody decides how it is drawn."""

    title: str
    columns: tuple[str, ...]
    """Headings; empty for a table without."""
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...] = ()
    left_columns: int = 3
    """Columns that hold names: aligned left. The others hold figures."""


def plain_table(table: TextTable) -> str:
    """The table in aligned columns, for a file or a pipe; never wrapped."""
    grid = (table.columns, *table.rows) if table.columns else table.rows
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column < table.left_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]
    return "\n".join(
        (table.title, "", *lines, *(("", *table.footnotes) if table.footnotes else ()))
    )
