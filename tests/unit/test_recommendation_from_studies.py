"""Recommendations from studies."""

import re
from pathlib import Path

import msgspec
import pytest

import highwater
from highwater.memory.capacity import MemoryLimit
from highwater.memory.from_trials import as_measured, obstacle, with_margin
from highwater.model.held_bytes import step_flops
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
HERE = {"model": "Qwen3-0.6B", "gpus": "H200-141GB", "gpu_memory": "79.15GiB"}
HERE |= {"sequences_per_micro_batch": 1}
"""What the study's trials were about."""


def by_label(found: Recommendation) -> dict[str, Candidate]:
    return {each.label: each for each in found.candidates}


def with_study(length: int, label: str = "nothing set, 1 GPU", **asked: str) -> Candidate:
    return by_label(recommend(length=length, studies=[STUDY], **asked, **HERE))[label]


def test_what_a_study_measured_is_taken_and_the_rest_predicted():
    found = recommend(length=150_000, studies=[STUDY], **HERE)
    each = by_label(found)
    for label in ("nothing set, 1 GPU", "expandable, 1 GPU"):
        rung = each[label]
        assert (rung.source, rung.capacity_source, rung.fits) == ("measured", "measured", True)
        assert (rung.capacity_tokens, rung.found_in) == (196_608, str(STUDY))
    assert each["expandable, chunked loss, 1 GPU"].source == "predicted"
    assert found.chosen == each["nothing set, 1 GPU"]
    assert f"measured: {STUDY}" in plain_table(rung_list(found, is_explained=True))
    assert {row[2] for row in rung_list(found).rows} == {"measured", "predicted"}


def test_a_measured_answer_overrules_a_prediction_both_ways():
    predicted = by_label(recommend(length=190_000, **HERE))["nothing set, 1 GPU"]
    assert not predicted.fits, "the upper end is above what the GPU has"
    found = with_study(190_000)
    assert found.fits
    left = found.headroom_bytes
    assert left == 1_244_371_353, "what the longest trial left: less than this length leaves"
    first, *_ = recommendation_tables(recommend(length=190_000, studies=[STUDY], **HERE))
    assert re.search(r"1\.16 GiB .* 196,608 tokens", plain_table(first))
    beyond = with_study(204_800)
    assert (beyond.fits, beyond.source, beyond.lacks_bytes) == (False, "measured", None)
    assert beyond.capacity_tokens == 196_608
    tables = recommendation_tables(recommend(length=204_800, studies=[STUDY], **HERE))
    rows = [row for table in tables for row in table.rows]
    assert any("out of memory" in row and "196,608*" in row for row in rows)
    between = with_study(200_000, "expandable, 1 GPU")
    assert between.source == "predicted", "nobody measured between the trials of an edge"


def changed(**fields) -> Study:
    study = highwater.open_study(STUDY)
    vanilla, env = study.answers
    answers = (vanilla, msgspec.structs.replace(env, **fields))
    return msgspec.structs.replace(study, answers=answers, trials=())


def told(study: Study, length: int) -> Candidate | None:
    rung = by_label(recommend(length=length, **HERE))["expandable, 1 GPU"]
    return as_measured(rung, study, length)


@pytest.mark.parametrize("limit", ["ceiling", "time", "inconclusive"])
def test_a_search_that_no_memory_ended_tells_nothing_of_longer_lengths(limit):
    study = changed(limit=limit, does_not_fit_tokens=None)
    assert told(study, 196_608).fits
    assert told(study, 204_800) is None


def test_what_is_proven_of_memory_alone_and_of_host_memory_is_labelled():
    proof = MemoryOnlyFit(length_tokens=300_000, peak_reserved_bytes=None, headroom_bytes=7)
    study = changed(memory_only=proof, does_not_fit_tokens=304_000)
    found = told(study, 250_000)
    assert (found.fits, found.is_memory_only, found.headroom_bytes) == (True, True, 7)
    assert not told(study, 196_608).is_memory_only
    assert not told(study, 304_000).fits
    assert told(changed(limit="host_memory"), 204_800).lacks_of == "host"


def test_trials_count_before_brackets_and_in_searches_that_are_not_finished():
    study = highwater.open_study(STUDY)
    of_env = [each for each in study.trials if each.spec.settings.label == "Env"]
    failed = next(t for t in of_env if t.result.outcome is Outcome.OUT_OF_MEMORY)
    spec = msgspec.structs.replace(failed.spec, length_tokens=100_000)
    shorter = msgspec.structs.replace(failed, spec=spec)
    assert told(study, 100_000).fits
    assert not told(msgspec.structs.replace(study, trials=(*study.trials, shorter)), 100_000).fits
    study = highwater.open_study(STUDY)
    unfinished = msgspec.structs.replace(study, answers=())
    for length in (8_192, 196_608, 200_000, 204_800):
        assert told(unfinished, length) == told(study, length)
    assert told(msgspec.structs.replace(unfinished, trials=()), 8_192) is None
    unknown = {"capacity_tokens": None, "does_not_fit_tokens": None, "limit": "inconclusive"}
    assert told(changed(**unknown), 8192) is None


