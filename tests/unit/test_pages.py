"""What holds of every page: it needs nothing else, everybody can read it, and what came from
outside is text on it.
"""

import pickle
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from markup import LARGEST_BYTES, Page
from studies import HOSTILE, QUESTION, hostile_study, real_report, report_of

from highwater import guide
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.nouns.capacities import study_capacities
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd
from highwater.pages.chooser import places
from highwater.pages.guide import Guide, guide_tables
from highwater.pages.guide_page import guide_page
from highwater.pages.profile import profile_page
from highwater.pages.study_page import study_page
from highwater.units import MIB
from write_snapshots import MAIN, Program

DATA = Path(__file__).parents[1] / "data"


@cache
def made() -> Guide:
    table = DATA / "published_capacity_a100_80gb.csv"
    return guide(table, predict=["Qwen3-0.6B", "Qwen3-8B"], gpus=["4xH200-141GB"])


PAGES = {
    "guide": lambda: guide_page(made()),
    "guide with a chooser": lambda: guide_page(made(), places(made())),
    "study": lambda: study_page(real_report("qwen3-4b-79gib")),
    "profile": lambda: profile_page(
        [memory_profile(path) for path in sorted((DATA / "snapshots").glob("*.pickle"))]
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_else(name):
    text = PAGES[name]()
    page = Page(text)
    assert len(text.encode()) < LARGEST_BYTES
    assert "default-src 'none'" in str(page.all("meta"))
    outside = {"link", "img", "iframe", "object", "embed", "base"}
    assert not {tag for tag, _ in page.elements} & outside
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(|src=", text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    if name != "guide with a chooser":  # which has a script, and links to the documents
        assert not page.all("script") + page.all("form")
        assert {str(link["href"]) for link in page.all("a")} <= {f"#{name}" for name in ids}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_with_a_screen_reader_a_keyboard_a_phone_at_night_and_on_paper(name):
    text = PAGES[name]()
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("header")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert all(below - above <= 1 for above, below in pairwise(levels)), "no level is left out"
    assert len(page.all("caption")) == len(page.all("table")) > 0
    assert {heading.get("scope") for heading in page.all("th")} == {"col", "row"}
    named = {str(attributes.get("id")) for attributes in page.all("title")}
    pictures = [each for each in page.all("svg") if each.get("aria-hidden") != "true"]
    assert all(each["role"] == "img" for each in pictures)
    assert {str(each["aria-labelledby"]) for each in pictures} <= named
    scrolled = [each for each in page.all("div") if "scroll" in str(each.get("class"))]
    assert all(each["tabindex"] == "0" and each["aria-label"] for each in scrolled)
    assert "prefers-color-scheme:" in text
    assert "@media print" in text
    (viewport,) = (meta for meta in page.all("meta") if meta.get("name") == "viewport")
    assert "width=device-width" in str(viewport["content"])
    if name == "guide":
        assert all("open" in each for each in page.all("details")), "what is folded is not printed"


def hostile_guide() -> str:
    model = msgspec.structs.replace(QUESTION.model, name=HOSTILE)
    question = msgspec.structs.replace(QUESTION, model=model, device_name=HOSTILE)
    study = Study(question=question, path=HOSTILE)
    return guide_page(Guide(tables=guide_tables(study_capacities(study)), notes=(HOSTILE,)))


def hostile_profile(folder: Path) -> str:
    program = Program()
    program.phase = HOSTILE
    for number in range(4):
        frames = (HOSTILE, 1, HOSTILE), (f"{HOSTILE}/{HOSTILE}.py", 2, HOSTILE), MAIN
        program.allocate((number + 1) * MIB, *frames)
    program.run_out(MIB, 0, (HOSTILE, 1, HOSTILE))
    path = folder / "snapshot_rank00_<script>alert(1)<.pickle"
    path.write_bytes(pickle.dumps(program.snapshot()))
    return profile_page([memory_profile(path)] * 2)


@pytest.mark.parametrize("name", ["guide", "study", "profile"])
def test_text_from_outside_stays_text(name, tmp_path):
    logs = LogEnd(lines=(HOSTILE, "\x1b]0;title\x07"))
    text = {
        "guide": hostile_guide,
        "study": lambda: study_page(report_of(hostile_study(), logs)),
        "profile": lambda: hostile_profile(tmp_path),
    }[name]()
    page = Page(text)
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not [at for _, each in page.elements for at in each if at.startswith("on")]
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert all(str(link["href"]).startswith("#") for link in page.all("a"))
    assert {"c", "b"}.isdisjoint(data for tag, data in page.texts if tag in ("code", "strong"))
    assert "<script>alert(1)</script>" in " ".join(data for _, data in page.texts), "it is there"
    assert "{{ 7 * 7" in text, "templates are not run twice"


def test_only_a_page_loads_the_templates():
    code = "import sys, highwater.cli.documents; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
