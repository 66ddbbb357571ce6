"""Tables and texts in a terminal of any width: every figure whole, every column there, no line too
long.
"""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from highwater.pages.table import TextTable, terminal_table, terminal_text
from highwater.pages.text import folded, pieces
from tables import table

WIDTHS = st.integers(20, 240)
FIGURES = st.one_of(
    st.integers(0, 9_999_999).map("{:,}".format),
    st.integers(0, 9_999_999).map("{:,}*".format),
    st.floats(0, 9999).map("{:.2f} GiB".format),
    st.integers(61, 3599).map(lambda s: f"{s // 60}m {s % 60:02d}s"),
    st.just("-"),
)
"""At most 11 characters: no line is too short for one."""
WORDS = st.lists(
    st.sampled_from(
        ["an", "exchange", "in", "every", "layer,", "Env", "+", "chunked", "131,072", "2.00 GiB"]
    ),
    max_size=12,
)
NAMES = WORDS.map(" ".join)
HEADINGS = st.sampled_from(
    ["rung", "SP", "capacity", "ended by", "predicted GPU memory", "headroom, at least", ""]
)


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    """Tables of names and figures."""
    kinds = draw(st.lists(st.sampled_from([NAMES, FIGURES]), min_size=1, max_size=9))
    rows = draw(st.lists(st.tuples(*kinds), min_size=1, max_size=6))
    return TextTable(
        title=draw(NAMES),
        columns=tuple(draw(HEADINGS) for _ in kinds),
        rows=tuple(rows),
        footnotes=tuple(draw(st.lists(NAMES, max_size=2))),
        left_columns=draw(st.integers(0, len(kinds))),
    )


def words(text: str) -> set[str]:
    """What stands between spaces: a part of a figure is none of its words. A colon belongs to the
    name before it, a semicolon stands between what all rows share.
    """
    return {word.rstrip(":;") for word in text.split()}


@given(tables(), WIDTHS)
@example(TextTable(title="", columns=("a",), rows=(("131,072 " * 20,),)), 20)
@example(TextTable(title="", columns=("rung", ""), rows=(("", ""),)), 20)
def test_every_cell_of_any_table_stands_there_whole_and_no_line_is_too_long(table, width):
    drawn = terminal_table(table, width=width)
    assert max(map(len, drawn.splitlines())) <= width
    assert all(line == line.rstrip() for line in drawn.splitlines())
    shown = words(drawn)
    filled = [
        heading for heading, *cells in zip(table.columns, *table.rows, strict=True) if any(cells)
    ]
    for text in (
        table.title,
        *table.footnotes,
        *filled,
        *(cell for row in table.rows for cell in row),
    ):
        assert words(text.replace(",", "")) <= {word.replace(",", "") for word in shown}, text
        assert set(re.findall(r"[\d,.]*\d", text)) <= set(re.findall(r"[\d,.]*\d", drawn))


@given(tables(), WIDTHS)
def test_no_figure_stands_there_that_the_table_has_not(table, width):
    theirs = " ".join(
        (table.title, *table.footnotes, *table.columns, *(" ".join(row) for row in table.rows))
    )
    assert set(re.findall(r"[\d,.]*\d", terminal_table(table, width=width))) <= set(
        re.findall(r"[\d,.]*\d", theirs)
    )


@given(st.lists(st.tuples(NAMES.filter(bool), NAMES), min_size=1), WIDTHS)
def test_names_and_what_they_say_stay_within_any_width(rows, width):
    drawn = terminal_table(
        TextTable(title="t", columns=(), rows=tuple(rows), left_columns=2), width=width
    )
    assert max(map(len, drawn.splitlines())) <= width
    assert all(words(name) | words(value) <= words(drawn) for name, value in rows)


LADDER = TextTable(
    title="capacities",
    columns=("rung", "SP", "GPUs", "capacity", "ended by", "predicted GPU memory", "peak in"),
    rows=(
        ("vanilla", "1", "4", "69,632", "73,728: GPU memory", "73.24 GiB to 79.15 GiB", "loss"),
        (
            *("Env + Offload + chunked", "4", "4", "131,072", "the longest length in question"),
            *("21.89 GiB to 22.75 GiB", "a layer"),
        ),
    ),
)


def test_a_row_that_does_not_fit_on_a_line_goes_on_below_with_its_headings():
    assert terminal_table(LADDER, width=60).splitlines() == [
        "capacities",
        "in every row: GPUs 4",
        "",
        "rung                     SP  capacity  peak in",
        "-----------------------  --  --------  -------",
        "vanilla                  1     69,632  loss",
        "  ended by:             73,728: GPU memory",
        "  predicted GPU memory: 73.24 GiB to 79.15 GiB",
        "Env + Offload + chunked  4    131,072  a layer",
        "  ended by:             the longest length in question",
        "  predicted GPU memory: 21.89 GiB to 22.75 GiB",
    ]


