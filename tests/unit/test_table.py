"""Tables: what a study says, in a terminal of any width and in a file; every figure whole."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from highwater.nouns.codec import to_json
from highwater.nouns.study import Question, RecordedTrial, Study
from highwater.nouns.trial import MemoryBudget, Outcome, RankReport, TrialResult
from highwater.pages.study_answer import (
    answer_table,
    published_line,
    published_notes,
    published_tables,
    published_text,
    study_answer,
    trial_table,
)
from highwater.pages.table import TextTable, plain_table, terminal_table, terminal_text
from highwater.pages.text import folded, pieces, plain, plain_json, plain_lines
from highwater.units import GIB
from places import question_of
from tables import table
from tiny_models import write_model
from trial_specs import answer_of, rank_that_used

QUESTION = question_of(gpus=[1, 2])


def columns(line: str) -> list[str]:
    """Of one line of a table that is not drawn."""
    return re.split(" {2,}", line.strip())


def published(studies: list[Study]) -> str:
    return "\n\n".join(map(published_text, published_tables(studies)))


def answered(question: Question, *capacities: int | None) -> Study:
    """A study whose cells have these capacities, in order."""
    figures = {"peak_reserved_bytes": 70 * GIB, "headroom_bytes": GIB, "tokens_per_s": 12345.6}
    answers = tuple(
        answer_of(cell, None, None, limit="inconclusive", reason="the worker crashed", **figures)
        if capacity is None
        else answer_of(cell, capacity, capacity + 4096, mfu=0.4321, **figures)
        for cell, capacity in zip(question.cells, capacities, strict=False)
    )
    return Study(question=question, answers=answers)


def test_the_final_table_has_each_figure_once_and_says_how_it_was_got():
    text = plain_table(answer_table(answered(QUESTION, 36864, 51200, 0, None)))
    assert text.splitlines()[0].startswith("Qwen3-0.6B on simulated ")
    rows = [columns(line) for line in text.splitlines()[2:9]]
    assert " ".join(rows[0][:4]) == "settings GPUs Ulysses capacity"
    figures = ["36,864", "40,960: out of memory", "70.00 GiB", "1.00 GiB", "12,346", "43.2%"]
    assert rows[1] == ["nothing set", "1", "1", *figures]
    assert [row[3] for row in rows[1:]] == ["36,864", "51,200*", "none", "?", "?", "?"]
    notes = text.splitlines()[9:]
    assert any(re.fullmatch(r"\* .* 40,960: YaRN", note) for note in notes)
    assert any(note.endswith(": the worker crashed") for note in notes)


def tried(
    question: Question, cell: int, outcomes: dict[int, Outcome | None]
) -> tuple[RecordedTrial, ...]:
    return tuple(
        RecordedTrial(
            spec=question.trial(
                question.cells[cell], length, memory_only=outcome is Outcome.MEMORY_ONLY_FIT
            ),
            result=outcome
            and TrialResult(outcome=outcome, reason="", ranks=(rank_that_used(79 * GIB),)),
        )
        for length, outcome in outcomes.items()
    )


FIT, OUT = Outcome.FIT, Outcome.OUT_OF_MEMORY


def unfinished(question: Question, *cells: dict[int, Outcome | None]) -> Study:
    trials = tuple(
        trial
        for cell, outcomes in enumerate(cells, start=1)
        for trial in tried(question, cell, outcomes)
    )
    return msgspec.structs.replace(answered(question, 36864), trials=trials)


def test_an_unfinished_cell_shows_the_longest_length_that_fit_so_far():
    study = unfinished(
        QUESTION,
        {4096: FIT, 51200: FIT, 61440: OUT, 56320: None},
        {8192: FIT, 12288: OUT},
        {4096: OUT},
    )
    text = plain_table(answer_table(study))
    rows = [columns(line) for line in text.splitlines()[3:9]]
    assert [row[3] for row in rows] == ["36,864", "≥51,200*", "≥8,192", "?", "?", "?"]
    assert ["not finished" in row for row in rows] == [False, True, True, True, False, False]
    assert ["not searched yet" in row for row in rows] == [False] * 4 + [True] * 2
    assert re.search(r"^\* .* 40,960: YaRN$", text, re.MULTILINE)
    assert " fits at 51,200 tokens, and does not at 61,440" in study_answer(study)


def test_an_unfinished_cell_shows_what_fit_with_its_margin_and_what_memory_held():
    greedy = msgspec.structs.replace(QUESTION, margin_bytes=2 * GIB)
    assert "≥" not in plain_table(answer_table(unfinished(greedy, {4096: FIT})))
    by_memory = msgspec.structs.replace(QUESTION, proof="memory", timeout_s=300.0)
    study = unfinished(
        by_memory, {4096: FIT, 8192: Outcome.TIMEOUT, 65536: Outcome.MEMORY_ONLY_FIT}, {4096: FIT}
    )
    one, other = plain_table(answer_table(study)).splitlines()[4:6]
    assert columns(one)[3:5] == ["≥4,096", "≥65,536* memory-only"]
    assert columns(other)[3:5] == ["≥4,096", "-"]


def under(*, length: int = 4096, **report: Any) -> RecordedTrial:
    ranks = (RankReport(rank=0, **report),)
    result = TrialResult(outcome=Outcome.FIT, reason="", ranks=ranks)
    return RecordedTrial(spec=QUESTION.trial(QUESTION.cells[0], length), result=result)


def test_the_division_of_a_memory_budget_is_shown_once_for_each_number_of_gpus():
    study = answered(msgspec.structs.replace(QUESTION, simulated=False), 4096)
    parts = {"context_bytes": GIB, "nccl_bytes": GIB // 2, "allocator_cap_bytes": 157 * GIB // 2}
    budget = MemoryBudget(budget_bytes=80 * GIB, **parts)
    first, second = (under(budget=budget, length=length) for length in (4096, 8192))
    text = plain_table(answer_table(msgspec.structs.replace(study, trials=(first, second))))
    divided = r"80\.00 GiB = 1\.00 GiB .* 512\.0 MiB .* 78\.50 GiB "
    assert len(re.findall(f"^1 GPU: {divided}", text, re.MULTILINE)) == 1
    assert first.result is not None
    assert re.search(divided, plain_table(trial_table(first.spec, first.result)))


def test_a_study_resumed_under_other_versions_says_so_and_one_under_the_same_does_not():
    def notes(*versions: str) -> tuple[str, ...]:
        trials = tuple(under(versions={"torch": each, "cuda": "13.0"}) for each in versions)
        study = msgspec.structs.replace(answered(QUESTION, 4096), trials=trials)
        return answer_table(study).footnotes

    assert any(note.endswith(": torch A and B") for note in notes("A", "B", "A"))
    assert not [note for note in notes("A", "A") if "version" in note]


def test_the_published_layout_has_a_table_for_each_rung():
    vanilla, env, chunked = published([answered(QUESTION, 36864, 51200, 0, None)]).split("\n\n")
    rows = [re.split(" *\\| *", line) for line in vanilla.splitlines()[1:]]
    assert rows == [["#GPU", "SP", "Qwen3-0.6B"], ["1", "1", "36864"]], "no line without a figure"
    assert env.splitlines()[2] == "1    | 1  | 51200*", "its columns line up"
    assert chunked.splitlines()[2] == "1    | 1  | -"
    assert all("simulated" in table.splitlines()[0] for table in (vanilla, env, chunked))


def test_the_published_line_is_the_one_that_scripts_parse():
    study = answered(QUESTION, 40960)
    line = published_line(QUESTION, QUESTION.cells[0], study.answers[0])
    assert line == "model_name = Qwen3-0.6B, trainer_gpu_num = 1, sp_num = 1, max_model_len = 40960"
    assert published_line(QUESTION, QUESTION.cells[1], None) is None
    (note,) = published_notes(QUESTION, QUESTION.cells[1], None)
    assert QUESTION.cells[1].label in note


@given(st.text())
def test_plain_text_and_json_hold_nothing_that_a_terminal_acts_upon(text):
    assert not set("\n\r\t\x1b\x07\x9b\u202e\u200b") & set(plain(text))
    assert plain(plain(text)) == plain(text)
    shown = plain_json(to_json({"text": text}, indent=2))
    assert json.loads(shown) == {"text": text}
    assert plain_lines(shown) == shown


@pytest.mark.parametrize("text", ["Qwen3-0.6B", "模型", "naïve – 80×", "[red]"])
def test_plain_text_is_left_as_it_is(text):
    assert plain(text) == text


def test_a_models_name_is_data_to_every_renderer(tmp_path):
    model = write_model(tmp_path / "evil[red]\x1b[31m\r\x1b]0;title\x07")
    study = answered(question_of(model=str(model)), 4096)
    (answer,), table = study.answers, answer_table(study)
    line = published_line(study.question, answer.cell, answer) or ""
    notes = published_notes(study.question, answer.cell, None)
    drawn = (plain_table(table), terminal_table(table, width=200))
    for text in (*drawn, published([study]), line, *notes):
        assert "evil[red]\\x1b[31m\\r\\x1b]0;title\\x07" in text
        assert not [each for each in ("\x1b]", "\x1b[31m", "\r") if each in text]


def test_what_a_trial_said_is_data_too():
    study = answered(QUESTION, 4096)
    words = {"reason": "[bold]boom[/bold]\x1b[2J", "contradictions": ("[link=x]\x9b",)}
    said = msgspec.structs.replace(study.answers[0], **words)
    real = msgspec.structs.replace(QUESTION, simulated=False)
    text = plain_table(answer_table(msgspec.structs.replace(study, question=real, answers=(said,))))
    assert "[bold]boom[/bold]\\x1b[2J" in text
    assert ": [link=x]\\x9b" in text


WIDTHS = st.integers(20, 240)
FIGURES = st.one_of(
    st.integers(0, 9_999_999).map("{:,}".format),
    st.integers(0, 9_999_999).map("{:,}*".format),
    st.floats(0, 9999).map("{:.2f} GiB".format),
    st.integers(61, 3599).map(lambda s: f"{s // 60}m {s % 60:02d}s"),
    st.just("-"),
)
"""At most 11 characters: no line is too short for one."""
WORDS = ["an", "exchange", "in", "every", "layer,", "Env", "+", "chunked", "131,072", "2.00 GiB"]
NAMES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
SOME = ["rung", "SP", "capacity", "ended by", "predicted GPU memory", "headroom, at least", ""]
HEADINGS = st.sampled_from(SOME)


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
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
    columns = zip(table.columns, *table.rows, strict=True)
    filled = [text for column in columns if any(column[1:]) for text in column]
    for text in (table.title, *table.footnotes, *filled):
        assert words(text.replace(",", "")) <= {word.replace(",", "") for word in shown}, text
        assert set(re.findall(r"[\d,.]*\d", text)) <= set(re.findall(r"[\d,.]*\d", drawn))


@given(tables(), WIDTHS)
def test_no_figure_stands_there_that_the_table_has_not(table, width):
    rows = [" ".join(row) for row in table.rows]
    theirs = " ".join((table.title, *table.footnotes, *table.columns, *rows))
    drawn = terminal_table(table, width=width)
    assert set(re.findall(r"[\d,.]*\d", drawn)) <= set(re.findall(r"[\d,.]*\d", theirs))


@given(st.lists(st.tuples(NAMES.filter(bool), NAMES), min_size=1), WIDTHS)
def test_names_and_what_they_say_stay_within_any_width(rows, width):
    table = TextTable(title="t", columns=(), rows=tuple(rows), left_columns=2)
    drawn = terminal_table(table, width=width)
    assert max(map(len, drawn.splitlines())) <= width
    assert all(words(name) | words(value) <= words(drawn) for name, value in rows)


FIRST = ("vanilla", "1", "4", "69,632", "73,728: GPU memory", "73.24 GiB to 79.15 GiB", "loss")
LAST = ("Env + Offload + chunked", "4", "4", "131,072", "the longest length in question")
LADDER = TextTable(
    title="capacities",
    columns=("rung", "SP", "GPUs", "capacity", "ended by", "predicted GPU memory", "peak in"),
    rows=(FIRST, (*LAST, "21.89 GiB to 22.75 GiB", "a layer")),
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
    bare = TextTable(title="", columns=("", "works"), rows=(("a name " * 5, "a sentence " * 9),))
    assert "--" not in terminal_table(bare, width=40)


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


def place_of(piece: str, lines: list[str]) -> tuple[int, int]:
    word = re.compile(rf"(?<!\S){re.escape(piece)}(?!\S)")
    found = [(at, match.start()) for at, line in enumerate(lines) for match in word.finditer(line)]
    (place,) = found
    return place


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

    def heading(column: int) -> str:
        return " ".join(f"c{column}w{word}" for word in range(draw(st.integers(1, 3))))

    headings, left = tuple(map(heading, range(columns))), draw(st.integers(0, columns))
    count = draw(st.integers(1, 5))
    rows = tuple(tuple(cell(row, column) for column in range(columns)) for row in range(count))
    return TextTable(title="t", columns=headings, rows=rows, left_columns=left)


@given(tables_of_distinct_words(), st.integers(40, 200))
def test_every_cell_is_whole_in_reading_order_and_no_row_runs_into_the_next(table, width):
    lines = terminal_table(table, width=width).splitlines()
    assert max(map(len, lines)) <= width
    rule = next(index for index, line in enumerate(lines) if line and set(line) <= {"-", " "})
    end_of_row = rule
    for row in table.rows:
        places: list[int] = []
        for cell in row:
            order = [place_of(piece, lines) for piece in pieces(cell)]
            assert order == sorted(order), "reading order"
            lines_of_cell = [line for line, _ in order]
            assert set(lines_of_cell) == set(range(lines_of_cell[0], lines_of_cell[-1] + 1))
            places += lines_of_cell
        assert min(places) > end_of_row
        first = lines[min(places)].lstrip()
        assert first.startswith(pieces(row[0])[0]), "a row begins with its name"
        end_of_row = max(places)
    for heading in table.columns:
        assert words(heading) <= words(" ".join(lines))


@pytest.mark.parametrize(("text", "lines"), table("terminal_table", "lines_break_between_words"))
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
    lines = ("| found in | figures | cells |", "| --- | --- | ---: |")
    text = "\n".join((*lines, "| predict Qwen3-8B | predicted, nothing was run | 15\\* |"))
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
