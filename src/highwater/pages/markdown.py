"""Markdown as every document of ours writes it.

Text from outside stays text, and tables are readable in the source too.
"""

import html
import re
from collections.abc import Iterable

from highwater.pages.text import plain, plain_lines
from highwater.pages.text_table import TextTable

_SPECIAL = re.compile(r"[|*`\[\]\\~$]|^#|^[-+](?=\s)|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def escaped(text: str) -> str:
    """Escape text from outside, for a Markdown paragraph, heading or table."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", html.escape(plain(text), quote=False))


def markdown_list(lines: Iterable[str]) -> str:
    """A list with an item a line; what is from outside has to be escaped already."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(table: TextTable) -> str:
    """A table with figures aligned right, and of even widths for who reads the source."""
    grid = [tuple(map(escaped, row)) for row in (table.columns, *table.rows)]
    widths = [max(3, *(len(row[column]) for row in grid)) for column in range(len(table.columns))]
    rules = tuple(
        "-" * width if i < table.left_columns else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    )
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in (grid[0], rules, *grid[1:])
    )


def fenced(text: str) -> str:
    """Fence text of several lines, whatever is in it.

    The fence is longer than any in the text.
    """
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{plain_lines(text)}\n{fence}"
