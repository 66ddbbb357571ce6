"""Tables and texts in a terminal of any width: every figure whole, every column there, no line too
long.
"""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from highwater.pages.terminal import folded, terminal_table, terminal_text
from highwater.pages.text_table import TextTable

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
    name before it.
    """
    return {word.rstrip(":") for word in text.split()}


@given(tables(), WIDTHS)
@example(TextTable(title="", columns=("a",), rows=(("131,072 " * 20,),)), 20)
@example(TextTable(title="", columns=("rung", ""), rows=(("", ""),)), 20)
def test_every_cell_of_any_table_stands_there_whole_and_no_line_is_too_long(
    table: TextTable, width: int
) -> None:
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
def test_no_figure_stands_there_that_the_table_has_not(table: TextTable, width: int) -> None:
    theirs = " ".join(
        (table.title, *table.footnotes, *table.columns, *(" ".join(row) for row in table.rows))
    )
    assert set(re.findall(r"[\d,.]*\d", terminal_table(table, width=width))) <= set(
        re.findall(r"[\d,.]*\d", theirs)
    )


@given(st.lists(st.tuples(NAMES.filter(bool), NAMES), min_size=1), WIDTHS)
def test_names_and_what_they_say_stay_within_any_width(
    rows: list[tuple[str, str]], width: int
) -> None:
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
            "Env + Offload + chunked",
            "4",
            "4",
            "131,072",
            "the longest length in question",
            "21.89 GiB to 22.75 GiB",
            "a layer",
        ),
    ),
)


def test_a_row_that_does_not_fit_on_a_line_goes_on_below_with_its_headings() -> None:
    assert terminal_table(LADDER, width=60).splitlines() == [
        "capacities",
        "",
        "rung                     SP  capacity  peak in",
        "-----------------------  --  --------  -------",
        "vanilla                  1     69,632     loss",
        "  ended by: 73,728: GPU memory",
        "  predicted GPU memory: 73.24 GiB to 79.15 GiB",
        "Env + Offload + chunked  4    131,072  a layer",
        "  ended by: the longest length in question",
        "  predicted GPU memory: 21.89 GiB to 22.75 GiB",
        "",
        "in every row: GPUs 4",
    ]


def test_where_there_is_room_a_row_is_a_line_and_nothing_is_left_out() -> None:
    lines = terminal_table(LADDER, width=200).splitlines()
    assert re.split(" {2,}", lines[2]) == list(LADDER.columns)
    assert [tuple(re.split(" {2,}", line)) for line in lines[4:]] == list(LADDER.rows)


def test_sentences_break_before_a_row_goes_on_below() -> None:
    lines = terminal_table(LADDER, width=96).splitlines()
    assert lines[4:] == [
        "vanilla                  1     69,632        73,728: GPU memory  73.24 GiB to 79.15 GiB  "
        "   loss",
        "Env + Offload + chunked  4    131,072     the longest length in  21.89 GiB to 22.75 GiB  "
        "a layer",
        "                                                       question",
        "",
        "in every row: GPUs 4",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("needs 79.15 GiB there", ["needs", "79.15 GiB", "there"]),
        ("took 12m 05s in all", ["took", "12m 05s in", "all"]),
        ("on 4 GPUs, of 95 %", ["on 4 GPUs,", "of 95 %"]),
        ("add `--rope yarn --gpus 4` here", ["add", "`--rope yarn --gpus 4`", "here"]),
        ("./logs/Qwen3/study.jsonl", ["./logs/", "Qwen3/", "study.", "jsonl"]),
        ("abcdefgh131,072xyz", ["abcdefgh", "131,072xyz"]),
        ("", [""]),
        ("模型模型模型 4", ["模型模型模", "型 4"]),
    ],
)
def test_lines_break_between_words_and_never_within_a_figure_or_a_command(
    text: str, lines: list[str]
) -> None:
    assert folded(text, 10) == lines


def test_an_item_goes_on_below_itself_and_what_is_fenced_stays_as_it_is() -> None:
    fenced = "```text\nhighwater find Qwen3-0.6B --max-length 8k\n```"
    text = (
        f"- an item of eleven words that does not fit on a line\n{fenced}\n| a | row of | 131,072 |"
    )
    assert terminal_text(text, width=20).splitlines() == [
        *("- an item of", "  eleven words that", "  does not fit on a", "  line"),
        *fenced.splitlines(),
        *("| a | row of |", "  131,072 |"),
    ]


@pytest.mark.parametrize("indent", [0, 2, 4, 8])
@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal_however_far_it_is_indented(
    indent: int, width: int
) -> None:
    text = f"{' ' * indent}- {' '.join(['131,072 tokens'] * 20)}"
    lines = terminal_text(text, width=width).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == text.strip()


def test_a_word_of_many_thousand_characters_is_broken_at_once() -> None:
    pieces = folded("x" * 100_000, 80)
    assert "".join(pieces) == "x" * 100_000
    assert {len(piece) for piece in pieces} == {80}
