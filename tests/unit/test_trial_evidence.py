"""Answers and their trials: every answer of a search is borne out by its trials."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import highwater
from highwater.cli.commands import exit_code
from highwater.errors import EXIT_INCONCLUSIVE
from highwater.nouns.capacities import study_capacities
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, RecordedTrial, Study
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_answer import (
    answer_table,
    published_line,
    published_notes,
    published_tables,
    published_text,
)
from highwater.pages.study_page import report_text
from highwater.pages.table import plain_table
from highwater.search.cell_outcomes import CellAnswered, TrialFinished
from highwater.search.scheduler import recorded_search, search_cells
from highwater.store.journal import open_journal, read_study
from highwater.store.lines import unsupported
from highwater.trials.simulated import OneByOne
from highwater.units import GIB
from places import FOUND, RESULTS, examples, question_of
from trial_specs import rank_that_used, trial_among

RECORDED = sorted(RESULTS.rglob("*.jsonl"))
PROVEN_BEFORE = 42
"""Answers in the recorded studies, each of which was shown as measured when it was recorded."""


def test_every_answer_of_every_recorded_study_is_proven_as_it_stands_in_its_file():
    proven = 0
    for path in RECORDED:
        study = read_study(path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        answers = [line["answer"]["cell"] for line in lines if line["kind"] == "cell_answered"]
        assert study.unproven == ()
        assert len(study.answers) == len({msgspec.json.encode(cell) for cell in answers})
        proven += len(study.answers)
    assert proven == PROVEN_BEFORE


class Odd(OneByOne):
    """A runner of outcomes that follow no law: seeded, by length, repeat and attempt."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        launch = f"{spec.length_tokens} {repeat} {attempt} {spec.is_memory_only}"
        draw, law = random.Random(f"{self._seed} {launch}"), random.Random(self._seed)
        edge, noise, fit = law.randint(0, 40) * 1000, law.choice([0, 0.1, 0.5]), Outcome.FIT
        outcome = fit if spec.length_tokens * spec.sequences <= edge else Outcome.OUT_OF_MEMORY
        if draw.random() < noise:
            outcome = draw.choice([o for o in Outcome if o is not Outcome.MEMORY_ONLY_FIT])
        if outcome is fit and spec.is_memory_only:
            outcome = Outcome.MEMORY_ONLY_FIT
        times = (0.1, draw.choice([0.1, 100.0]))
        rank = rank_that_used(draw.randint(GIB, 2 * GIB), 2 * GIB, step_times_s=times)
        figures = {"ranks": (rank,), "tokens_per_s": 1.0, "wall_s": 1.0, "simulated": True}
        return TrialResult(outcome=outcome, reason=str(outcome), **figures)


ONE = Cell(layout=Layout(), settings=Settings())
TWO = Cell(layout=Layout(gpus=2, ulysses_degree=2), settings=Settings())
PACKED = Cell(layout=Layout(), settings=Settings(token_budget_tokens=30_000))
QUESTIONS = [
    {"method": method, "confirm": confirm, "margin_bytes": margin, "cells": cells, **proof}
    for method in ("bisect", "linear")
    for confirm in (0, 2)
    for margin in (0, GIB // 2)
    for proof in ({}, {"proof": "memory", "timeout_s": 60.0})
    for cells in ((ONE, TWO), (PACKED,))
]


def asked(**changes: object) -> Question:
    question = question_of(start_length=1000, resolution=1000, max_length=64_000)
    return msgspec.structs.replace(question, **changes)


@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(0, 10**9), changes=st.sampled_from(QUESTIONS))
def test_every_answer_of_a_search_is_borne_out_by_its_trials_however_they_end(seed, changes):
    question = asked(**changes)
    trials: list[RecordedTrial] = []
    for event in search_cells(question, Odd(seed)):
        if isinstance(event, TrialFinished):
            trials.append(trial_among(event))
        if isinstance(event, CellAnswered):
            assert unsupported(question, event.answer, trials) is None
            trials = []


MORE = {"length_tokens": 655_360, "peak_reserved_bytes": 1, "headroom_bytes": 1}
CLAIMS: dict[str, dict[str, object]] = {
    "a longer capacity": {"capacity_tokens": 204_800, "does_not_fit_tokens": 212_992},
    "a shorter capacity": {"capacity_tokens": 8192},
    "nothing fits": {"capacity_tokens": 0, "does_not_fit_tokens": 8192},
    "nobody knows": {"capacity_tokens": None},
    "the next length": {"does_not_fit_tokens": 196_609},
    "no next length": {"does_not_fit_tokens": None},
    "no end of memory": {"limit": "ceiling", "does_not_fit_tokens": None},
    "time": {"limit": "time", "does_not_fit_tokens": None},
    "host memory": {"limit": "host_memory"},
    "crashes": {"limit": "inconclusive", "does_not_fit_tokens": None},
    "a lower peak": {"peak_reserved_bytes": GIB},
    "more headroom": {"headroom_bytes": 30 * GIB},
    "more speed": {"tokens_per_s": 1e6},
    "more FLOPs": {"mfu": 0.99},
    "more trials": {"trials": 99},
    "no trials": {"trials": 0},
    "a memory-only proof": {"memory_only": MORE},
    "a contradiction": {"contradictions": ["1 did not fit, 2 did"]},
}


WHOLE = FOUND / "qwen3-0.6b-79gib-full.jsonl"