def test_a_heading_takes_two_lines_before_anything_else_breaks():
    table = TextTable(
        title="t",
        columns=("rung", "predicted GPU memory", "headroom, at least"),
        rows=(("vanilla", "71.15 GiB", "0.0 MiB"), ("Env + chunked", "60.00 GiB", "16.78 GiB")),
        left_columns=1,
    )
    assert terminal_table(table, width=40).splitlines()[2:] == [
        "                predicted  headroom,",
        "rung           GPU memory   at least",
        "-------------  ----------  ---------",
        "vanilla         71.15 GiB    0.0 MiB",
        "Env + chunked   60.00 GiB  16.78 GiB",
    ]


def test_a_name_that_stands_for_several_rows_has_a_line_of_its_own():
    table = TextTable(
        title="t",
        columns=("phase", "term", "", "GiB"),
        rows=(
            ("loss (the peak), 66.51 GiB", "states", "####", "29.92"),
            ("", "kept by recompute", "##", "16.00"),
            ("backward of the last layer", "states", "####", "29.92"),
        ),
    )
    assert terminal_table(table, width=34).splitlines()[2:] == [
        "phase",
        "  term                       GiB",
        "  -----------------  ----  -----",
        "loss (the peak), 66.51 GiB",
        "  states             ####  29.92",
        "  kept by recompute  ##    16.00",
        "backward of the last layer",
        "  states             ####  29.92",
    ]


@st.composite
def tables_of_distinct_words(draw: st.DrawFn) -> TextTable:
    """Tables no word of which stands there twice: ``r1c2w3`` is a cell's, ``c2w3`` a heading's;
    figures are ``131,072`` and the like, with their unit.
    """
    columns = draw(st.integers(2, 10))
    sentences = draw(st.lists(st.booleans(), min_size=columns, max_size=columns))
    figures = iter(range(100_001, 10_000_000, 1_001))

    def cell(row: int, column: int) -> str:
        if not sentences[column]:
            return f"{next(figures):,}{draw(st.sampled_from(['', ' GiB', ' tokens', '*']))}"
        return " ".join(f"r{row}c{column}w{word}" for word in range(draw(st.integers(1, 7))))

    return TextTable(
        title="t",
        columns=tuple(
            " ".join(f"c{column}w{word}" for word in range(draw(st.integers(1, 3))))
            for column in range(columns)
        ),
        rows=tuple(
            tuple(cell(row, column) for column in range(columns))
            for row in range(draw(st.integers(1, 5)))
        ),
        left_columns=draw(st.integers(0, columns)),
    )


@given(tables_of_distinct_words(), st.integers(40, 200))
def test_every_cell_is_whole_in_reading_order_and_no_row_runs_into_the_next(table, width):
    lines = terminal_table(table, width=width).splitlines()
    assert max(map(len, lines)) <= width
    rule = next(index for index, line in enumerate(lines) if line and set(line) <= {"-", " "})
    end_of_row = rule
    for row in table.rows:
        places: list[int] = []
        for cell in row:
            lines_of_cell, columns_of_cell = [], []
            for piece in pieces(cell):
                (place,) = [
                    (index, match.start())
                    for index, line in enumerate(lines)
                    for match in re.finditer(rf"(?<!\S){re.escape(piece)}(?!\S)", line)
                ]
                lines_of_cell.append(place[0])
                columns_of_cell.append(place[1])
            order = list(zip(lines_of_cell, columns_of_cell, strict=True))
            assert order == sorted(order), "reading order"
            assert set(lines_of_cell) == set(range(lines_of_cell[0], lines_of_cell[-1] + 1))
            places += lines_of_cell
        assert min(places) > end_of_row
        assert lines[min(places)].lstrip().startswith(pieces(row[0])[0]), (
            "a row begins with its name"
        )
        end_of_row = max(places)
    for heading in table.columns:
        assert words(heading) <= words(" ".join(lines))


@pytest.mark.parametrize(
    ("text", "lines"),
    table("terminal_table", "lines_break_between_words"),
)
def test_lines_break_between_words_and_never_within_a_figure_or_a_command(text, lines):
    assert folded(text, 10) == lines


@pytest.mark.parametrize("indent", [0, 2, 4, 8])
@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal_however_far_it_is_indented(indent, width):
    text = f"{' ' * indent}- {' '.join(['131,072 tokens'] * 20)}"
    lines = terminal_text(text, width=width).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == text.strip()


def test_a_table_in_markdown_folds_as_others_do_where_the_terminal_is_narrower():
    text = "\n".join(
        (
            "| found in | figures | cells |",
            "| --- | --- | ---: |",
            "| predict Qwen3-8B | predicted, nothing was run | 15\\* |",
        )
    )
    assert terminal_text(text, width=80) == text
    assert terminal_text(text, width=40).splitlines() == [
        "found in          figures          cells",
        "----------------  ---------------  -----",
        "predict Qwen3-8B  predicted,         15*",
        "                  nothing was run",
    ]


def test_a_word_of_many_thousand_characters_is_broken_at_once():
    pieces = folded("x" * 100_000, 80)
    assert "".join(pieces) == "x" * 100_000
    assert {len(piece) for piece in pieces} == {80}
