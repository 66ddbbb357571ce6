"""A table as a value, and how it is drawn: plain, as Markdown, or within the width of a terminal,
where no figure is cut and no column is lost. HTML pages draw the same value by templates.

If a table is too wide for a terminal, values that all rows share are moved to a line above it. If
one name stands for several rows, it gets a line of its own, above its rows. Else the widest column
is folded, if that is enough; else the columns that have no room stand below each row as
``name: value``, aligned over all rows. Tables in Markdown fold alike, and fenced text stays as it
is.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from rich.cells import cell_len

from highwater.pages.text import INDENT, escaped, folded, hanging, pieces, plain
from highwater.units import format_bytes, format_rate, format_seconds, format_share, format_tokens

Row = TypeVar("Row")
Column = tuple[str, str | Callable[[Row], str]]
"""A heading, and the source of the cells below it: the path of a record's field, written with its
unit, or a function of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as texts, with a title and footnotes; how it is drawn is another's affair."""

    title: str
    columns: tuple[str, ...]
    """Headings; empty for a table without headings."""
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...] = ()
    left_columns: int = 3
    """Number of columns that hold names and are aligned left; the others hold figures."""
    spare: tuple[str, ...] = ()
    """Headings of columns that a terminal leaves out if the table is long."""


def table_of(
    title: str,
    records: Iterable[Row],
    *columns: Column[Row] | None,
    footnotes: Iterable[str] = (),
    names: int = 3,
) -> TextTable:
    """Table with a row for each record, without None columns; the first ``names`` are texts."""
    shown = [column for column in columns if column is not None]
    return TextTable(
        title=title,
        columns=tuple(heading for heading, _ in shown),
        rows=tuple(tuple(_cell(each, what) for _, what in shown) for each in records),
        footnotes=tuple(footnotes),
        left_columns=names,
    )


def _cell(record: Row, what: str | Callable[[Row], str]) -> str:
    return what(record) if callable(what) else field_text(record, what)


_UNITS: dict[str, Callable[[Any], str]] = {
    "_bytes": format_bytes,
    "_tokens": format_tokens,
    "tokens_per_s": format_rate,
    "_s": format_seconds,
    "mfu": format_share,
}
"""Functions that write a figure, by the end of its field's name."""


def field_text(record: object, path: str) -> str:
    """Text of a field, by its name's unit: ``peak_bytes``, ``step.time_s``; ``-`` for None."""
    value = record
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    if value is None:
        return "-"
    units = (write for ending, write in _UNITS.items() if path.endswith(ending))
    return next(units, lambda value: plain(str(value)))(value)


def values_table(
    title: str, lines: Iterable[str], *, columns: tuple[str, ...] = ("what", "value")
) -> TextTable:
    """Table from lines like ``GPUs: 4 x H20``; lines without a value are left out."""
    rows = [(name, value) for name, _, value in (line.partition(": ") for line in lines) if value]
    return TextTable(title=title, columns=columns, rows=tuple(rows), left_columns=2)


def plain_table(table: TextTable, *, gap: str = "  ") -> str:
    """Draw a table in aligned columns, for a file or a pipe; lines are never wrapped."""
    grid = (table.columns, *table.rows) if table.columns else table.rows
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        gap.join(
            text.ljust(width) if column < table.left_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]
    return "\n".join(
        (table.title, "", *lines, *(("", *table.footnotes) if table.footnotes else ()))
    )


def markdown_table(table: TextTable) -> str:
    """Draw a table in Markdown: figures aligned right, columns padded for readers of the source."""
    headings, *rows = [tuple(map(escaped, row)) for row in (table.columns, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(headings, *rows, strict=True)]
    rules = [
        "-" * width if at < table.left_columns else "-" * (width - 1) + ":"
        for at, width in enumerate(widths)
    ]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in (headings, rules, *rows)
    )


LEAST_WIDTH = 20
"""Width in columns below which nothing is folded further."""
_LINES_OF_A_CELL = 4
"""Most lines of a cell; a column that needs more goes below its row."""
_LINES_OF_A_NAME = 2
_LINES_OF_A_HEADING = 2
_WHOLE = 24
"""Width beside a name that is enough for a longer value."""
_GAP = "  "
_GAPS = (_GAP, " ")
"""Gaps between columns; the last is for rows that only a narrower gap keeps on one line."""
_GAP_OF_PAIRS = "   "
_FIGURE = re.compile(r"[^\w`]*\d\S*(?<!:)(?: (?:[KMGT]iB|ms|s|%|GPUs?))?(?!\S)")
"""Matches the beginning of a cell of figures."""


