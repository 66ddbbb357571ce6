"""Recommendations from studies: what trials measured is taken, where they are about what is
asked.
"""

import re
from pathlib import Path

import msgspec
import pytest

import highwater
from highwater.memory.capacity import MemoryLimit
from highwater.memory.from_trials import as_measured, obstacle, with_margin
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.capacities import cell_capacities
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import MemoryOnlyFit, Study
from highwater.nouns.trial import Outcome
from highwater.pages.recommendation_tables import recommendation_tables, rung_list
from highwater.pages.table import plain_table
from highwater.recommendation.recommend import recommend
from highwater.units import GIB, MIB
from tables import table

STUDY = Path(__file__).parents[2] / "docs" / "results" / "find" / "qwen3-0.6b-79gib-full.jsonl"
HERE = {
    "model": "Qwen3-0.6B",
    "gpus": "H200-141GB",
    "gpu_memory": "79.15GiB",
    "sequences_per_micro_batch": 1,
}
"""What the study's trials were about."""


def by_label(found: Recommendation) -> dict[str, Candidate]:
    return {each.label: each for each in found.candidates}


def test_what_a_study_measured_is_taken_and_the_rest_predicted():
    found = recommend(length=150_000, studies=[STUDY], **HERE)
    each = by_label(found)
    for label in ("nothing set, 1 GPU", "expandable, 1 GPU"):
        assert each[label].source == "measured"
        assert each[label].capacity_source == "measured"
        assert each[label].capacity_tokens == 196_608
        assert each[label].found_in == str(STUDY)
        assert each[label].fits
    assert each["expandable, chunked loss, 1 GPU"].source == "predicted"
    assert found.chosen == each["nothing set, 1 GPU"]
    text = plain_table(rung_list(found, is_explained=True))
    assert f"measured: {STUDY}" in text
    assert {row[2] for row in rung_list(found).rows} == {"measured", "predicted"}


def test_a_measured_answer_overrules_a_prediction_both_ways():
    predicted = by_label(recommend(length=190_000, **HERE))["nothing set, 1 GPU"]
    assert not predicted.fits, "the upper end is above what the GPU has"
    found = by_label(recommend(length=190_000, studies=[STUDY], **HERE))["nothing set, 1 GPU"]
    assert found.fits
    assert found.headroom_bytes == 1_244_371_353, (
        "what the longest trial left: less than this length leaves"
    )
    shown = plain_table(
        recommendation_tables(recommend(length=190_000, studies=[STUDY], **HERE))[0]
    )
    assert re.search(r"1\.16 GiB .* 196,608 tokens", shown)
    beyond = by_label(recommend(length=204_800, studies=[STUDY], **HERE))["nothing set, 1 GPU"]
    assert beyond.fits is False
    assert beyond.source == "measured"
    assert beyond.lacks_bytes is None
    assert beyond.capacity_tokens == 196_608
    tables = recommendation_tables(recommend(length=204_800, studies=[STUDY], **HERE))
    assert any(
        "out of memory" in row and "196,608*" in row for table in tables for row in table.rows
    )


def test_between_the_two_trials_of_an_edge_nobody_measured_so_it_is_predicted():
    found = by_label(recommend(length=200_000, studies=[STUDY], **HERE))["expandable, 1 GPU"]
    assert found.source == "predicted"


def changed(**fields) -> Study:
    """The study with another answer for Env."""
    study = highwater.open_study(STUDY)
    answers = tuple(
        msgspec.structs.replace(answer, **fields) if answer.cell.settings.label == "Env" else answer
        for answer in study.answers
    )
    return msgspec.structs.replace(study, answers=answers, trials=())


def told(study: Study, length: int) -> Candidate | None:
    return as_measured(
        by_label(recommend(length=length, **HERE))["expandable, 1 GPU"], study, length
    )


@pytest.mark.parametrize("limit", ["ceiling", "time", "inconclusive"])
def test_a_search_that_no_memory_ended_tells_nothing_of_longer_lengths(limit):
    study = changed(limit=limit, does_not_fit_tokens=None)
    assert told(study, 196_608).fits
    assert told(study, 204_800) is None


def test_what_is_proven_of_memory_alone_is_labelled():
    study = changed(
        memory_only=MemoryOnlyFit(
            length_tokens=300_000, peak_reserved_bytes=None, headroom_bytes=7
        ),
        does_not_fit_tokens=304_000,
    )
    found = told(study, 250_000)
    assert (found.fits, found.is_memory_only, found.headroom_bytes) == (True, True, 7)
    assert not told(study, 196_608).is_memory_only
    assert not told(study, 304_000).fits


def test_host_memory_that_ran_out_is_named():
    assert told(changed(limit="host_memory"), 204_800).lacks_of == "host"


def test_a_trial_of_the_very_length_counts_before_the_bracket():
    study = highwater.open_study(STUDY)
    failed = next(
        t
        for t in study.trials
        if t.spec.settings.label == "Env" and t.result.outcome is Outcome.OUT_OF_MEMORY
    )
    spec = msgspec.structs.replace(failed.spec, length_tokens=100_000)
    again = msgspec.structs.replace(
        study, trials=(*study.trials, msgspec.structs.replace(failed, spec=spec))
    )
    assert told(study, 100_000).fits
    assert not told(again, 100_000).fits


