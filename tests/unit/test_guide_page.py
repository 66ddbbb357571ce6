"""The guide as an HTML page: complete, accessible, and alone in the world."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from markup import LARGEST_BYTES, Page

from highwater import guide, write_guide
from highwater.nouns.capacities import study_capacities
from highwater.nouns.study import Study
from highwater.pages.guide.chooser import places
from highwater.pages.guide.guide import Guide, guide_tables
from highwater.pages.guide.guide_page import guide_markdown, guide_page, guide_rows
from places import question_of

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


def test_the_caption_of_a_table_says_what_it_is_and_the_summary_how_far_it_goes(made):
    text = guide_page(made)
    captions = set(re.findall(r"<caption>(.*?)</caption>", text))
    assert any(caption.endswith(", 1 GPU, published") for caption in captions)
    assert not captions & set(re.findall(r"<summary>(.*?)</summary>", text))


def test_a_page_needs_nothing_else_and_is_small(made):
    text = guide_page(made)
    assert len(text.encode()) < LARGEST_BYTES
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)
    chosen = guide_page(made, places(made))
    assert not re.search(
        r"https?://(?!docs\.)|src=|<link|<img|@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(",
        chosen,
    )
    page = Page(text)
    assert all(str(link["href"]).startswith("#") for link in page.all("a"))
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert all(str(link["href"])[1:] in ids for link in page.all("a"))
    assert "default-src 'none'" in str(page.all("meta"))


def test_a_page_is_readable_with_a_screen_reader_a_keyboard_a_phone_at_night_and_on_paper(made):
    text = guide_page(made)
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    assert (
        len(page.all("h1"))
        == len(page.all("main"))
        == len(page.all("title")) - len(page.all("svg"))
        == 1
    )
    assert len(page.all("caption")) == len(page.all("table")) > len(made.tables)
    assert {heading.get("scope") for heading in page.all("th")} == {"col", "row"}
    assert all(image["role"] == "img" and image["aria-labelledby"] for image in page.all("svg"))
    scrolled = [a for a in page.all("div") if a.get("class") == "scroll"]
    assert len(scrolled) == len(page.all("table")) + len(page.all("svg"))
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in scrolled)
    (viewport,) = (meta for meta in page.all("meta") if meta.get("name") == "viewport")
    assert "width=device-width" in str(viewport["content"])
    assert "prefers-color-scheme:" in text
    assert "@media print" in text
    assert all("open" in details for details in page.all("details")), (
        "what is folded is not printed"
    )


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


def test_no_folder_of_this_machine_is_on_a_page(tmp_path, monkeypatch):
    table = tmp_path / "home" / "kept" / "known.csv"
    table.parent.mkdir(parents=True)
    table.write_text(TABLE.read_text())
    made = guide(table, STUDIES / "qwen3-0.6b-card-full.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(STUDIES)
    text = guide_page(made, places(made))
    assert str(tmp_path) not in text
    assert str(STUDIES) not in text
    assert "~/kept/known.csv" in text
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/")
    elsewhere = guide_page(made, places(made))
    assert str(tmp_path) not in elsewhere
    assert "…/kept/known.csv" in elsewhere


def test_text_from_outside_stays_text():
    hostile = "\"><script>alert(1)</script>{{ 7 * 7 }}'\x1b[31m`c`**b**"
    question = question_of(gpus=[1])
    model = msgspec.structs.replace(question.model, name=hostile)
    study = Study(
        question=msgspec.structs.replace(question, model=model, device_name=hostile), path=hostile
    )
    text = guide_page(Guide(tables=guide_tables(study_capacities(study)), notes=(hostile,)))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "49" not in re.findall(r"\{\{.*?\}\}|49", text)
    assert "<code>c</code>" not in text
    assert "<strong>b</strong>" not in text
    assert Page(text).all("h1")


def test_the_name_of_the_file_says_whether_it_is_a_page(made, tmp_path):
    assert write_guide(tmp_path / "guide.html", made).read_text().startswith("<!doctype html>")
    assert write_guide(tmp_path / "guide.md", made).read_text().startswith("# ")


def test_only_a_page_loads_the_templates():
    code = "import sys, highwater.cli.documents; print('jinja2' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
