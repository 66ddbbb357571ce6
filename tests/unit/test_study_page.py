"""The report of a study as a page, Markdown, CSV and JSON: complete, accessible and safe."""

import csv
import io
import json
import re

import msgspec
import pytest
from markdown_it import MarkdownIt
from markup import LARGEST_BYTES, Page
from studies import (
    CELL,
    HOSTILE,
    QUESTION,
    REAL,
    hostile_study,
    real_report,
    report_of,
    study_of,
    trial,
)

from highwater import study_report, write_report
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.memory.snapshot.memory_profile import ADVICE
from highwater.nouns.codec import from_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import STUDY_SCHEMA_VERSION, Expectation, RecordedTrial
from highwater.nouns.trial import AliveMemory, Failure, LogEnd, Outcome, RankReport, TrialResult
from highwater.pages.chart import bracket_chart, memory_picture
from highwater.pages.page import without_folders
from highwater.pages.study_answer import answer_table, study_answer, trial_table
from highwater.pages.study_commands import alive_rows, request_line, setting_of
from highwater.pages.study_page import (
    COLUMNS,
    memory_table,
    predicted_cells,
    question_table,
    study_csv,
    study_markdown,
    study_page,
)
from highwater.units import GIB
from places import ROOT, question_of
from tables import table
from trial_specs import answer_of

HEADINGS = [
    *("Answers", "Memory at the peak", "What did not fit, or failed", "How brackets closed"),
    *("Trials", "Predicted, and what trials showed", "Do it again", "What was asked"),
    *("Where it ran", "Notes"),
]
OUTCOMES = (
    *(Outcome.FIT, Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.TIMEOUT),
    *(Outcome.CRASHED, None),
)


@pytest.mark.corpus
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_page_of_a_real_study_has_every_trial_and_every_section(path):
    report = study_report(path)
    text = study_page(report)
    page = Page(text)
    headings = [text for text in HEADINGS if text != "Notes" or report.study.notes]
    assert [data.strip() for tag, data in page.texts if tag == "h2"] == headings
    firsts = page.text("th").split().count("1")
    assert firsts >= 3, "the first trial, in the tables of trials, memory and predictions"
    for reported in report.trials:
        assert f"{reported.length_tokens:,}" in page.text("td")
    for command in report.commands:
        assert command.text in page.text("pre")
    assert len(text.encode()) < LARGEST_BYTES / 5


def test_a_picture_shows_each_outcome_by_a_shape_of_its_own():
    ends = enumerate(OUTCOMES, 1)
    trials = (trial(4096 * i, outcome, used_bytes=(9 + i) * GIB) for i, outcome in ends)
    report = report_of(study_of(*trials, trial(28672, Outcome.MEMORY_ONLY_FIT)))
    picture = bracket_chart(report.cells[0], report)
    shapes = [mark.kind for mark in picture.marks]
    assert len(shapes) == len(set(shapes)) == 7
    assert "out of memory" in picture.marks[1].text
    heights = [mark.y for mark in picture.marks]
    assert heights == sorted(heights, reverse=True), "the longer, the higher"
    text = study_page(report)
    assert all(text.count(f"<{shape}") > 1 for shape in ("circle", "path"))
    assert ">?</text>" in text


def test_the_band_of_a_picture_is_the_bracket():
    report = real_report("qwen3-4b-card-full")
    picture = bracket_chart(report.cells[0], report)
    last = picture.spans[-1]
    by_trial = {mark.text.partition(",")[0]: mark.y for mark in picture.marks}
    assert last.y == by_trial["trial 5"], "139,264 did not fit"
    assert last.y + last.height == pytest.approx(by_trial["trial 4"]), "131,072 did"
    areas = [span.height for span in picture.spans]
    assert areas == sorted(areas, reverse=True), "it only closes"


