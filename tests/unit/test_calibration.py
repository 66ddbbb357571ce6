"""Intervals: the stated share of exchangeable residuals is covered, by counting."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import highwater
from highwater.cli.doctor import _constants_table
from highwater.errors import HighwaterError, UsageError
from highwater.memory.capacity import MemoryLimit, Prediction
from highwater.memory.formula.constants import (
    CONTEXT_BYTES,
    CONTEXT_OF_SEVERAL_BYTES,
    CUBLAS_WORKSPACES_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_BYTES,
    NCCL_SECOND_GROUP_BYTES,
    machine_constants,
)
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
from highwater.memory.question import predicted_question
from highwater.nouns.cluster import Cluster
from highwater.nouns.codec import from_builtins, from_json, to_json
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.hardware import Constants, Reading
from highwater.nouns.study import Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.prediction_tables import prediction_table
from highwater.recommendation.user_measurements import own_constants
from highwater.trials.traced import predict_traced
from highwater.units import GIB, MIB
from places import FOUND, RESULTS, ROOT, script
from trial_specs import rank_that_used

STUDY = FOUND / "qwen3-0.6b-79gib-full.jsonl"
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
def test_an_interval_never_shrinks_with_coverage_and_holds_it(residuals, one, other):
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


def test_what_is_shipped_is_what_the_results_say_and_holds_every_trial():
    shipped = ROOT / "src" / "highwater" / "memory" / "interval" / "residuals.json"
    assert shipped.read_text() == script(RESULTS / "predict" / "residuals.py").text()
    rows = json.loads((RESULTS / "predict" / "traced.json").read_text())
    bundled = {each.trial for each in bundled_residuals()}
    assert bundled <= {key.rpartition("/")[2] for key, row in rows.items() if not row["held_out"]}
    assert len(bundled) >= 18
    by_kind: dict[tuple[str, str], list[float]] = {}
    for each in bundled_residuals():
        by_kind.setdefault((each.method, each.allocator), []).append(each.factor)
    assert set(by_kind) == {*product(("formula", "trace"), ("native", "expandable"))}
    for own in by_kind.values():
        found = learned(own)
        assert found.is_widened
        assert all(found.lower < factor < found.upper for factor in own)


def another_gpu(folder: Path, share: float, **changes: str) -> Path:
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
    assert not found.is_widened
    assert found.upper < max(each.factor for each in bundled if each.method == "formula")


def ran_out(given_bytes: int) -> TrialResult:
    rank = rank_that_used(given_bytes // 3, given_bytes, device_name="NVIDIA H200")
    return TrialResult(outcome=Outcome.OUT_OF_MEMORY, reason="out of memory", ranks=(rank,))


def test_a_trial_that_ran_out_counts_where_it_was_predicted_to_fit():
    spec = highwater.open_study(STUDY).trials[0].spec
    assert residual(spec, ran_out(80 * GIB), "formula", 78 * GIB).factor == 80 / 78
    assert residual(spec, ran_out(80 * GIB), "formula", 81 * GIB) is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: another_gpu(folder, 1.0, highwater="0.0.1"), "is of highwater 0.0.1: this"),
        (lambda folder: simulated(folder), "is of simulated trials"),
        (lambda folder: FOUND / "README.md", "is not a study"),
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
    path, lines = folder / "emptied.jsonl", STUDY.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"trial_finished"' not in line))
    return path


def test_both_sides_of_each_edge_are_traced_before_anything_else_and_no_more_than_the_most():
    study = highwater.open_study(FOUND / "grpo-0.6b-1.jsonl")

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
    assert found.method == "trace"
    assert found.measured_bytes == fit[1].ranks[0].memory.device_used_bytes
    assert found.predicted_bytes == 50 * GIB + CONTEXT_BYTES["cuda"]
    assert taught(*fit, 100) is None, "the replay runs out"
    assert taught(*failed, 100) is None
    missed, budget = taught(*failed, 50), failed[1].ranks[0].budget
    assert missed.measured_bytes == budget.budget_bytes > missed.predicted_bytes


H200 = RESULTS / "predict" / "constants-h200.json"
CARD = Cluster(gpus=1, device_name="H200-141GB", device_bytes=140 * GIB)


def reading(name: str, outside: int, kept: int = 0) -> Reading:
    return Reading(name=name, outside_bytes=outside * MIB, allocator_bytes=kept * MIB)


def constants_of(gpus: int, *readings: Reading) -> Constants:
    context = reading("context", 600)
    return Constants(device_name="a GPU", gpus=gpus, versions={}, readings=(context, *readings))


ONE, TWO = constants_of(1, reading("cuBLAS", 60, 32)), constants_of(2, reading("NCCL group", 300))


def test_readings_add_up_by_name_and_what_is_not_there_is_nothing():
    assert ONE.outside_bytes("context", "cuBLAS", "NCCL group") == 660 * MIB


def test_the_table_has_a_row_for_each_thing_and_a_column_for_each_count():
    table = _constants_table((ONE, TWO))
    assert table.columns == ("", "1 GPU", "2 GPUs")
    *things, (_, *together) = table.rows
    assert things == [
        ("context", "600.0 MiB", "600.0 MiB"),
        ("cuBLAS", "60.0 MiB (32.0 MiB)", "-"),
        ("NCCL group", "-", "300.0 MiB"),
    ]
    assert together == ["660.0 MiB", "900.0 MiB"]


def changed(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    document = json.loads(H200.read_text())
    change(document)
    path = folder / "constants.json"
    path.write_text(json.dumps(document))
    return path


def grow(document: dict[str, Any]) -> None:
    document["constants"][0]["readings"][0]["outside_bytes"] += 20 * GIB


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_own_constants_are_in_the_place_of_those_that_come_along(gpus):
    every = from_builtins(json.loads(H200.read_text())["constants"], tuple[Constants, ...])
    (read,) = (each for each in every if each.gpus == gpus)
    asked = {"gpus": f"{gpus}xH200-141GB", "ulysses": [gpus]}
    prediction = highwater.predict("Qwen3-8B", constants=H200, **asked)
    own = {
        "context": read.context_bytes,
        "NCCL": read.outside_bytes("NCCL group", "NCCL collectives"),
        "NCCL, all-to-all": read.outside_bytes("NCCL all-to-all"),
    }
    for cell in prediction.cells:
        outside = {term.name: term.bytes for term in cell.footprint.outside}
        pinned = {name for name in outside if "pinned memory" in name}
        assert bool(pinned) == cell.cell.settings.uses_host
        assert all(outside.pop(name) > 0 for name in pinned)
        assert outside == {name: size for name, size in own.items() if size}
    assert prediction.memory_limit.constants.device_name == "NVIDIA H200"
    assert from_json(to_json(prediction), Prediction) == prediction


def said_of_constants(prediction: Prediction) -> str:
    notes = prediction_table(prediction, is_explained=True).footnotes
    return "".join(note for note in notes if "as measured on" in note)


def test_of_more_gpus_than_were_read_nccl_is_what_comes_along():
    prediction = highwater.predict("Qwen3-8B", gpus="8xH200-141GB", constants=H200, ulysses=[2])
    own = prediction.memory_limit.constants
    assert own is not None
    for cell in prediction.cells:
        terms = {term.name: term.bytes for term in cell.footprint.outside}
        assert terms["context"] == own.context_bytes[4]
        assert terms["NCCL"] == NCCL_BYTES[8] + NCCL_SECOND_GROUP_BYTES
    assert "; NCCL of 8 GPUs " in said_of_constants(prediction)


def test_a_larger_context_leaves_less_room_and_the_answer_names_where_it_was_measured(tmp_path):
    asked = {"gpus": "H200-141GB", "loss": "full", "allocator": "native"}
    without, with_more = (
        highwater.predict("Qwen3-4B", constants=file, **asked)
        for file in (None, changed(grow, tmp_path))
    )
    assert with_more.cells[0].capacity_tokens < without.cells[0].capacity_tokens
    versions = "torch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, cuDNN 91900"
    assert said_of_constants(with_more).endswith(f"as measured on NVIDIA H200: {versions}")
    assert said_of_constants(without) == ""


def test_a_replay_has_the_workspaces_that_cublas_was_seen_to_take():
    seen = constants_of(1, reading("cuBLAS", 60, 32), reading("cuBLAS, backward", 60, 8))
    settings = {"loss": "full", "allocator": "native"}
    question, _ = predicted_question("Qwen3-0.6B", CARD, "highwater", 4096, settings)

    def empty(_: TrialSpec) -> EventLog:
        events = (Enter("forward"), Allocate(1, 0, 0, 0))
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)

    for constants, workspaces in ((None, 64 * MIB), (machine_constants((seen,)), 40 * MIB)):
        limit = MemoryLimit(device_bytes=40 * GIB, constants=constants)
        (found,) = predict_traced(question, limit, empty)
        assert found.replayed.peak_allocated_bytes == workspaces


def test_own_trials_are_measured_against_the_constants_of_the_gpus_they_ran_on(tmp_path):
    study = highwater.open_study(ROOT / "docs/results/find/qwen3-0.6b-79gib-chunked.jsonl")
    larger = own_constants(changed(grow, tmp_path), CARD)
    elsewhere = msgspec.structs.replace(larger, device_name="NVIDIA A100-SXM4-80GB")
    (alone,), (same,), (other,) = (study_residuals(study, own) for own in (None, larger, elsewhere))
    assert other == alone
    more = larger.context_bytes[1] - CONTEXT_BYTES["cuda"]
    assert same.predicted_bytes - alone.predicted_bytes == more


L4 = {"device_name": "NVIDIA L4"}


def without_reading(gpus: int, reading: int) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["constants"][gpus]["readings"].pop(reading)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("constants"), "is not what `highwater doctor --measure --json` prints"),
        (lambda d: d.update(constants=[]), "has no readings: it was printed without `--measure`"),
        (lambda d: d.update(schema_version=2), "is of version 2, this reads 1"),
        (lambda d: d["constants"][0].update(L4), "is of several kinds of GPUs: NVIDIA H200, "),
        (lambda d: [each.update(L4) for each in d["constants"]], "was read on NVIDIA L4, and H200"),
        (without_reading(0, 0), "lacks readings of context"),
        (without_reading(2, 7), "lacks readings of context, of cuBLAS, or of NCCL"),
        (
            lambda d: d["constants"][0]["readings"][0].update(outside_bytes=-5),
            "lacks readings of context",
        ),
    ],
)
def test_a_file_that_says_nothing_of_these_gpus_is_refused(tmp_path, change, problem):
    with pytest.raises(UsageError) as refused:
        highwater.predict("Qwen3-8B", gpus="H200-141GB", constants=changed(change, tmp_path))
    assert problem in refused.value.problem
    assert "`highwater doctor --" in refused.value.hint


def test_another_trainer_takes_no_constants_of_this_engine():
    with pytest.raises(UsageError, match=r"constants .* Trinity-RFT"):
        highwater.predict("Qwen3-8B", gpus="H200-141GB", constants=H200, trainer="trinity")


def test_the_constants_of_predictions_are_those_that_were_read_on_an_h200():
    document = json.loads(H200.read_text())
    one, two, four = from_builtins(document["constants"], tuple[Constants, ...])
    assert [each.gpus for each in (one, two, four)] == [1, 2, 4]

    def is_near(known: int, read: Constants, within: float, *names: str) -> None:
        assert known == pytest.approx(read.outside_bytes(*names), rel=within)

    ours = [reading.name for reading in one.readings]
    is_near(CONTEXT_BYTES["cuda"], one, 0.005, *ours)
    ours.remove("FSDP2")
    for each in (two, four):
        is_near(CONTEXT_OF_SEVERAL_BYTES["cuda"], each, 0.015, *ours)
        is_near(NCCL_BYTES[each.gpus], each, 0.002, "NCCL group", "NCCL collectives")
        is_near(NCCL_ALL_TO_ALL_BYTES[each.gpus], each, 0.02, "NCCL all-to-all")
    kept = {reading.name: reading.allocator_bytes for reading in one.readings}
    assert (kept["cuBLAS"], kept["cuBLAS, backward"]) == CUBLAS_WORKSPACES_BYTES
