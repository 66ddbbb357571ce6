"""Tables and texts within the width of a terminal: every figure whole, every column there.

A row that is too wide for one line folds: what all rows share is said once below, the leading
columns stay a table, and the other columns follow under each row, ``name: value``. Texts break at
spaces, but not between a figure and its unit, and not within a command in backticks, which has to
be pasted: one that is longer than a line is left to the terminal to wrap.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len

from highwater.pages.text_table import TextTable

_LEAST_WIDTH = 20
"""Columns below which nothing is folded further."""
_WHOLE = 24
"""Columns up to which a cell is not broken: a figure with its unit. Longer texts get at least as
many."""
_NAME = len("Env + Offload-states + chunked")
"""Columns up to which the name of a row is not broken, which is a rung's: the longest of the
ladder."""
_GAP = "  "
_INDENT = "  "
_BETWEEN = " | "
_PIECE = re.compile(
    r"(?:`[^`]*`|\S)+"
    r"(?:(?<=\d) (?:[KMGT]iB|ms|s|%|GPUs?|tokens?)(?!\w)\S*|(?<=\d[hm]) \d\d[ms](?!\w)\S*)?"
)
"""What stands on one line: a word, a figure with its unit, a time, a command in backticks."""
_BREAKS_AFTER = "/_-=,;:.&?"
"""Characters after which a word that is longer than a line is broken rather than elsewhere."""
_FENCE = "```"


def terminal_table(table: TextTable, *, width: int) -> str:
    """The table for a terminal of ``width`` columns: title, rows, footnotes."""
    width = max(width, _LEAST_WIDTH)
    if table.columns and _taken(_widths(table)) > width:
        table = _without_what_rows_share(table)
    rows = _rows(table, width) if table.columns else _names_and_values(table, width)
    notes = [line for note in table.footnotes for line in folded(note, width)]
    return "\n".join((*folded(table.title, width), "", *rows, *(("", *notes) if notes else ())))


def terminal_text(text: str, *, width: int) -> str:
    """Fold text of several lines for a terminal; fenced lines stay as they are."""
    lines: list[str] = []
    is_fenced = False
    for line in text.split("\n"):
        is_fence = line.startswith(_FENCE)
        is_fenced ^= is_fence
        lines += [line] if is_fence or is_fenced else _folded_line(line, max(width, _LEAST_WIDTH))
    return "\n".join(lines)


def folded(text: str, width: int) -> list[str]:
    """The text in lines of at most ``width`` columns."""
    lines, end = [""], 0
    for piece in _PIECE.finditer(text):
        gap = text[end : piece.start()]
        end = piece.end()
        if cell_len(lines[-1] + gap + piece[0]) <= width:
            lines[-1] += gap + piece[0]
        elif "`" in piece[0] or cell_len(piece[0]) <= width:
            lines.append(piece[0])
        else:
            lines += _broken(piece[0], width)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def _folded_line(line: str, width: int) -> list[str]:
    """Fold one line of a text: what belongs to an item, or to a row, is indented below it."""
    text = line.lstrip()
    before = line[: len(line) - len(text)]
    below = before + (_INDENT if text.startswith(("- ", "| ", "> ")) else "")
    if cell_len(line) <= width or len(below) >= width:
        return [line]
    first, *rest = folded(text, width - len(below))
    return [before + first, *(below + more for more in rest)]


def _broken(word: str, width: int) -> list[str]:
    """Cut a word that is longer than a line into pieces.

    Cuts come after a slash or the like, else not within a figure, where that can be.
    """
    pieces: list[str] = []
    while cell_len(word) > width:
        longest = _fitting(word, width)
        ends = [
            at for at in range(longest // 2 + 1, longest + 1) if not _is_within_a_figure(word, at)
        ]
        at = max(
            (end for end in ends if word[end - 1] in _BREAKS_AFTER),
            default=max(ends, default=longest),
        )
        pieces.append(word[:at])
        word = word[at:]
    return [*pieces, word]


def _fitting(word: str, width: int) -> int:
    """Number of a word's characters that have room, at least one."""
    taken = 0
    for at, character in enumerate(word):
        taken += cell_len(character)
        if taken > width:
            return max(1, at)
    return len(word)


def _is_within_a_figure(word: str, at: int) -> bool:
    before, after = word[at - 1], word[at]
    return (after.isdigit() and (before.isdigit() or before in ",.")) or (
        before.isdigit() and after in ",."
    )


def _widths(table: TextTable) -> list[int]:
    """Width of each column, with all of it on one line."""
    return [max(map(cell_len, column)) for column in zip(table.columns, *table.rows, strict=True)]