_MOST_LINES = 14
"""Most lines of a table that keeps its spare columns."""


def terminal_table(table: TextTable, *, width: int) -> str:
    """Draw a table for a terminal of ``width`` columns: title, rows, footnotes."""
    width = max(width, LEAST_WIDTH)
    shared: list[str] = []
    if table.columns and _taken(map(_whole_width, _columns(table))) > width:
        table, shared = _without_what_rows_share(table)
    above = [line for text in (table.title, *shared) for line in folded(text, width)]
    lines, said = table_lines(table, width), list(table.footnotes)
    spare = [name for name in table.columns if name in table.spare]
    if spare and len(lines) > _MOST_LINES:
        kept = [index for index, name in enumerate(table.columns) if name not in spare]
        lines = table_lines(_only(table, kept), width)
        said.append(f"a wider terminal shows: {', '.join(spare)}")
    notes = [line for note in said for line in folded(note, width)]
    return "\n".join((*above, "", *lines, *(("", *notes) if notes else ())))


def table_lines(table: TextTable, width: int) -> list[str]:
    """Headings and rows as lines of at most ``width`` columns."""
    if not table.columns:
        return list(_names_and_values(table, width))
    drawn = _drawn(_columns(table), width)
    return [*drawn.headings, *(line for row in drawn.rows for line in row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Lines of a drawn table."""

    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnColumn:
    """A column of a table."""

    heading: str
    cells: tuple[str, ...]
    is_left: bool
    is_name: bool
    """True for the first column, which names the rows."""

    def lines(self, cell: str, width: int) -> list[str]:
        """Fold a cell's text; further lines of a name are indented, to tell rows apart."""
        return hanging(cell, width) if self.is_name else folded(cell, width)


def _columns(table: TextTable) -> list[_DrawnColumn]:
    cells = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns)
    return [
        _DrawnColumn(
            heading=heading,
            cells=texts,
            is_left=index < table.left_columns or not _are_figures(texts),
            is_name=index == 0,
        )
        for index, (heading, texts) in enumerate(zip(table.columns, cells, strict=True))
    ]


def _are_figures(cells: Sequence[str]) -> bool:
    """True if a column holds figures, or ranges of figures, and single words in place of some."""
    are_figures = [bool(_FIGURE.match(cell)) for cell in cells]
    return any(are_figures) and all(
        is_figure or " " not in cell for cell, is_figure in zip(cells, are_figures, strict=True)
    )


def _drawn(columns: Sequence[_DrawnColumn], width: int) -> _Drawn:
    """Draw all columns side by side if they fit, with headings of two lines if need be; else with
    names that stand for several rows above them, or with the widest column folded, or with the
    columns that have no room below each row.
    """
    whole = [_whole_width(column) for column in columns]
    for gap in _GAPS:
        if sum(whole) + len(gap) * (len(whole) - 1) <= width:
            return _side_by_side(columns, whole, gap)
    needed = [_least_width(column) for column in columns]
    if _taken(needed) <= width:
        return _side_by_side(columns, needed)
    if len(columns) > 1 and "" in columns[0].cells and width > LEAST_WIDTH:
        return _groups(columns, width)
    widest, widths = needed.index(max(needed)), [*needed]
    widths[widest] -= _taken(needed) - width
    if _is_readable(columns[widest], widths[widest]):
        return _side_by_side(columns, widths)
    name, half = columns[0], width // 2
    if needed[0] > half and _is_readable(name, half):  # more columns have room beside it
        texts = (name.heading, *name.cells)
        needed[0] = max(cell_len(line) for text in texts for line in name.lines(text, half))
    return _blocks(columns, needed, width)


def _taken(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _whole_width(column: _DrawnColumn) -> int:
    """Width that keeps every text on one line."""
    return max(map(cell_len, (column.heading, *column.cells)))


def _least_width(column: _DrawnColumn) -> int:
    """Width that keeps every cell on one line, and the heading on two."""
    width = max(map(cell_len, ("", *column.cells, *pieces(column.heading))))
    while len(folded(column.heading, width)) > _LINES_OF_A_HEADING:
        width += 1
    return width


def _is_readable(column: _DrawnColumn, width: int) -> bool:
    """True if so narrow a column breaks no word, and has few lines in each cell and heading."""
    texts = (column.heading, *column.cells)
    longest = max((cell_len(piece) for text in texts for piece in pieces(text)), default=0)
    most = _LINES_OF_A_NAME if column.is_name else _LINES_OF_A_CELL
    return width >= longest + len(INDENT) and all(
        len(column.lines(text, width)) <= most for text in texts
    )


def _without_what_rows_share(table: TextTable) -> tuple[TextTable, list[str]]:
    """Move columns equal in all rows into a line: ``in every row: GPUs 4; by predicted``."""
    cells = list(zip(*table.rows, strict=True))
    shared = [index for index in range(1, len(cells)) if len(set(cells[index])) == 1]
    if not shared or len(table.rows) <= 1:
        return table, []
    kept = [index for index in range(len(cells)) if index not in shared]
    said = [
        f"{table.columns[index]} {cells[index][0]}".strip() for index in shared if cells[index][0]
    ]
    return _only(table, kept), [f"in every row: {'; '.join(said)}"] if said else []


def _only(table: TextTable, kept: Sequence[int]) -> TextTable:
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
        left_columns=sum(index < table.left_columns for index in kept),
    )


def _side_by_side(
    columns: Sequence[_DrawnColumn], widths: Sequence[int], gap: str = _GAP
) -> _Drawn:
    """Draw columns under headings and a rule; a row is as high as its highest cell."""
    are_left = [column.is_left for column in columns]
    paired = list(zip(columns, widths, strict=True))
    headings = [folded(column.heading, width) for column, width in paired]
    height = max(map(len, headings))
    raised = [[""] * (height - len(heading)) + heading for heading in headings]
    above = list(_joined(raised, widths, are_left, gap))
    rule = gap.join("-" * width for width in widths).rstrip()
    cells = (
        [
            column.lines(column.cells[row], width)
            for column, width in zip(columns, widths, strict=True)
        ]
        for row in range(len(columns[0].cells))
    )
    return _Drawn(
        headings=[*above, rule] if above else [],
        rows=[list(_joined(row, widths, are_left, gap)) for row in cells],
    )


def _joined(
    cells: Sequence[Sequence[str]], widths: Sequence[int], are_left: Sequence[bool], gap: str = _GAP
) -> Iterator[str]:
    """Yield the lines of cells drawn side by side; a cell may have several lines."""
    for line in range(max(map(len, cells))):
        texts = [
            _aligned(cell[line] if line < len(cell) else "", width, is_left=is_left)
            for cell, width, is_left in zip(cells, widths, are_left, strict=True)
        ]
        text = gap.join(texts).rstrip()
        if text:
            yield text


def _aligned(text: str, width: int, *, is_left: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return text + blanks if is_left else blanks + text


def _blocks(columns: Sequence[_DrawnColumn], needed: Sequence[int], width: int) -> _Drawn:
    """Draw the columns that fit beside the first as rows, and the other columns below each row."""
    widths = {0: min(needed[0], width)}
    for index in range(1, len(columns)):
        if _taken((*widths.values(), needed[index])) <= width:
            widths[index] = needed[index]
    beside = _side_by_side([columns[index] for index in widths], list(widths.values()))
    below = [column for index, column in enumerate(columns) if index not in widths]
    lines_of_pairs = _lines_of_pairs(below, width)
    rows = [
        [*row, *(line for pairs in lines_of_pairs for line in _pairs(pairs, number, width))]
        for number, row in enumerate(beside.rows)
    ]
    return replace(beside, rows=rows)


def _groups(columns: Sequence[_DrawnColumn], width: int) -> _Drawn:
    """Draw each name on a line of its own, and the columns of its rows indented below."""
    first, second, *others = columns
    rest = _drawn([replace(second, is_name=True), *others], width - len(INDENT))
    rows = [
        [*(hanging(name, width) if name else ()), *(INDENT + line for line in row)]
        for name, row in zip(first.cells, rest.rows, strict=True)
    ]
    headings = [(INDENT + line).rstrip() for line in rest.headings]
    return _Drawn(headings=[*folded(first.heading, width), *headings], rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A column drawn below the rows: the widths of its name and of its value."""

    column: _DrawnColumn
    name_width: int
    """Width of the name with its colon and a blank."""
    value_width: int

    @property
    def width(self) -> int:
        return self.name_width + self.value_width


def _lines_of_pairs(columns: Sequence[_DrawnColumn], width: int) -> list[list[_Pair]]:
    """Group columns that share a line below a row: as many as fit, alike for all rows."""
    lines: list[list[_Pair]] = []
    for column in columns:
        name_width = cell_len(column.heading) + len(": ") if column.heading else 0
        value_width = max(map(cell_len, column.cells), default=0)
        pair = _Pair(column=column, name_width=name_width, value_width=value_width)
        if lines and _taken_by_pairs([*lines[-1], pair]) <= width:
            lines[-1].append(pair)
        else:
            lines.append([pair])
    in_stops = _in_stops(lines)
    return in_stops if all(_taken_by_pairs(line) <= width for line in in_stops) else lines


def _in_stops(lines: Sequence[Sequence[_Pair]]) -> list[list[_Pair]]:
    """Align the pairs of all lines: names below names, and values below values."""
    lined: list[list[_Pair]] = [[] for _ in lines]
    for stop in range(max(map(len, lines), default=0)):
        name_width = max(line[stop].name_width for line in lines if stop < len(line))
        followed = (line[stop].value_width for line in lines if stop + 1 < len(line))
        least = max(followed, default=0)
        for line, own in zip(lines, lined, strict=True):
            for pair in line[stop : stop + 1]:
                value_width = max(least, pair.value_width)
                own.append(replace(pair, name_width=name_width, value_width=value_width))
    return lined


def _taken_by_pairs(pairs: Collection[_Pair]) -> int:
    gaps = len(_GAP_OF_PAIRS) * (len(pairs) - 1)
    return len(INDENT) + sum(pair.width for pair in pairs) + gaps


def _pairs(pairs: Sequence[_Pair], row: int, width: int) -> Iterator[str]:
    """Yield one line of pairs below a row; a longer value continues on lines below."""
    texts: list[str] = []
    for pair in pairs:
        value = pair.column.cells[row]
        name = f"{pair.column.heading}:" if pair.column.heading and value else ""
        texts.append(
            _aligned(name, pair.name_width, is_left=True)
            + _aligned(value, pair.value_width, is_left=True)
        )
    line = INDENT + _GAP_OF_PAIRS.join(texts).rstrip()
    if cell_len(line) <= width:
        if line.strip():
            yield line
        return
    for text in hanging(line.strip(), width - len(INDENT)):
        yield INDENT + text


def _names_and_values(table: TextTable, width: int) -> Iterator[str]:
    """Yield the lines of a table without headings: names, and values that fold onto next lines."""
    names = max((cell_len(row[0]) for row in table.rows), default=0)
    for name, *values in table.rows:
        value = _GAP.join(values)
        room = width - names - len(_GAP)
        if room >= min(_WHOLE, cell_len(value)):
            yield from _joined([[name], folded(value, room)], (names, room), (True, True))
        else:
            yield from folded(name, width)
            yield from (INDENT + line for line in folded(value, width - len(INDENT)))


_FENCE = "```"
_ITEM = re.compile(r"(?:[-|>]|\d+\.) ")
"""Matches the beginning of a line whose continuation is indented."""
_RULE = re.compile(r"\|(?: *:?-+:? *\|)+")
"""Matches the line between a Markdown table's headings and rows."""


def terminal_text(text: str, *, width: int) -> str:
    """Fold a text of several lines for a terminal; fenced lines stay as they are."""
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
    """Fold one line of a text; the continuation of an item or a row is indented."""
    text = line.lstrip()
    before = line[: len(line) - len(text)]
    item = _ITEM.match(text)
    below = before + " " * len(item[0] if item else "")
    if cell_len(line) <= width or len(below) >= width:
        return [line]
    first, *rest = folded(text, width - len(below))
    return [before + first, *(below + more for more in rest)]


def _markdown_table(lines: list[str], width: int) -> list[str]:
    """Fold a Markdown table that is wider than the terminal; others stay as they are."""
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
