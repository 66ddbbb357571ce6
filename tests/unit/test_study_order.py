"""What a report says of predictions that were made before the trials, and of what ordered these."""

import msgspec
import pytest
from studies import QUESTION, REAL, report_of, study_of, trial

from highwater import study_report
from highwater.nouns.study import Expectation, RecordedTrial
from highwater.nouns.trial import Outcome
from highwater.pages.study.build import study_markdown
from highwater.pages.study.study_tables import predicted_cells, question_table
from places import question_of

BUDGETED = question_of(token_budget="16k").cells


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
        (
            {"device": "cpu", "memory_budget_bytes": None, "device_total_bytes": None},
            "its method, ",
        ),
    ],
)
def test_a_search_without_a_prediction_is_ordered_by_the_formula_only_where_that_says_something(
    changes, said
):
    report = report_of(study_of(question=msgspec.structs.replace(QUESTION, **changes)))
    ordered = dict(question_table(report).rows)["ordered by"]
    assert ordered.startswith(said)
    assert ("formula" in ordered) == said.startswith("the formula")


def test_each_prediction_that_ordered_a_study_is_named_once_and_without_your_own_home(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    named = (str(tmp_path / "kept" / "a.json"), "trace", "b.json", "trace", "formula")
    told = tuple(
        Expectation(cell=QUESTION.cells[0], likely_tokens=4096, prediction=each) for each in named
    )
    report = study_report(study_of(expectations=told))
    ordered = dict(question_table(report).rows)["ordered by"]
    one, trace, other = ordered.split(" and ")
    assert one.endswith(" a.json, in ~/kept")
    assert "trace" in trace
    assert other.endswith(" b.json")


@pytest.mark.parametrize("prediction", ["trace", "a.json"])
def test_a_linear_search_says_that_the_prediction_it_was_given_ordered_nothing(prediction):
    told = Expectation(cell=QUESTION.cells[0], likely_tokens=4096, prediction=prediction)
    linear = msgspec.structs.replace(QUESTION, method="linear")
    report = study_report(study_of(trial(8192, Outcome.FIT), question=linear, expectations=(told,)))
    ordered = dict(question_table(report).rows)["ordered by"]
    method, unused = ordered.split("; ")
    assert method.startswith("its method: ")
    assert prediction in unused
    assert unused.endswith(" ordered nothing")
    assert (report.cells[0].expected_tokens, report.cells[0].begun_at_tokens) == (4096, None)


def test_a_report_of_a_search_whose_prediction_left_cells_out_says_what_ordered_those():
    question = question_of(loss="full")
    vanilla, env = question.cells
    trials = [RecordedTrial(spec=question.trial(cell, 8192)) for cell in question.cells]
    told = (
        Expectation(cell=vanilla, likely_tokens=4096, prediction="formula"),
        Expectation(cell=env, likely_tokens=8192, prediction="a.json"),
    )
    report = study_report(study_of(*trials, question=question, expectations=told))
    ordered = dict(question_table(report).rows)["ordered by"]
    assert ordered.startswith("the prediction a.json; ")
    assert ordered.endswith(", the formula")


def test_a_report_says_where_the_search_was_told_to_begin():
    report = study_report(REAL[0].parent / "edge-4b-1-full.jsonl")
    assert report.beginning is not None
    assert report.beginning.predictions == ("docs/results/find/edge-4b-1-full.prediction.json",)
    assert report.beginning.reason is None
    assert (
        report.cells[0].begun_at_tokens == report.beginning.likely_tokens[report.cells[0].label] > 0
    )
    assert report.cells[0].expected_tokens == report.cells[0].begun_at_tokens
    assert report.cells[0].expected_by == "docs/results/find/edge-4b-1-full.prediction.json"
    command = (*("highwater", "find", "Qwen3-0.6B"), "--prediction=gone.json")
    gone = study_report(study_of(schema_version=1, command=command)).beginning
    assert gone is not None
    assert gone.predictions == ("gone.json",)
    assert "not found" in str(gone.reason)
    by_formula = study_of(
        schema_version=1, command=("highwater", "find", "Qwen3-0.6B", "--prediction", "formula")
    )
    assert study_report(by_formula).beginning is None


def test_what_a_formula_said_before_the_trials_stands_beside_what_todays_says():
    told = Expectation(cell=QUESTION.cells[0], likely_tokens=12_345, prediction="formula")
    report = report_of(study_of(trial(8192, Outcome.FIT), expectations=(told,)))
    cell = report.cells[0]
    assert cell.expected_tokens == 12_345
    assert cell.expected_by == "formula"
    assert cell.begun_at_tokens is None
    assert cell.predicted is not None
    assert cell.predicted.likely_tokens != 12_345
    table = predicted_cells(report)
    assert table is not None
    row = dict(zip(table.columns, table.rows[0], strict=True))
    (before,) = (text for name, text in row.items() if "before its trials" in name)
    (today,) = (text for name, text in row.items() if "today" in name and "likely" in name)
    assert before.startswith("12,345 by ")
    assert today == f"{cell.predicted.likely_tokens:,}"
    assert before in study_markdown(report)


def test_what_was_recorded_is_shown_where_todays_formula_says_nothing():
    told = Expectation(cell=QUESTION.cells[0], likely_tokens=0, prediction="formula")
    silent = msgspec.structs.replace(QUESTION, data="my.batches:packed")
    table = predicted_cells(report_of(study_of(question=silent, expectations=(told,))))
    assert table is not None
    *silent, recorded = table.rows[0][1:4]
    assert silent == ["-", "-"]
    assert recorded.startswith("none by ")


def test_each_cell_says_what_predicted_it_before_its_trials():
    question = question_of(loss="full")
    vanilla, env = question.cells
    told = (
        Expectation(cell=vanilla, likely_tokens=4096, prediction="formula"),
        Expectation(cell=env, likely_tokens=8192, prediction="kept/a|b.json"),
    )
    report = study_report(study_of(question=question, expectations=told))
    assert [(cell.expected_tokens, cell.begun_at_tokens) for cell in report.cells] == [
        (4096, None),
        (8192, 8192),
    ]
    table = predicted_cells(report)
    assert table is not None
    by_formula, by_file = (row[3] for row in table.rows)
    assert by_formula.startswith("4,096 by the formula")
    assert by_file == "8,192 by a|b.json"
    assert "8,192 by a\\|b.json" in study_markdown(report)


def test_a_prediction_that_a_study_did_not_record_has_ordered_nothing():
    assert (
        study_report(
            study_of(command=("highwater", "find", "Qwen3-0.6B", "--prediction=late.json"))
        ).beginning
        is None
    )
