"""One word for each setting: no page, help or table says another. The words of the published guides
are left to ``--as published``, ``search_context_length_capacity`` and ``settings`` of
``guide --json``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from highwater import guide, open_study, predict, study_report, write_guide, write_report
from highwater.cli.grammar import commands
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.nouns.attention_bench import AttentionBench
from highwater.nouns.codec import from_builtins, to_json
from highwater.pages.attention import attention_markdown
from highwater.pages.profile import profile_page
from highwater.pages.study_answer import published_tables
from places import DATA, FOUND, RESULTS, ROOT
from setting_words import other_words
from tables import table

TABLE = DATA / "published_capacity_a100_80gb.csv"
BENCHES = RESULTS / "attention"
PROFILED = DATA / "snapshots" / "trainer_out_of_memory.pickle"
MODEL = "Qwen3-0.6B"
QUESTIONS, DOCUMENTS = table("words", "questions"), table("words", "documents")
GUIDES = {
    "published": [TABLE],
    "measured": [FOUND / "grpo-0.6b-1-offload.jsonl", FOUND / "edge-4b-2-full-native.jsonl"],
}
PREDICTED: dict[str, dict[str, Any]] = {
    "predicted": {"model": "Qwen3-8B", "gpus": "4xA100-80GB", "ring": [1, 2]},
    "lora": {"model": MODEL, "gpus": "2xA100-80GB", "lora": 16},
}
REPORTED = ("edge-4b-2-full-native.jsonl", "grpo-0.6b-1-offload.jsonl", "qwen3-4b-79gib.jsonl")


def ours(command: str, text: str) -> str:
    """What we say: of another trainer's configuration the comments."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if command != "emit" or line.startswith("#"))


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    for name, asked in PREDICTED.items():
        (folder / f"{name}.json").write_text(to_json(predict(**asked)))
    for name, sources in {**GUIDES, **{n: [folder / f"{n}.json"] for n in PREDICTED}}.items():
        made = guide(*sources)
        for end in ("html", "md"):
            yield f"guide: {name}.{end}", write_guide(folder / f"{name}.{end}", made).read_text()
    for name in REPORTED:
        report = study_report(FOUND / name)
        for end in ("html", "md"):
            path = folder / f"{name}.{end}"
            yield f"report: {path.name}", write_report(path, report).read_text()
    profiles = [memory_profile(str(path)) for path in sorted(PROFILED.parent.glob("*.pickle"))[:2]]
    yield "profile", profile_page(profiles[:1])
    yield "profile, side by side", profile_page(profiles)
    for path in sorted(BENCHES.rglob("attention.json")):
        yield f"bench attention: {path.parent.name}", attention_markdown(recorded_bench(path))


def recorded_bench(path: Path) -> AttentionBench:
    """A benchmark from a file, which an earlier version may have written."""
    document = json.loads(path.read_text())
    document = {name: document[name] for name in AttentionBench.__struct_fields__}
    for row in document["rows"]:
        row.pop("kept_for_backward_bytes", None)
    return from_builtins(document, AttentionBench)


@pytest.mark.parametrize("name", commands())
def test_a_help_has_one_word_for_each_setting(highwater, name):
    for flag in ("--help", "--help-all"):
        done = highwater(name, flag)
        assert done.returncode == 0 or flag == "--help-all"
        assert other_words(done.stdout) == {}


@pytest.mark.parametrize("command", QUESTIONS)
def test_an_answer_has_one_word_for_each_setting(highwater, command):
    words = [str(ROOT / word) if "/" in word else word for word in command.split()]
    done = highwater(*words)
    assert done.stdout, done.stderr
    assert (other_words(ours(words[0], done.stdout)), other_words(done.stderr)) == ({}, {})


def test_a_page_has_one_word_for_each_setting(tmp_path):
    found = dict(pages(tmp_path))
    others = {name: other_words(text) for name, text in found.items()}
    assert {name: words for name, words in others.items() if words} == {}
    said = "\n".join(found.values())
    wanted = ("nothing set", "expandable", "chunked loss", "states on host", "Ulysses", "ring")
    assert [word for word in wanted if word not in said] == [], "the word itself is said"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_and_a_picture_have_one_word_for_each_setting(name):
    assert other_words((ROOT / name).read_text()) == {}


def test_the_published_words_are_where_the_published_guides_are_meant(run: Run):
    done = run("highwater", "guide", str(TABLE), "--json")
    said = {row["settings"] for row in json.loads(done.stdout)}
    assert {"vanilla", "Env", "SP=2", "Env + Offload + SP=4"} <= said
    tables = published_tables([open_study(FOUND / "edge-4b-2-full-native.jsonl")])
    assert tables[0].columns[:2] == ("#GPU", "SP")
    assert [table.title.partition(" (")[0] for table in tables] == ["vanilla"]