def test_a_picture_of_memory_draws_the_limit_and_of_many_trials_only_the_edges():
    report = real_report("qwen3-0.6b-79gib-full")
    picture = memory_picture(report)
    for row in picture.rows:
        assert row.limit is not None
        assert row.allocated <= row.reserved <= row.used <= row.limit
    assert [row.measured is None for row in picture.rows] == [row.ran_out for row in picture.rows]
    asked = [row for row in picture.rows if row.asked is not None]
    assert len(asked) == sum(row.ran_out for row in picture.rows) > 0
    for row in asked:
        assert row.asked > row.limit, "the request that had no room ends beyond the limit"
        assert ", no room for " in row.text
    assert study_page(report).count('class="asked"') > len(asked), "and in the legend"
    ends = [Outcome.FIT] * 29 + [Outcome.OUT_OF_MEMORY] * 2
    many = (trial(4096 * i, end, used_bytes=i * GIB) for i, end in enumerate(ends, 1))
    short = memory_picture(report_of(study_of(*many)))
    assert (len(short.rows), short.left_out) == (2, 29)
    assert memory_picture(report_of(study_of(trial(8192, None)))) is None


def test_a_page_opens_with_the_commands_sentence_and_names_no_folder():
    report = real_report("qwen3-4b-79gib")
    text = study_page(report)
    assert study_answer(report.study) in Page(text).text("p")
    order = ['id="answer-said"', 'aria-label="Contents"', 'id="question"']
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    text = 'File "/home/somebody/venv/lib/torch/nn/linear.py", line 1; see https://a.org/b/c'
    log = LogEnd(lines=("cd /mnt/share/people/me && ls /dev/shm/x",))
    page = study_page(report_of(study_of(trial(8192, Outcome.CRASHED, text=text)), log))
    assert not [each for each in ("/home/somebody", "/mnt/share") if each in page]
    for each in ("…/nn/linear.py", "https://a.org/b/c", "…/people/me", "/dev/shm/x"):
        assert each in page


def test_text_from_outside_stays_text_in_markdown():
    def columns(text: str) -> set[int]:
        html = MarkdownIt("commonmark").enable("table").render(text)
        rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
        return {len(re.findall(r"<t[dh]", row)) for row in rows}

    lines = (HOSTILE, "```", "# a heading", "<script>alert(4)</script>")
    text = study_markdown(report_of(hostile_study(), LogEnd(lines=lines)))
    assert not {"\x1b", "\u202e"} & set(text)
    page = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert not {tag for tag, _ in page.elements} & {"script", "img", "a", "em"}
    assert [data for tag, data in page.texts if tag in ("h1", "h2")][1:] == HEADINGS
    assert "b" not in [data for tag, data in page.texts if tag == "strong"]
    assert columns(text) == columns(study_markdown(real_report("qwen3-0.6b-79gib-full")))


def test_a_csv_has_a_row_for_each_trial_and_where_memory_ran_out_no_headroom():
    report = real_report("qwen3-4b-79gib")
    rows = list(csv.DictReader(io.StringIO(study_csv(report))))
    lengths = [trial.length_tokens for trial in report.trials]
    assert [int(row["length_tokens"]) for row in rows] == lengths
    assert tuple(rows[0]) == COLUMNS
    assert {row["source"] for row in rows} == {"measured"}
    assert {row["outcome"] for row in rows} >= {"OUT_OF_MEMORY", "FIT"}
    table = memory_table(report)
    shown = [row[table.columns.index("headroom")] for row in table.rows]
    for row, figure, reported in zip(rows, shown, report.trials, strict=True):
        assert int(row["predicted_low_bytes"]) == reported.predicted.interval.low_bytes
        assert row["outcome"] == str(reported.outcome)
        is_fit = reported.outcome is not None and reported.outcome.is_fit
        known = (row["headroom_bytes"] != "", figure != "-", reported.headroom_bytes is not None)
        assert known == (is_fit,) * 3


@pytest.mark.parametrize("beginning", ["=", "+", "-", "@", " =", "\t=", "＝"])
def test_a_cell_of_a_csv_that_begins_like_a_formula_is_text(beginning):
    danger = f'{beginning}HYPERLINK("http://evil","x")'
    model = msgspec.structs.replace(QUESTION.model, name=danger)
    question = msgspec.structs.replace(QUESTION, model=model, device_name=danger)
    study = study_of(trial(8192, Outcome.CRASHED, text=danger), question=question)
    rows = list(csv.DictReader(io.StringIO(study_csv(report_of(study)))))
    assert all(rows[0][name].startswith(("'", "\\t")) for name in ("model", "device", "reason"))
    assert all(not cell.lstrip().startswith(("=", "+", "@", "＝")) for cell in rows[0].values())