def test_a_search_that_is_not_finished_tells_what_its_trials_told_and_an_inconclusive_one_nothing():
    study = highwater.open_study(STUDY)
    unfinished = msgspec.structs.replace(study, answers=())
    for length in (8_192, 196_608, 200_000, 204_800):
        assert told(unfinished, length) == told(study, length)
    assert told(msgspec.structs.replace(unfinished, trials=()), 8_192) is None
    assert (
        told(changed(capacity_tokens=None, does_not_fit_tokens=None, limit="inconclusive"), 8192)
        is None
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    table("recommendation_from_studies", "a_study_of_something_else"),
)
def test_a_study_of_something_else_is_not_used_and_a_note_says_why(asked, why):
    found = recommend(length="8k", studies=[STUDY], **(HERE | asked))
    assert {each.source for each in found.candidates} == {"predicted"}
    assert found.notes[-1].startswith(f"{STUDY} is not used: {why}")


def test_a_margin_that_was_not_searched_with_is_held_against_what_each_trial_left():
    found = recommend(length=196_608, studies=[STUDY], headroom="1200MiB", **HERE)
    vanilla, env = (by_label(found)[label] for label in ("nothing set, 1 GPU", "expandable, 1 GPU"))
    assert (vanilla.fits, vanilla.source, vanilla.capacity_tokens) == (False, "measured", 188_416)
    assert vanilla.lacks_bytes == 1200 * MIB - 1_244_371_353
    assert env.fits is True
    assert env.source == "measured"
    assert env.capacity_tokens == 196_608
    assert env.headroom_bytes == 1_328_257_433
    assert found.chosen == env
    rows = [row for table in recommendation_tables(found) for row in table.rows]
    assert any(re.search(r"at least 13\.3 MiB", " ".join(row)) for row in rows)
    beyond = by_label(recommend(length=204_800, studies=[STUDY], headroom="1200MiB", **HERE))[
        "nothing set, 1 GPU"
    ]
    assert (beyond.fits, beyond.source, beyond.lacks_bytes) == (False, "measured", None), (
        "it ran out of memory"
    )
    between = by_label(recommend(length=192_512, studies=[STUDY], headroom="1200MiB", **HERE))[
        "nothing set, 1 GPU"
    ]
    assert between.source == "predicted", "nobody tried it"
    none = recommend(length=150_000, studies=[STUDY], headroom="60GiB", **HERE)
    assert {each.source for each in none.candidates} == {"predicted"}, (
        "no trial left so much: shorter ones were not tried"
    )


@pytest.mark.corpus
@pytest.mark.parametrize("path", sorted(STUDY.parent.glob("*.jsonl")), ids=lambda path: path.stem)
@pytest.mark.parametrize("margin", [0, GIB // 2, 4 * GIB])
def test_with_any_margin_a_study_says_of_its_own_lengths_what_its_trials_said(path, margin):
    study = with_margin(highwater.open_study(path), margin)
    told = [
        trial for trial in study.trials if trial.result is not None and trial.result.outcome.tells
    ]
    for cell in study.question.cells:
        own = [t for t in told if (t.spec.layout, t.spec.settings) == (cell.layout, cell.settings)]
        for each in cell_capacities(study, cell):
            for length in {trial.spec.length_tokens for trial in own}:
                fit = all(
                    study.question.counts_as_fit(trial.result)
                    for trial in own
                    if trial.spec.length_tokens == length
                )
                assert each.fits(length) in (fit, None)
            assert each.capacity_tokens == 0 or each.fits(each.capacity_tokens)


def test_a_host_that_is_too_small_overrules_trials_on_a_larger_one():
    assert {
        each.source
        for each in recommend(length="8k", studies=[STUDY], host_memory="1MiB", **HERE).candidates
    } == {"predicted"}


def test_simulated_trials_and_trials_on_the_cpu_or_on_data_of_their_own_say_nothing():
    study, memory_limit = highwater.open_study(STUDY), MemoryLimit(device_bytes=84_986_665_369)
    changes = (
        ({"simulated": True}, "simulated"),
        ({"device": "cpu"}, "on the CPU"),
        ({"data": "texts.py:read"}, "of their own"),
    )
    for change, why in changes:
        other = msgspec.structs.replace(
            study, question=msgspec.structs.replace(study.question, **change)
        )
        assert why in obstacle(
            other, model=study.question.model, device_name="H200-141GB", memory_limit=memory_limit
        )


def test_a_step_is_timed_by_a_trial_and_predicted_without_one():
    alone = [each for each in recommend(length="8k", **HERE).candidates if each.fits]
    assert {each.step_time.source for each in alone} == {"predicted"}
    assert {each.step_time.measured_length_tokens for each in alone} == {None}
    found = by_label(recommend(length=196_608, studies=[STUDY], **HERE))
    step = found["expandable, 1 GPU"].step_time
    assert step.source == "measured"
    assert step.tokens_per_s == pytest.approx(4901.8, abs=0.1)
    assert step.step_tokens == 2 * 196_608
    assert step.time_s == pytest.approx(2 * 196_608 / step.tokens_per_s)
    assert found["expandable, chunked loss, 1 GPU"].step_time.measured_length_tokens is None


def test_a_step_of_another_length_is_predicted_at_the_same_flops_a_second_and_says_so():
    found = recommend(length=100_000, studies=[STUDY], **HERE)
    step = by_label(found)["expandable, 1 GPU"].step_time
    shape, cell = load_model("Qwen3-0.6B").shape, by_label(found)["expandable, 1 GPU"].cell
    measured = step.measured_length_tokens
    here, there = (
        step_flops(shape, length_tokens=n, sequences=2, settings=cell.settings)
        for n in (100_000, measured)
    )
    assert step.source == "predicted"
    assert here / step.time_s == pytest.approx(there * step.tokens_per_s / (2 * measured))
    assert "tokens/s, measured at" in "\n".join(map(plain_table, recommendation_tables(found)))
