"""Texts within the width of a terminal. Lines end between words, tables in Markdown fold like
others, and what is fenced stays as it is.
"""

import re
from itertools import groupby

from rich.cells import cell_len

from highwater.pages.terminal_table import LEAST_WIDTH, table_lines
from highwater.pages.text import folded
from highwater.pages.text_table import TextTable

_FENCE = "```"
_ITEM = re.compile(r"(?:[-|>]|\d+\.) ")
"""How a line begins whose further lines are indented."""
_RULE = re.compile(r"\|(?: *:?-+:? *\|)+")
"""The line between a Markdown table's headings and its rows."""


def terminal_text(text: str, *, width: int) -> str:
    """Fold text of several lines for a terminal; fenced lines stay as they are."""
    width = max(width, LEAST_WIDTH)
    lines: list[str] = []
    is_fenced = False
    for is_of_a_table, group in groupby(text.split("\n"), lambda line: line.startswith("|")):
        block = list(group)
        if is_of_a_table and not is_fenced:
            lines += _markdown_table(block, width)
            continue
        for line in block:
            is_fence = line.startswith(_FENCE)
            is_fenced ^= is_fence
            lines += [line] if is_fence or is_fenced else _folded_line(line, width)
    return "\n".join(lines)


def _folded_line(line: str, width: int) -> list[str]:
    """Fold one line of a text: what belongs to an item, or to a row, is indented below it."""
    text = line.lstrip()
    before = line[: len(line) - len(text)]
    item = _ITEM.match(text)
    below = before + " " * len(item[0] if item else "")
    if cell_len(line) <= width or len(below) >= width:
        return [line]
    first, *rest = folded(text, width - len(below))
    return [before + first, *(below + more for more in rest)]


def _markdown_table(lines: list[str], width: int) -> list[str]:
    """Fold the rows of a Markdown table that is wider than the terminal; leave any other."""
    is_table = len(lines) > 2 and bool(_RULE.fullmatch(lines[1]))
    rows = [_markdown_cells(line) for line in lines] if is_table else []
    if not is_table or max(map(cell_len, lines)) <= width or len({len(row) for row in rows}) > 1:
        return [part for line in lines for part in _folded_line(line, width)]
    headings, rule, *cells = rows
    lefts = [not end.endswith(":") for end in rule]
    left_columns = lefts.index(False) if False in lefts else len(lefts)
    table = TextTable(title="", columns=headings, rows=tuple(cells), left_columns=left_columns)
    return table_lines(table, width)


def _markdown_cells(line: str) -> tuple[str, ...]:
    cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return tuple(re.sub(r"\\([^\w\s])", r"\1", cell.strip()) for cell in cells)