def test_the_name_of_the_file_says_the_form_and_a_file_that_is_there_is_left_alone(tmp_path):
    report = real_report("edge-4b-1-full")
    begin = {"r.html": "<!doctype html>", "r.md": "# Qwen3-4B", "r.csv": "model,device,"}
    for name, beginning in (begin | {"r.json": "{"}).items():
        assert write_report(tmp_path / name, report).read_text().startswith(beginning)
        with pytest.raises(UsageError, match="is there already"):
            write_report(tmp_path / name, report)
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["schema_version"], len(document["trials"])) == (1, len(report.trials))
    with pytest.raises(UsageError, match=r"\.html, \.md, \.csv, \.json"):
        write_report(tmp_path / "r.pdf", report)
    assert not (tmp_path / "r.pdf").exists()


@pytest.mark.parametrize(
    ("text", "shown"), table("study_page", "a_path_names_no_folder_of_this_machine")
)
def test_a_path_names_no_folder_of_this_machine(text, shown, tmp_path, monkeypatch):
    here, home = tmp_path / "home" / "me" / "here", tmp_path / "home" / "me"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    found = without_folders(text.format(here=here, home=home) if "{" in text else text)
    assert found == (text if shown is None else shown)
    assert without_folders(found) == found, "what is short stays as it is"


BUDGETED = question_of(token_budget="16k").cells


NO_MEMORY = {"device": "cpu", "memory_budget_bytes": None, "device_total_bytes": None}


def ordered_by(**changes: object) -> str:
    return dict(question_table(study_report(study_of(**changes))).rows)["ordered by"]


def told(prediction: str, likely_tokens: int = 4096) -> Expectation:
    return Expectation(cell=CELL, likely_tokens=likely_tokens, prediction=prediction)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the formula"),
        ({"method": "linear"}, "its method: "),
        ({"cells": BUDGETED}, "its token budget, "),
        ({"cells": BUDGETED, "method": "linear"}, "its method: "),
        ({"cells": BUDGETED, "device": "cpu"}, "its token budget, "),
        ({"proof": "memory", "timeout_s": 300.0}, "the formula, after a full trial "),
        ({"device": "cpu"}, "a guess "),
        ({"device": "cpu", "method": "linear"}, "its method: "),
        (NO_MEMORY, "its method, "),
    ],
)
def test_a_search_without_a_prediction_is_ordered_by_a_formula_that_says_something(changes, said):
    ordered = ordered_by(question=msgspec.structs.replace(QUESTION, **changes))
    assert ordered.startswith(said)
    assert ("formula" in ordered) == said.startswith("the formula")


def test_each_prediction_that_ordered_a_study_is_named_once_without_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    named = (str(tmp_path / "kept" / "a.json"), "trace", "b.json", "trace", "formula")
    one, trace, other = ordered_by(expectations=tuple(map(told, named))).split(" and ")
    assert one.endswith(" a.json, in ~/kept")
    assert "trace" in trace
    assert other.endswith(" b.json")


@pytest.mark.parametrize("prediction", ["trace", "a.json"])
def test_a_linear_search_says_that_the_prediction_it_was_given_ordered_nothing(prediction):
    linear = msgspec.structs.replace(QUESTION, method="linear")
    study = study_of(trial(8192, Outcome.FIT), question=linear, expectations=(told(prediction),))
    report = study_report(study)
    method, unused = dict(question_table(report).rows)["ordered by"].split("; ")
    assert method.startswith("its method: ")
    assert prediction in unused
    assert unused.endswith(" ordered nothing")
    assert (report.cells[0].expected_tokens, report.cells[0].begun_at_tokens) == (4096, None)


def test_a_report_says_where_the_search_was_told_to_begin():
    report = study_report(REAL[0].parent / "edge-4b-1-full.jsonl")
    beginning, cell = report.beginning, report.cells[0]
    file = "docs/results/find/edge-4b-1-full.prediction.json"
    assert (beginning.predictions, beginning.reason) == ((file,), None)
    assert cell.begun_at_tokens == beginning.likely_tokens[cell.label] > 0
    assert (cell.expected_tokens, cell.expected_by) == (cell.begun_at_tokens, file)

    def begun(schema_version: int, words: str):
        command = ("highwater", "find", "Qwen3-0.6B", *words.split())
        return study_report(study_of(schema_version=schema_version, command=command)).beginning

    gone = begun(1, "--prediction=gone.json")
    assert gone.predictions == ("gone.json",)
    assert "not found" in str(gone.reason)
    assert begun(1, "--prediction formula") is None
    later = STUDY_SCHEMA_VERSION
    assert begun(later, "--prediction=late.json") is None, "one that was not recorded"


