"""Intervals: the stated share of exchangeable residuals is covered, by counting; too few are said
to be; studies that teach.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import highwater
from highwater.errors import HighwaterError
from highwater.memory.capacity import Prediction
from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.interval.calibration import (
    COVERAGE,
    LEAST_WIDENING,
    Factors,
    calibrate,
    factors_of,
    interval,
    least_residuals,
    most_predicted_bytes,
)
from highwater.memory.interval.residuals import (
    MOST_TRACED,
    Residual,
    bundled_residuals,
    residual,
    study_residuals,
    traced_residual,
    worth_tracing,
)
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.study import Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.units import GIB
from places import script
from trial_specs import rank_that_used

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
STUDY = RESULTS / "find" / "qwen3-0.6b-79gib-full.jsonl"
SHARES = st.floats(0.5, 2)
COVERAGES = st.sampled_from([0.5, 0.6, 0.75, 0.8, 0.9, 0.95, 0.99])


def learned(residuals: list[float], coverage: float = COVERAGE) -> Factors:
    found = factors_of(residuals, "expandable", coverage)
    assert found is not None
    return found


@given(st.lists(SHARES, min_size=2, max_size=120), COVERAGES)
def test_whichever_trial_comes_last_the_stated_share_of_them_is_covered(residuals, coverage):
    """Exchangeable: each was as likely to be the one that is predicted. So this is the coverage,
    counted, with no luck in it.
    """
    others = [[*residuals[:i], *residuals[i + 1 :]] for i in range(len(residuals))]
    each = [(value, learned(rest, coverage)) for value, rest in zip(residuals, others, strict=True)]
    if any(factors.is_widened for _, factors in each):
        return
    needed = coverage * len(residuals) - 1e-9
    assert sum(value <= factors.upper for value, factors in each) >= needed
    assert sum(value >= factors.lower for value, factors in each) >= needed
    within = sum(factors.lower <= value <= factors.upper for value, factors in each)
    assert within >= (2 * coverage - 1) * len(residuals) - 1e-9


@given(st.lists(SHARES, min_size=1, max_size=60), COVERAGES, COVERAGES)
def test_an_interval_never_shrinks_with_the_coverage_and_holds_the_prediction(
    residuals, one, other
):
    narrow, wide = (learned(residuals, coverage) for coverage in sorted((one, other)))
    assert wide.lower <= narrow.lower <= 1 <= narrow.upper <= wide.upper
    assert narrow.lower >= 0


@given(st.lists(SHARES, min_size=1, max_size=60), COVERAGES)
def test_too_few_residuals_are_said_to_be_and_widened_beyond_the_extremes(residuals, coverage):
    found = learned(residuals, coverage)
    assert found.residuals == len(residuals)
    assert found.is_widened == (len(residuals) < least_residuals(coverage))
    if found.is_widened:
        assert found.upper >= max(residuals) + LEAST_WIDENING
        assert found.lower <= max(0, min(residuals) - LEAST_WIDENING)


def test_nineteen_trials_are_what_95_percent_take():
    assert least_residuals(0.95) == 19
    assert not learned([1.0] * 19).is_widened
    assert learned([1.0] * 18).is_widened
    assert factors_of([], "native") is None


@given(st.lists(SHARES, min_size=1, max_size=30), st.integers(1, 200 * GIB))
def test_the_largest_prediction_that_fits_is_the_one_whose_upper_end_does(residuals, room_bytes):
    factors = learned(residuals)
    most = most_predicted_bytes(room_bytes, factors)
    assert interval(most, factors).high_bytes <= room_bytes < interval(most + 1, factors).high_bytes


def test_what_is_shipped_is_what_the_committed_results_say():
    shipped = ROOT / "src" / "highwater" / "memory" / "interval" / "residuals.json"
    assert shipped.read_text() == script(RESULTS / "predict" / "residuals.py").text()


def test_no_trial_that_is_held_out_is_shipped():
    rows = json.loads((RESULTS / "predict" / "traced.json").read_text())
    bundled = {each.trial for each in bundled_residuals()}
    assert bundled <= {key.rpartition("/")[2] for key, row in rows.items() if not row["held_out"]}
    assert len(bundled) >= 18


def test_the_intervals_hold_every_trial_that_they_were_learned_from():
    by_kind: dict[tuple[str, str], list[float]] = {}
    for each in bundled_residuals():
        by_kind.setdefault((each.method, each.allocator), []).append(each.factor)
    assert set(by_kind) == {*product(("formula", "trace"), ("native", "expandable"))}
    for own in by_kind.values():
        found = learned(own)
        assert found.is_widened
        assert all(found.lower < factor < found.upper for factor in own)


def another_gpu(folder: Path, share: float, **changes: str) -> Path:
    """The study of trials that took this share of what an H200 measured, and more where they ran
    out.
    """
    path = folder / "mine.jsonl"
    lines = [json.loads(line) for line in STUDY.read_text().splitlines()]
    for line in lines:
        for rank in line.get("result", {}).get("ranks", ()):
            rank["memory"]["device_used_bytes"] = round(rank["memory"]["device_used_bytes"] * share)
            rank["device_name"] = "NVIDIA H100 80GB HBM3"
            rank["versions"] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def predicted(*studies: Path, **asked: Any) -> Prediction:
    known = {"gpus": "1xH200-141GB", **asked}
    return highwater.predict("Qwen3-0.6B", calibrate_with=studies, **known)


def test_own_trials_move_the_interval(tmp_path):
    asked = {"allocator": "expandable", "loss": "full", "offload": False}
    alone, taught = predicted(**asked), predicted(another_gpu(tmp_path, 1.1), **asked)
    assert alone.calibration is not None
    assert taught.calibration is not None
    assert taught.calibration.own_trials == 1
    assert taught.calibration.device_names == ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    (before,), (after,) = alone.calibration.factors, taught.calibration.factors
    assert after.residuals == before.residuals + 1
    assert after.upper > 1.1 > before.upper
    assert taught.cells[0].capacity_tokens < alone.cells[0].capacity_tokens
    assert taught.cells[0].likely_tokens == alone.cells[0].likely_tokens


def test_trials_that_come_along_teach_nothing_twice():
    """Also where another tracer predicted them."""
    assert predicted(STUDY, STUDY).calibration == predicted().calibration
    question, bundled = highwater.open_study(STUDY).question, bundled_residuals()
    halves = [(each, each.predicted_bytes // 2) for each in bundled]
    again = [msgspec.structs.replace(each, predicted_bytes=half) for each, half in halves]
    usual = calibrate(question, "trace", bundled=bundled)
    assert calibrate(question, "trace", bundled=bundled, own=again) == usual


def test_enough_own_trials_make_the_coverage_by_counting():
    study, bundled = highwater.open_study(STUDY), bundled_residuals()
    (example, *_) = study_residuals(study)
    near = msgspec.structs.replace(example, allocator="expandable")
    measured = range(near.predicted_bytes, near.predicted_bytes + 40)
    own = [msgspec.structs.replace(near, measured_bytes=each) for each in measured]
    found = calibrate(study.question, "formula", bundled=bundled, own=own).of("expandable")
    assert found is not None
    assert not found.is_widened
    assert found.upper < max(each.factor for each in bundled if each.method == "formula")


def ran_out(given_bytes: int) -> TrialResult:
    rank = rank_that_used(given_bytes // 3, given_bytes, device_name="NVIDIA H200")
    return TrialResult(outcome=Outcome.OUT_OF_MEMORY, reason="out of memory", ranks=(rank,))


def test_a_trial_that_ran_out_counts_where_it_was_predicted_to_fit():
    spec = highwater.open_study(STUDY).trials[0].spec
    missed = residual(spec, ran_out(80 * GIB), "formula", 78 * GIB)
    assert missed is not None
    assert missed.factor == 80 / 78
    assert residual(spec, ran_out(80 * GIB), "formula", 81 * GIB) is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: another_gpu(folder, 1.0, highwater="0.0.1"), "is of highwater 0.0.1: this"),
        (lambda folder: simulated(folder), "is of simulated trials"),
        (lambda folder: RESULTS / "find" / "README.md", "is not a study"),
        (lambda folder: folder / "none.jsonl", "cannot be read"),
        (lambda folder: emptied(folder), "has no trial that says how much memory it used"),
    ],
)
def test_a_study_that_teaches_nothing_about_predictions_is_refused(tmp_path, make, problem):
    path = make(tmp_path)
    with pytest.raises(HighwaterError) as refused:
        predicted(path)
    assert problem in refused.value.problem
    assert str(path) in refused.value.problem


def simulated(folder: Path) -> Path:
    path = folder / "simulated.jsonl"
    asked = {"gpus": [1], "memory": "80GiB", "device": "cuda", "max_length": "32k"}
    highwater.find("Qwen3-0.6B", dry_run=True, study=str(path), **asked)
    return path


def emptied(folder: Path) -> Path:
    """A study whose search was killed in its first trial."""
    path, lines = folder / "emptied.jsonl", STUDY.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"trial_finished"' not in line))
    return path


def test_both_sides_of_each_edge_are_traced_before_anything_else_and_no_more_than_the_most():
    study = highwater.open_study(RESULTS / "find" / "grpo-0.6b-1.jsonl")

    def chosen(question: Question) -> list[tuple[str, int]]:
        specs = (each.spec for each in worth_tracing(study, question))
        return [(spec.settings.label, spec.length_tokens) for spec in specs]

    found = chosen(study.question)
    edges = [("vanilla", 98_304), ("Env", 98_304), ("vanilla", 106_496), ("Env", 106_496)]
    assert found[:4] == edges
    assert len(study.trials) == 9
    assert len(found) == MOST_TRACED == len(set(found))
    one = msgspec.structs.replace(study.question, cells=study.question.cells[1:])
    assert {label for label, _ in chosen(one)} == {"Env"}


def held(gib: float) -> EventLog:
    events = (Enter("forward"), Allocate(1, round(gib * GIB), 0, 0))
    return EventLog(source="recorded", versions={}, operators=("mm",), events=events)


def test_a_traced_trial_is_measured_against_its_replay_in_the_memory_that_it_was_given():
    study = highwater.open_study(STUDY)

    def first(outcome: Outcome) -> tuple[TrialSpec, TrialResult]:
        ended = ((each.spec, each.result) for each in study.trials if each.result is not None)
        return next((spec, result) for spec, result in ended if result.outcome is outcome)

    def taught(spec: TrialSpec, result: TrialResult, held_gib: float) -> Residual | None:
        return traced_residual(study.question.model.shape, spec, result, held(held_gib), rank=0)

    fit, failed = first(Outcome.FIT), first(Outcome.OUT_OF_MEMORY)
    found = taught(*fit, 50)
    assert found is not None
    assert found.method == "trace"
    assert found.measured_bytes == fit[1].ranks[0].memory.device_used_bytes
    assert found.predicted_bytes == 50 * GIB + CONTEXT_BYTES["cuda"]
    assert taught(*fit, 100) is None, "the replay runs out"
    assert taught(*failed, 100) is None
    missed, budget = taught(*failed, 50), failed[1].ranks[0].budget
    assert missed is not None
    assert budget is not None
    assert missed.measured_bytes == budget.budget_bytes > missed.predicted_bytes
