"""Pages: each needs nothing else and can be read by anyone."""

import json
import pickle
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from markup import LARGEST_BYTES, Page
from studies import HOSTILE, QUESTION, hostile_study, real_report, report_of

from highwater import guide, predict, recommend
from highwater.cli.grammar import parse
from highwater.cli.recommend import found_for
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.nouns.capacities import study_capacities
from highwater.nouns.recommendation import Recommendation
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd
from highwater.pages.chooser import chooser_json, places
from highwater.pages.guide import Guide, guide_tables, published_label
from highwater.pages.guide_page import guide_page, guide_rows
from highwater.pages.prediction_tables import recommendation_answer
from highwater.pages.profile import profile_page
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.study_page import study_page
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal
from highwater.trainers.emitted import answered_first
from highwater.trainers.trinity import trinity
from highwater.trainers.verl import verl
from highwater.trials.simulated import SimulatedRunner
from highwater.units import GIB, MIB
from places import DATA, FOUND, question_of
from tables import deep
from tiny_models import written_model
from write_snapshots import MAIN, Program

TABLE = DATA / "published_capacity_a100_80gb.csv"
STUDY = FOUND / "qwen3-0.6b-79gib-full.jsonl"
A_BIG_GUIDE = {
    "predict": ["Qwen3-0.6B", *deep("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B")],
    "gpus": ["1xH20-96GB", "8xH20-96GB", *deep("2xH20-96GB", "4xH20-96GB")],
}
HEADING = "gpu,settings,gpus,sp,model,max_model_len"
ANSWERS = 11
"""Of each model on each number of GPUs, at the least."""
LARGEST_ANSWERS_BYTES = 65_000
"""Of each of these, and one for what a page has besides: 20 of them stay below the 1.5 MB that a
page may be, with room for other trainers' configurations."""
SLOW_S = 8
"""For each of these, five times what it takes here."""