def test_what_was_recorded_is_shown_where_todays_formula_says_nothing():
    own_data = msgspec.structs.replace(QUESTION, data="my.batches:packed")
    study = study_of(question=own_data, expectations=(told("formula", 0),))
    *silent, recorded = predicted_cells(report_of(study)).rows[0][1:4]
    assert silent == ["-", "-"]
    assert recorded.startswith("none by ")


def test_each_cell_says_what_predicted_it_before_its_trials_and_what_ordered_those_left_out():
    question = question_of(loss="full")
    vanilla, env = question.cells
    trials = [RecordedTrial(spec=question.trial(cell, 8192)) for cell in question.cells]
    told = (
        Expectation(cell=vanilla, likely_tokens=4096, prediction="formula"),
        Expectation(cell=env, likely_tokens=8192, prediction="kept/a|b.json"),
    )
    report = study_report(study_of(*trials, question=question, expectations=told))
    ordered = dict(question_table(report).rows)["ordered by"]
    assert ordered.startswith("the prediction kept/a|b.json; ")
    assert ordered.endswith(", the formula")
    begun = [(cell.expected_tokens, cell.begun_at_tokens) for cell in report.cells]
    assert begun == [(4096, None), (8192, 8192)]
    table = predicted_cells(report)
    (at,) = [n for n, name in enumerate(table.columns) if "today" in name and "likely" in name]
    today = [f"{cell.predicted.likely_tokens:,}" for cell in report.cells if cell.predicted]
    assert [row[at] for row in table.rows] == today
    by_formula, by_file = (row[3] for row in table.rows)
    assert by_formula.startswith("4,096 by the formula")
    assert by_file == "8,192 by a|b.json"
    assert "8,192 by a\\|b.json" in study_markdown(report)