@pytest.mark.parametrize(
    ("asked", "why"), table("recommendation_from_studies", "a_study_of_something_else")
)
def test_a_study_of_something_else_is_not_used_and_a_note_says_why(asked, why):
    found = recommend(length="8k", studies=[STUDY], **(HERE | asked))
    assert {each.source for each in found.candidates} == {"predicted"}
    assert found.notes[-1].startswith(f"{STUDY} is not used: {why}")


def test_a_margin_that_was_not_searched_with_is_held_against_what_each_trial_left():
    asked = {"studies": [STUDY], "headroom": "1200MiB", **HERE}
    found = recommend(length=196_608, **asked)
    vanilla, env = (by_label(found)[label] for label in ("nothing set, 1 GPU", "expandable, 1 GPU"))
    assert (vanilla.fits, vanilla.source, vanilla.capacity_tokens) == (False, "measured", 188_416)
    assert vanilla.lacks_bytes == 1200 * MIB - 1_244_371_353
    assert (env.fits, env.source, env.capacity_tokens) == (True, "measured", 196_608)
    assert env.headroom_bytes == 1_328_257_433
    assert found.chosen == env
    rows = [row for table in recommendation_tables(found) for row in table.rows]
    assert any(re.search(r"at least 13\.3 MiB", " ".join(row)) for row in rows)
    beyond = with_study(204_800, headroom="1200MiB")
    ran_out = (beyond.fits, beyond.source, beyond.lacks_bytes)
    assert ran_out == (False, "measured", None), "it ran out of memory"
    assert with_study(192_512, headroom="1200MiB").source == "predicted", "nobody tried it"
    none = recommend(length=150_000, **asked | {"headroom": "60GiB"})
    sources = {each.source for each in none.candidates}
    assert sources == {"predicted"}, "no trial left so much: shorter ones were not tried"


@pytest.mark.corpus
@pytest.mark.parametrize("path", sorted(STUDY.parent.glob("*.jsonl")), ids=lambda path: path.stem)
@pytest.mark.parametrize("margin", [0, GIB // 2, 4 * GIB])
def test_with_any_margin_a_study_says_of_its_own_lengths_what_its_trials_said(path, margin):
    study = with_margin(highwater.open_study(path), margin)
    told = [t for t in study.trials if t.result is not None and t.result.outcome.tells]
    for cell in study.question.cells:
        fits: dict[int, bool] = {}
        for trial in told:
            spec, counts = trial.spec, study.question.counts_as_fit(trial.result)
            if (spec.layout, spec.settings) == (cell.layout, cell.settings):
                fits[spec.length_tokens] = fits.get(spec.length_tokens, True) and counts
        for each in cell_capacities(study, cell):
            assert all(each.fits(length) in (fit, None) for length, fit in fits.items())
            assert each.capacity_tokens == 0 or each.fits(each.capacity_tokens)


def test_a_host_that_is_too_small_overrules_trials_on_a_larger_one():
    found = recommend(length="8k", studies=[STUDY], host_memory="1MiB", **HERE)
    assert {each.source for each in found.candidates} == {"predicted"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("simulated", True, "simulated"),
        ("device", "cpu", "on the CPU"),
        ("data", "a:b", "their own"),
    ],
)
def test_simulated_trials_and_those_on_the_cpu_or_on_own_data_say_nothing(name, value, why):
    study, limit = highwater.open_study(STUDY), MemoryLimit(device_bytes=84_986_665_369)
    question = msgspec.structs.replace(study.question, **{name: value})
    other = msgspec.structs.replace(study, question=question)
    asked = {"model": question.model, "device_name": "H200-141GB", "memory_limit": limit}
    assert why in obstacle(other, **asked)


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
    measured, two = step.measured_length_tokens, {"sequences": 2, "settings": cell.settings}
    here, there = (step_flops(shape, length_tokens=n, **two) for n in (100_000, measured))
    assert step.source == "predicted"
    assert here / step.time_s == pytest.approx(there * step.tokens_per_s / (2 * measured))
    assert "tokens/s, measured at" in "\n".join(map(plain_table, recommendation_tables(found)))