class Embedded:
    """The page's JSON, read as the page reads it."""

    def __init__(self, text: str) -> None:
        document = json.loads(text)
        names = ("fields", "chosen", "values", "places")
        self.fields, self.chosen, self.values, self.places = map(document.get, names)

    def found(self, answer: dict[str, Any]) -> dict[str, Any]:
        facts = {
            name: self.values[index]
            for name, index in zip(self.fields, answer["fields"], strict=True)
        }
        if answer["chosen"] is None:
            return {**facts, "chosen": None}
        chosen = (self.values[index] for index in answer["chosen"])
        return {**facts, "chosen": dict(zip(self.chosen, chosen, strict=True))}

    def read(self, numbered: Any) -> Any:
        """The value of each number, in lists of any depth."""
        if isinstance(numbered, list):
            return [self.read(each) for each in numbered]
        return self.values[numbered]

    def configurations(self, answer: dict[str, Any]) -> dict[str, str]:
        return {
            self.values[name]: "\n".join(self.values[line] for line in lines)
            for name, lines in answer["configurations"]
        }

    def answers(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for place in self.places:
            for answer in place["answers"]:
                yield place, answer


def embedded(made: Guide) -> Embedded:
    return Embedded(chooser_json(places(made)))


def as_typed(words: str) -> Recommendation:
    program, *rest = shlex.split(words)
    assert program == "highwater"
    return found_for(parse(rest))


def assert_says_what_was_found(page: Embedded, answer: Any, found: Recommendation) -> None:
    printed = json.loads(msgspec.json.encode(found))
    del printed["candidates"]
    assert page.found(answer) == printed
    tables = [
        (table.title, table.columns, table.rows, table.footnotes)
        for table in recommendation_tables(found)
    ]
    assert [page.read(parts) for *parts, _ in answer["tables"]] == json.loads(json.dumps(tables))
    assert page.values[answer["said"]] == recommendation_answer(found)
    assert page.values[answer["label"]] == (found.chosen.label if found.chosen else "")


@pytest.mark.corpus
def test_every_answer_of_a_predicted_guide_is_what_recommend_says_of_model_gpus_and_length():
    page = embedded(guide(predict=["Qwen3-0.6B", "Qwen3-32B"], gpus=["2xA100-80GB"]))
    seen = 0
    for place, answer in page.answers():
        where = f"{place['gpus']}x{place['gpu']}"
        assert_says_what_was_found(
            page, answer, recommend(place["model"], gpus=where, length=answer["length"])
        )
        command = f"highwater recommend {place['model']} --gpus {where} --length {answer['length']}"
        assert page.values[answer["command"]] == command
        seen += 1
    assert seen > 20
    answers = [answer for _, answer in page.answers()]
    assert {answer["length"] for answer in answers} >= {4096 << doubled for doubled in range(7)}
    unanswered = [page.found(answer) for answer in answers if answer["chosen"] is None]
    assert any(found["alternatives"] for found in unanswered)


@pytest.mark.corpus
def test_every_answer_of_a_study_is_what_recommend_says_with_that_study():
    page = embedded(guide(STUDY, predict=["Qwen3-0.6B"], gpus=["1xH200-141GB"]))
    sources = set()
    for _, answer in page.answers():
        found = as_typed(page.values[answer["command"]])
        assert_says_what_was_found(page, answer, found)
        sources |= {each.source for each in found.candidates}
    assert sources == {"measured", "predicted"}
    bases = {place["gpu"]: place["basis"].rpartition(": ")[2] for place in page.places}
    (budgeted,) = set(bases) - {"H200-141GB"}
    assert budgeted.endswith(" 79.15 GiB")
    assert bases == {budgeted: "measured, else predicted", "H200-141GB": "predicted"}


def test_settings_that_a_study_had_are_asked_for():
    page = embedded(guide(STUDY.with_name("grpo-0.6b-1.jsonl")))
    measured = 0
    for place, answer in page.answers():
        command = page.values[answer["command"]]
        words = command.split()
        for flag, value in (("strategy", "fsdp"), ("objective", "grpo"), ("entropy", "full")):
            assert words[words.index(f"--{flag}") + 1] == value
        basis = place["basis"]
        assert basis.endswith(": measured, else predicted")
        assert "strategy: fsdp" in basis
        assert "sequences_per_micro_batch: 2" in basis
        found = as_typed(command)
        assert_says_what_was_found(page, answer, found)
        measured += any(each.source == "measured" for each in found.candidates)
    assert measured > 2


def test_the_configuration_is_what_emit_makes_of_the_answer():
    page = embedded(guide(predict=["Llama-3.1-8B"], gpus=["2xA100-80GB"], trainer="trinity"))
    configured = 0
    for _, answer in page.answers():
        found = as_typed(page.values[answer["command"]])
        assert found.trainer == "trinity"
        if found.chosen is not None:
            expected = {
                each.target: answered_first(each, recommendation_answer(found, each.target)).text
                for each in (emit(found, found.chosen) for emit in (trinity, verl))
            }
            assert page.configurations(answer) == expected
            configured += 1
        else:
            assert page.configurations(answer) == {}
    assert configured > 2


def test_the_configuration_of_our_own_trainer_is_the_trial_that_recommend_names_next():
    page = embedded(guide(predict=["Qwen3-8B"], gpus=["4xH20-96GB"]))
    answer = next(answer for _, answer in page.answers() if answer["length"] == 65536)
    found = page.configurations(answer)
    assert list(found) == ["highwater", "torchtitan"]
    layout = ("--gpus", "4", "--ulysses", "1", "--length", "65536")
    settings = ("--allocator", "native", "--loss", "full")
    assert found["highwater"].split() == [*("highwater", "try", "Qwen3-8B", *layout, *settings)]


def test_what_others_published_is_answered_by_their_table_cell_for_cell():
    made = guide(TABLE)
    page, rows = embedded(made), guide_rows(made)
    labels = {(row["model"], row["gpus"], row["max_model_len"]): row["settings"] for row in rows}
    known = {choice.label_in(published_label): choice.label for choice in made.choices}
    for place, answer in page.answers():
        label = labels[place["model"], place["gpus"], answer["length"]]
        chosen = page.found(answer)["chosen"]
        entry = page.values[answer["entries"][0]]
        assert entry.startswith("nothing " if label == "-" else f"{known[label]} (published; ")
        assert (chosen is None) == (label == "-")
        assert answer["command"] == page.values.index("")
        if chosen is not None:
            degree = chosen["cell"]["layout"]["ulysses_degree"]
            assert chosen["source"] == chosen["capacity_source"] == "published"
            assert chosen["headroom_bytes"] is None
            assert chosen["token_budget_tokens"] == -(-2 * answer["length"] // degree)
            settings = chosen["cell"]["settings"]
            assert ("expandable" in entry) == (settings["allocator"] == "expandable")
            assert ("states on host" in entry) == settings["offload"]
            assert ("Ulysses" in entry) == (degree > 1)
            assert (page.found(answer)["yarn"] is not None) == (answer["length"] > 40960)
            assert "published, by others" in page.configurations(answer)["trinity"]
    told = {(place["model"], place["gpus"]) for place in page.places}
    assert told == {(row["model"], row["gpus"]) for row in rows}


def test_where_nothing_published_fits_the_fewest_gpus_that_do_and_the_unknown_are_named(tmp_path):
    path = tmp_path / "t.csv"
    rows = ("vanilla,1,1,Qwen3-8B,4096", "env,1,1,Qwen3-8B,", "vanilla,2,1,Qwen3-8B,8192")
    path.write_text("\n".join((HEADING, *(f"A100-80GB,{row}" for row in rows))))
    (one, two) = places(guide(path))
    assert one.answers[-1].found.chosen is None
    unknown, fewest = one.answers[-1].found.notes
    assert unknown.endswith(": expandable")
    assert fewest.endswith(": nothing set on 2 GPUs, published")
    assert one.answers[0].found.chosen is not None
    assert one.answers[0].found.notes == ()
    assert two.answers[0].found.chosen is not None


def test_the_chooser_opens_with_the_longest_length_that_fits(tmp_path):
    page = embedded(guide(TABLE, STUDY, predict=["Qwen3-8B"], gpus=["4xH200-141GB"]))
    for place in page.places:
        answers = {each["length"]: page.found(each)["chosen"] for each in place["answers"]}
        fitting = {length: each for length, each in answers.items() if each is not None}
        sure = [length for length, each in fitting.items() if each["risk"] in (None, "safe")]
        assert place["longest"] == max(sure or fitting)
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADING}\nA100-80GB,vanilla,1,1,Qwen3-8B,0\n")
    assert [place.longest_tokens for place in places(guide(path))] == [None]
    (tight,) = places(guide(predict=["Qwen3-8B"], gpus=["2xA100-80GB"]))
    sure = predict("Qwen3-8B", gpus="2xA100-80GB").answer.capacity_tokens
    assert tight.longest_tokens == sure
    (refused,) = places(guide(predict=["Llama-3.1-8B"], gpus=["8xH200-141GB"]))
    assert refused.longest_tokens == 131072, "longer ones fit by memory, and recommend refuses them"


def test_a_model_that_no_formula_knows_is_answered_by_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr("highwater.memory.formula.formula.families", dict)
    model = written_model(tmp_path / "odd", model_type="opt", max_position_embeddings=16384)
    measured = {"simulated": False, "device_name": "NVIDIA H200"}
    question = msgspec.structs.replace(question_of(gpus=[1]), model=model, **measured)
    path = tmp_path / "s.jsonl"
    with open_journal(path, question, command=()) as journal:
        runner = SimulatedRunner(lambda spec: spec.length_tokens * GIB // 128)
        list(recorded_search(question, runner, journal))
    (place,) = places(guide(path))
    assert place.basis == "highwater, sft: measured"
    chosen = [each.found.chosen for each in place.answers]
    assert [each and each.label for each in chosen] == ["nothing set, 1 GPU"] * 2 + [None]
    assert {each.command for each in place.answers} == {""}


def test_embedded_text_never_ends_its_script_and_stays_the_same_text():
    hostile = "</script><!--<script>alert(1)</script>&amp;\u2028"
    question = question_of(gpus=[1])
    model = msgspec.structs.replace(question.model, name=hostile, config_digest="none")
    changed = {"model": model, "device_name": hostile, "simulated": False}
    study = Study(question=msgspec.structs.replace(question, **changed), path=hostile)
    made = Guide(tables=guide_tables(study_capacities(study)))
    text = chooser_json(places(made))
    assert not set("<>&\u2028") & set(text)
    assert Embedded(text).found(Embedded(text).places[0]["answers"][0])["model_name"] == hostile
    page = guide_page(made, places(made))
    scripts = re.findall(r"<script|</script", page)
    assert len(scripts) == 4, "the data and the program, each opened and closed once"
    assert "alert(1)</script>" not in page


@pytest.mark.corpus
def test_a_big_guide_is_small_and_made_at_once():
    began = time.process_time()
    made = guide(**A_BIG_GUIDE)
    found = places(made)
    took_s = time.process_time() - began
    count = len(A_BIG_GUIDE["predict"]) * len(A_BIG_GUIDE["gpus"])
    assert len(guide_page(made, found).encode()) < LARGEST_ANSWERS_BYTES * (count + 1)
    assert sum(len(place.answers) for place in found) >= ANSWERS * count
    assert took_s < SLOW_S * count


SNAPSHOTS = sorted((TABLE.parent / "snapshots").glob("*.pickle"))


@cache
def made() -> Guide:
    return guide(TABLE, predict=["Qwen3-0.6B", "Qwen3-8B"], gpus=["4xH200-141GB"])


PAGES = {
    "guide": lambda: guide_page(made()),
    "guide with a chooser": lambda: guide_page(made(), places(made())),
    "study": lambda: study_page(real_report("qwen3-4b-79gib")),
    "profile": lambda: profile_page([memory_profile(path) for path in SNAPSHOTS]),
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