def _needed(heading: str, cells: Sequence[str], *, whole: int) -> int:
    """The narrowest that a column may become.

    Cells of up to ``whole`` columns stay unbroken, longer ones break between their pieces.
    """
    needed = max((cell_len(piece) for piece in _PIECE.findall(heading)), default=0)
    for cell in cells:
        size = cell_len(cell)
        needed = max(
            needed, size if size <= whole else max(whole, *map(cell_len, _PIECE.findall(cell)))
        )
    return needed


def _taken(widths: Collection[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _without_what_rows_share(table: TextTable) -> TextTable:
    """Say columns after the first whose text is the same in every row in a footnote.

    ``in every row: by predicted``.
    """
    if len(table.rows) <= 1:
        return table
    cells = list(zip(*table.rows, strict=True))
    shared = [index for index in range(1, len(cells)) if len(set(cells[index])) == 1]
    if not shared:
        return table
    kept = [index for index in range(len(cells)) if index not in shared]
    said = ", ".join(f"{table.columns[index]} {cells[index][0]}" for index in shared)
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
        footnotes=(f"in every row: {said}", *table.footnotes),
        left_columns=sum(index < table.left_columns for index in kept),
    )


def _rows(table: TextTable, width: int) -> Iterator[str]:
    """Headings, a rule, and the rows.

    What has no room beside the other columns goes on below each row.
    """
    beside = _beside(table, width)
    below = [index for index in range(len(table.columns)) if index not in beside]
    widths = list(beside.values())
    are_left = [index < table.left_columns for index in beside]
    yield from _in_columns(
        [table.columns[index] for index in beside], widths, are_left, at_the_bottom=True
    )
    yield _GAP.join("-" * each for each in widths).rstrip()
    for row in table.rows:
        yield from _in_columns([row[index] for index in beside], widths, are_left)
        yield from _below(
            [table.columns[index] for index in below], [row[index] for index in below], width
        )


def _beside(table: TextTable, width: int) -> dict[int, int]:
    """Widths of the columns that have room beside each other, by their index; the first always has.

    Where all have room with their sentences broken, these share what is left. Else a row goes on
    below anyway, and so do they.
    """
    wanted = _widths(table)
    if _taken(wanted) <= width:
        return dict(enumerate(wanted))
    columns = list(zip(table.columns, *table.rows, strict=True))
    widths = {
        index: _needed(heading, cells, whole=_WHOLE if index else _NAME)
        for index, (heading, *cells) in enumerate(columns)
    }
    if _taken(widths.values()) > width:
        candidates = (
            (index, _needed(heading, cells, whole=width))
            for index, (heading, *cells) in enumerate(columns)
        )
        widths = {0: min(widths[0], width)}
        for index, needed in candidates:
            if index and _taken((*widths.values(), needed)) <= width:
                widths[index] = needed
    for index in widths:
        widths[index] += min(wanted[index] - widths[index], width - _taken(widths.values()))
    return widths


def _in_columns(
    cells: Sequence[str],
    widths: Sequence[int],
    are_left: Sequence[bool],
    *,
    at_the_bottom: bool = False,
) -> Iterator[str]:
    """One row, in as many lines as its highest cell has."""
    blocks = [folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, blocks))
    for line in range(height):
        texts: list[str] = []
        for block, width, is_left in zip(blocks, widths, are_left, strict=True):
            at = line - (height - len(block) if at_the_bottom else 0)
            text = block[at] if 0 <= at < len(block) else ""
            blanks = " " * (width - cell_len(text))
            texts.append(text + blanks if is_left else blanks + text)
        yield _GAP.join(texts).rstrip()


def _below(names: Sequence[str], values: Sequence[str], width: int) -> Iterator[str]:
    """The rest of a row: ``name: value | name: value``, as many in a line as there is room for."""
    line = ""
    for item in (
        f"{name}: {value}" if name else value
        for name, value in zip(names, values, strict=True)
        if value
    ):
        joined = f"{line}{_BETWEEN if line else _INDENT}{item}"
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            yield line
        *full, last = folded(item, width - 2 * len(_INDENT))
        for index, text in enumerate((*full, last)):
            line = (2 if index else 1) * _INDENT + text
            if index < len(full):
                yield line
    if line:
        yield line


def _names_and_values(table: TextTable, width: int) -> Iterator[str]:
    """A table without headings: a name and what it says, which goes on below itself."""
    names = max((cell_len(row[0]) for row in table.rows), default=0)
    for name, *values in table.rows:
        value = _GAP.join(values)
        room = width - names - len(_GAP)
        if room >= min(_WHOLE, cell_len(value)):
            yield from _in_columns((name, value), (names, room), (True, True))
        else:
            yield from folded(name, width)
            yield from (_INDENT + line for line in folded(value, width - len(_INDENT)))
