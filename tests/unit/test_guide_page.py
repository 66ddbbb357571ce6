"""The guide as an HTML page: complete, accessible, and alone in the world."""

import re
from pathlib import Path

import pytest
from markup import Page

from highwater import guide, write_guide
from highwater.pages.guide.answers import places
from highwater.pages.guide.guide import Guide
from highwater.pages.guide.guide_page import guide_markdown, guide_page, guide_rows

TABLE = Path(__file__).parents[1] / "data" / "published_capacity_a100_80gb.csv"
STUDIES = Path(__file__).parents[2] / "docs" / "results" / "find"


@pytest.fixture(scope="module")
def made() -> Guide:
    return guide(TABLE, predict=["Qwen3-0.6B", "Qwen3-8B"], gpus=["4xH200-141GB"])


def test_a_page_has_every_row_of_the_guide(made):
    seen: list[tuple[int, str, list[str]]] = []
    rows = iter(Page(guide_page(made)).rows)
    for table in made.tables:
        heading = next(row for row in rows if row[0] == "max_model_len")
        assert heading[1:] == list(table.models)
        for tokens, choices in table.rows:
            length, *cells = next(rows)
            seen.append((table.gpus, length, cells))
            assert length == f"{tokens:,}"
            assert [cell.removesuffix(" ?") for cell in cells] == [
                choice.label for choice in choices
            ]
    assert not any(row[0] == "max_model_len" for row in rows)
    assert (2, "16,384", ["vanilla", "vanilla", "Env", "Env + Offload", "Env + Offload"]) in seen


def test_the_longest_bar_is_the_longest_length(made):
    text = guide_page(guide(TABLE))
    assert '<td class="figure">122,880*</td>' in text
    (bar,) = re.findall(r"<span>4 GPUs, [^:]*: 122,880</span><span class=.bar.>(.*?)</span>", text)
    assert 'style="width:100.0%"' in bar


def test_a_bar_shows_what_memory_holds_beside_what_was_trained_in_full():
    text = guide_page(
        guide(STUDIES / "long-0.6b-79gib.jsonl", STUDIES / "qwen3-0.6b-79gib-chunked.jsonl")
    )
    trained = round(262144 / 671744 * 100, 1)
    bar = (
        f'<span style="width:{trained}%"></span><span class="memory-only" '
        f'style="width:{round(100 - trained, 1)}%"></span>'
    )
    said = "Qwen3-0.6B: 262,144, 671,744 memory-only"
    drawn = f'<span>1 GPU, {said}</span><span class="bar">{bar}</span>'
    assert drawn in text
    (summary,) = re.findall("<summary>(.* memory-only)</summary>", text)
    assert summary.endswith(f", measured: {said.replace(': ', ' ')}")


def test_a_page_opens_with_the_longest_length_and_its_contents_come_later(made):
    found_places = places(made)
    first, text = found_places[0], guide_page(made, found_places)
    assert first.longest_tokens is not None
    page = Page(text)
    assert f"{first.model_name} trains {first.longest_tokens:,} tokens" in page.text("p")
    order = ['id="choose-length"', 'id="answer-said"', 'aria-label="Contents"']
    found = [text.index(each) for each in (*order, 'id="words"', "<table")]
    assert found == sorted(found)


def test_speed_is_predicted_for_our_own_trainer_and_labelled_so(made):
    rows = [row for row in guide_rows(made) if row["tokens_per_s"]]
    assert {(row["speed_source"], row["source"]) for row in rows} == {("predicted", "predicted")}
    trained = [row for row in guide_rows(made) if row["source"] == "predicted"]
    assert all((row["settings"] in "-?") == (row["tokens_per_s"] is None) for row in trained)
    last = [row for row in rows if row["model"] == "Qwen3-8B"][-1]
    shown = f"{last['tokens_per_s']:,.0f} at {last['max_model_len']:,}: "
    text = guide_page(made, places(made))
    assert f'<td class="figure">{shown}' in text.replace("figure ", "figure")
    assert shown in guide_markdown(made)
    assert "Tokens a second, predicted" in Page(text).text("caption")


def test_the_name_of_the_file_says_whether_it_is_a_page(made, tmp_path):
    assert write_guide(tmp_path / "guide.html", made).read_text().startswith("<!doctype html>")
    assert write_guide(tmp_path / "guide.md", made).read_text().startswith("# ")