STATES = {"parameters_bytes": 3 * GIB, "gradients_bytes": 3 * GIB}
STATES |= {"optimizer_states_bytes": 6 * GIB, "unattributed_bytes": 0}
OTHERS = {"activations_bytes": 5 * GIB, "logits_bytes": 4 * GIB, "communication_bytes": GIB}
OF_THE_CARD = {"allocated_bytes": 22 * GIB, "reserved_bytes": 23 * GIB, "device_free_bytes": 0}
OF_THE_CARD |= {"largest_free_bytes": GIB // 2, "requested_bytes": 4 * GIB}
LOGITS = AliveMemory(
    **STATES, **OTHERS, **OF_THE_CARD, requested_by="highwater/models/loss.py:90 forward"
)
MICRO_BATCH = "one-micro-batch"
VANILLA = Settings(loss="full", allocator="native")


def result_of(alive: AliveMemory | None, **failure: object) -> TrialResult:
    said = {"kind": "device_memory", "phase": "backward", "text": "out", "at_unix_s": 1.0}
    late = Failure(kind="error", phase="forward", text="lost its peer", at_unix_s=2.0)
    first = Failure(**{**said, "alive": alive, **failure})
    ranks = (RankReport(rank=0, failure=late), RankReport(rank=1, failure=first))
    return TrialResult(outcome=Outcome.OUT_OF_MEMORY, reason="out", ranks=ranks)


def test_a_line_says_where_what_how_much_and_what_to_try():
    assert request_line(result_of(LOGITS, layer=27), VANILLA, Layout()) == (
        "backward of layer 27: no room for 4.00 GiB of logits; optimizer states 6.00 GiB alive; "
        "1.00 GiB fragmented → chunked loss"
    )
    assert request_line(result_of(None), VANILLA, Layout()) is None
    rows = alive_rows(result_of(LOGITS), Layout(gpus=2, ring_degree=2))
    assert list(rows) == ["alive on rank 1, d0r1u0"]


def test_the_line_of_the_guide_is_what_a_recorded_trial_has():
    docs = ROOT / "docs"
    recorded = from_json((docs / "results/profiler/runs_out.json").read_bytes(), TrialResult)
    line = request_line(recorded, VANILLA, Layout())
    guide = (docs / "guides/out-of-memory.md").read_text()
    shown = " ".join(re.findall(r"```text\n(.*?)```", guide, re.DOTALL)[0].split())
    assert shown == f"nothing set, 1 GPU: 65,536 tokens, {line}"


def changed(**sizes: int) -> AliveMemory:
    nothing = {name: 0 for name in AliveMemory.__struct_fields__ if name.endswith("_bytes")}
    return AliveMemory(**{**nothing, "requested_bytes": GIB, **sizes})


IN_PIECES = changed(allocated_bytes=GIB, reserved_bytes=3 * GIB, logits_bytes=GIB)
ACTIVATIONS, MOMENTS = changed(activations_bytes=9 * GIB), changed(optimizer_states_bytes=9 * GIB)
ADDED_UP = changed(optimizer_states_bytes=9 * GIB, gradients_bytes=3 * GIB)


@pytest.mark.parametrize(
    ("alive", "settings", "setting"),
    [
        (LOGITS, VANILLA, "chunked loss"),
        (LOGITS, Settings(loss="chunked"), None),
        (IN_PIECES, VANILLA, "expandable segments"),
        (IN_PIECES, Settings(allocator="expandable"), "chunked loss"),
        (ACTIVATIONS, Settings(recompute="none"), "recompute"),
        (ACTIVATIONS, Settings(recompute="layer"), "context parallel"),
        (MOMENTS, VANILLA, "offload"),
        (MOMENTS, Settings(offload=True), None),
        (ADDED_UP, VANILLA, MICRO_BATCH),
        (ADDED_UP, Settings(accumulates=False), "offload"),
        (changed(communication_bytes=9 * GIB), VANILLA, "smaller buckets"),
        (changed(unattributed_bytes=9 * GIB), VANILLA, None),
        (changed(), VANILLA, None),
    ],
)
def test_the_setting_to_try_is_one_that_is_not_there_yet(alive, settings, setting):
    assert setting_of(alive, settings, Layout()) == setting
    assert setting is None or setting in ADVICE


def test_what_is_advised_begins_with_fewer_copies_and_can_be_typed():
    layout = Layout(gpus=4, replicate_degree=2)
    assert setting_of(ADDED_UP, VANILLA, layout) == "fewer copies"
    assert setting_of(ACTIVATIONS, VANILLA, layout) == "context parallel"
    counted = {"parameters_bytes": GIB, "gradients_bytes": GIB, "optimizer_states_bytes": 2 * GIB}
    assert setting_of(AliveMemory(**counted), VANILLA, Layout(gpus=2, replicate_degree=2)) is None
    asked = {"requested_bytes": 4 * GIB, "requested_by": LOGITS.requested_by}
    assert setting_of(AliveMemory(**counted, **asked), VANILLA, Layout()) == "chunked loss"
    asked = {words for text in ADVICE.values() for words in re.findall(r"--[a-z-]+(?: \w+)?", text)}
    assert len(asked) >= len(ADVICE)
    for words in asked - {"--offload"}:
        flag, value = words.split()
        assert parse(["find", "Qwen3-0.6B", flag, value]).model == "Qwen3-0.6B"
    assert parse(["find", "Qwen3-0.6B", "--offload"]).offload


def test_the_tables_of_a_trial_and_of_a_study_have_the_line_and_nothing_acts_in_it():
    cell = QUESTION.cells[0]
    hostile = msgspec.structs.replace(LOGITS, requested_by=f"highwater/{HOSTILE}.py:1 {HOSTILE}")
    result = result_of(hostile, phase=HOSTILE)
    recorded = msgspec.structs.replace(trial(8192, Outcome.OUT_OF_MEMORY), result=result)
    answer = answer_of(cell, 4096, 8192)
    table = answer_table(study_of(trial(4096, Outcome.FIT), recorded, answers=(answer,)))
    (line,) = (note for note in table.footnotes if "no room for 4.00 GiB" in note)
    report = report_of(study_of(recorded))
    rows = dict(trial_table(recorded.spec, result).rows)
    assert "optimizer states 6.00 GiB" in rows["alive on rank 1"]
    for text in (study_page(report), study_markdown(report), rows["out of memory"]):
        assert "no room for 4.00 GiB" in text
    for text in (study_page(report), study_markdown(report), line, *rows.values()):
        assert not {"\x1b", "\u202e"} & set(text)