def edited(target: Path, change: Callable[[list[dict]], list[dict] | None]) -> Study:
    lines = [json.loads(line) for line in WHOLE.read_text().splitlines()]
    lines = change(lines) or lines
    target.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_study(target)


def claiming(target: Path, claim: dict[str, object]) -> Study:

    def change(lines: list[dict]) -> None:
        next(each["answer"] for each in lines if each["kind"] == "cell_answered").update(claim)

    return edited(target, change)


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_answer_that_its_trials_do_not_bear_out_is_unproven(claim, tmp_path):
    study = claiming(tmp_path / "study.jsonl", CLAIMS[claim])
    assert [each.cell for each in study.answers] == [study.question.cells[1]]
    assert [each.answer.cell for each in study.unproven] == [study.question.cells[0]]
    assert not study.complete
    assert any(note.startswith("unproven: nothing set, 1") for note in study.notes)
    assert exit_code(study) == EXIT_INCONCLUSIVE


def claiming_a_million(tmp_path: Path) -> Path:
    path = tmp_path / "study.jsonl"
    fits, fails = 1_000_000, 1_008_192
    reason = "1,008,192 tokens: memory ran out"
    claiming(path, {"capacity_tokens": fits, "does_not_fit_tokens": fails, "reason": reason})
    return path


def test_no_table_line_or_page_calls_it_measured(tmp_path):
    study = read_study(claiming_a_million(tmp_path))
    table = plain_table(answer_table(study))
    row = next(line for line in table.splitlines() if line.startswith("nothing set "))
    assert row.split()[4:6] == ["≥196,608*", "unproven"]
    cell = study.question.cells[0]
    assert published_line(study.question, cell, study.answer_of(cell)) is None
    notes = published_notes(study.question, cell, study.answer_of(cell))
    for text in (table, *notes, *map(published_text, published_tables([study]))):
        assert "1000000" not in text.replace(",", "")
    report = highwater.study_report(study)
    assert [cell.answer is None for cell in report.cells] == [True, False]
    assert [cell.unproven is None for cell in report.cells] == [False, True]
    assert not report.is_complete
    for form in (".html", ".md", ".csv"):
        for line in report_text(report, form).splitlines():
            assert not ("1,000,000" in line and "unproven" not in line), form
    document = json.loads(report_text(report, ".json"))
    assert [answer["capacity_tokens"] for answer in document["study"]["answers"]] == [196_608]
    assert "1000000" not in " ".join(word for command in report.commands for word in command.words)


def test_no_guide_recommendation_or_configuration_takes_it(tmp_path):
    path = claiming_a_million(tmp_path)
    found = {each.cell.label: each for each in study_capacities(read_study(path))}
    assert found["nothing set, 1 GPU"].capacity_tokens == 196_608
    made = highwater.guide(path)
    capacities = [each.capacity_tokens for table in made.tables for each in table.capacities]
    assert max(capacities) < 1_000_000
    assert any("unproven: nothing set, 1 GPU" in note for note in made.notes)
    where = {"gpus": "H200-141GB", "gpu_memory": "79.15GiB", "sequences_per_micro_batch": 1}
    advice = highwater.recommend("Qwen3-0.6B", length=500_000, studies=[path], **where)
    assert not any(each.fits for each in advice.candidates if each.source == "measured")
    assert any("unproven: nothing set, 1 GPU" in note for note in advice.notes)


def without_its_edge(kind: str) -> Callable[[list[dict]], list[dict]]:
    """Leaves out how the trial of 204,800 tokens ended, or all of it."""

    def change(lines: list[dict]) -> list[dict]:
        begun = [line for line in lines if line["kind"] == "trial_started"]
        keys = [e["spec_key"] for e in begun if e["spec"]["length_tokens"] == 204_800]
        lost = [line for line in lines if line.get("spec_key") in keys]
        if kind == "end":
            lost = [line for line in lost if line["kind"] == "trial_finished"]
        return [line for line in lines if line not in lost]

    return change


def with_trials(part: str, kind: str, **fields: object) -> Callable[[list[dict]], None]:
    """Has all trials say something else."""

    def change(lines: list[dict]) -> None:
        for line in lines:
            if line["kind"] == kind:
                line[part] |= fields

    return change


OF_ANOTHER = {"steps": 3, "seed": 1, "config_digest": "0" * 16, "data": "mine:batches"}
OF_ANOTHER |= {"memory_budget_bytes": GIB}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_its_edge("end"), "no trial of 204,800"),
        (without_its_edge("all"), "no trial of 204,800"),
        *((with_trials("spec", "trial_started", **{k: v}), "") for k, v in OF_ANOTHER.items()),
        (with_trials("result", "trial_finished", simulated=True), ""),
    ],
)
def test_an_answer_without_its_trials_or_by_other_ones_is_unproven(change, why, tmp_path):
    study = edited(tmp_path / "study.jsonl", change)
    assert (len(study.answers), len(study.unproven)) == (0, 2)
    assert why in study.unproven[0].why


def test_a_resumed_search_answers_an_unproven_cell_anew_from_the_trials_there_are(tmp_path):
    path = claiming_a_million(tmp_path)
    before = read_study(path)

    class Nothing(OneByOne):
        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
            raise AssertionError(spec, attempt, repeat)

    with open_journal(path, before.question) as journal:
        list(recorded_search(before.question, Nothing(), journal))
    after = read_study(path)
    assert after.unproven == ()
    assert (after.answers, after.trials) == (read_study(WHOLE).answers, before.trials)
