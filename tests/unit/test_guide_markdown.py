"""What the guide's Markdown makes of long tables, of several files about one cell, and of many
sources.
"""

from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markup import markdown_rows

from highwater import guide
from highwater.pages.guide import guide_page as guide_parts
from highwater.pages.guide.guide_page import guide_markdown, guide_rows
from highwater.pages.text import escaped, markdown_list

DATA = Path(__file__).parents[1] / "data"
FOUND = Path(__file__).parents[2] / "docs" / "results" / "find"
LONG = FOUND / "long-0.6b-79gib.jsonl"


def test_rows_of_a_long_table_that_say_the_same_are_joined_and_none_is_lost():
    (table,) = guide(LONG, FOUND / "qwen3-0.6b-79gib-full.jsonl").tables
    rows = guide_parts.choice_table(table).rows
    joined = guide_parts.joined(guide_parts.choice_table(table)).rows
    lengths = [row[0] for row in rows]
    told = {}
    for row in joined:
        first, _, last = row[0].partition(" – ")
        told |= dict.fromkeys(
            lengths[lengths.index(first) : lengths.index(last or first) + 1], row[1:]
        )
    assert len(rows) > 60
    assert len(joined) < 10
    assert [(name, *told[name]) for name in lengths] == list(rows)


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_files_about_a_cell_those_that_add_nothing_are_left_out(order):
    sources = [FOUND / name for name in ("edge-0.6b-1-full.jsonl", "qwen3-0.6b-79gib-full.jsonl")][
        ::order
    ]
    page = guide_markdown(guide(*sources)).partition("## Capacities")[2]
    env = page.partition("**Env (")[2]
    told = ["1", "1", r"196,608\*"]
    assert told in markdown_rows(env), "the other is not finished, at no longer length"


def test_how_far_each_model_gets_is_told_at_a_glance():
    made = guide(DATA / "published_capacity_a100_80gb.csv", LONG)
    published, measured = guide_parts.glance_tables(made)
    assert published.rows[0] == ("1", "28,672", "28,672", "28,672", "24,576", "24,576")
    for table in made.tables:
        at_a_glance = (
            next(row for row in published.rows if row[0] == str(table.gpus))
            if table.source == "published"
            else measured.rows[0]
        )
        reached = "; ".join(
            f"{name} {figure.replace('*', '')}"
            for name, figure in zip(table.models, at_a_glance[1:], strict=True)
        )
        assert guide_parts.summary(table).endswith(f" {table.source}: {reached}")
    assert [row[0] for row in published.rows] == ["1", "2", "4", "6"]
    ((gpus, reached),) = measured.rows
    assert (gpus, *reached.split()) == ("1", "131,072*,", "671,744*", "memory-only")
    opening = guide_markdown(made).partition("## How to read it")[0]
    assert ["1", reached.replace("*", r"\*")] in markdown_rows(opening)


def test_what_alone_was_tried_is_said_where_nothing_simpler_was(tmp_path):
    made = guide(
        FOUND / "edge-4b-2-full-native.jsonl",
        FOUND / "edge-4b-2-full.jsonl",
        FOUND / "qwen3-0.6b-79gib-full.jsonl",
    )
    one, two = sorted(made.tables, key=lambda table: table.gpus)
    said = guide_parts.only_tried(two)
    assert guide_parts.only_tried(one) == ""
    assert ": Qwen3-4B: SP=2, Env + SP=2. " in said
    assert guide_markdown(made).count(said) == 1
    assert all(
        "Tried" not in str(row["settings"]) and "?" not in str(row["settings"])
        for row in guide_rows(made)
        if row["max_model_len"] == 4096
    )
    assert "Tried here" not in guide_markdown(guide(DATA / "published_capacity_a100_80gb.csv"))
    path = tmp_path / "t.csv"
    rows = ("vanilla,2,1,Qwen3-8B,4096", "env,2,2,Qwen3-4B,8192", "env,2,2,Qwen3-14B,4096")
    path.write_text(
        "\n".join(
            ("gpu,settings,gpus,sp,model,max_model_len", *(f"A100-80GB,{row}" for row in rows))
        )
    )
    said = guide_parts.only_tried(guide(path).tables[0])
    assert "Qwen3-4B, Qwen3-14B: Env" in said


def test_text_from_outside_begins_no_heading_and_no_list():
    page = MarkdownIt().render(markdown_list(map(escaped, ("# a", "- b", "+ c", "#d"))))
    assert (page.count("<ul>"), page.count("<li>"), page.count("<h1>")) == (1, 4, 0)
    assert escaped("-") == "-", "nothing fits, in a table"
