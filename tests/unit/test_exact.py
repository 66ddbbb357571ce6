"""Prediction by traces: the edge is that of the traced steps, wherever the formula begins."""

import json
from pathlib import Path
from threading import Event
from typing import Any, Self

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import without_checksums

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit, Prediction
from highwater.memory.interval.calibration import Factors, calibrate, most_predicted_bytes
from highwater.memory.interval.residuals import bundled_residuals
from highwater.memory.predictor import predict_cell, predict_cells
from highwater.memory.trace.replay import replay
from highwater.memory.trainers import MEMORY, formula_of_trials
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.request import Request
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, Study
from highwater.nouns.trial import TrialSpec
from highwater.search import start_length as predicted_start
from highwater.search.bracket import HINT_COST
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import SimulatedRunner
from highwater.trials.traced import predict_traced
from highwater.units import GIB, MIB
from places import FOUND, machine_with
from trial_specs import answers_among, fits_up_to, grid_of, question_on

STEP, SIZE = 4096, 128
DEVICE_BYTES = 40 * GIB
LIMIT = MemoryLimit(device_bytes=DEVICE_BYTES)


def ask(**changes) -> Question:
    cells = (Cell(layout=Layout(), settings=Settings(allocator="expandable")),)
    fields = {"device_total_bytes": DEVICE_BYTES, "cells": cells, **changes}
    return question_on(grid_of(STEP, SIZE * STEP), **fields)


def guess(question: Question, memory_limit: MemoryLimit) -> int:
    predictor = formula_of_trials(question, question.cells[0], memory_limit.device_bytes)
    assert predictor is not None
    return predict_cell(predictor).capacity_tokens


class Tracer:
    """Steps that need so many bytes per token; remembers what it was asked."""

    def __init__(self, bytes_per_token: int) -> None:
        self.bytes_per_token = bytes_per_token
        self.asked: list[int] = []

    def __call__(self, spec: TrialSpec) -> EventLog:
        self.asked.append(spec.length_tokens)
        tokens_bytes = self.bytes_per_token * spec.length_tokens * spec.sequences
        events = (Allocate(1, 5 * GIB, 0, 0), Enter("forward"), Allocate(2, tokens_bytes, 0, 0))
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)


def assert_edge(found: CellPrediction, bytes_per_token: int, capacity_bytes: float) -> bool:
    """The answer is that of replaying every length; returns whether any fits."""
    every = Tracer(bytes_per_token)
    logs = [every(ask().trial(ask().cells[0], n * STEP)) for n in range(1, SIZE + 1)]
    limits = {"allocator": "expandable", "capacity_bytes": capacity_bytes}
    fitting = sum(replay(log, **limits).fits for log in logs)
    assert found.capacity_tokens == fitting * STEP
    assert found.binding == ("ceiling" if fitting == SIZE else "device")
    assert found.does_not_fit_tokens == (None if fitting == SIZE else (fitting + 1) * STEP)
    return fitting > 0


@given(st.integers(1, 2**23), st.floats(1, 1.5))
def test_the_edge_is_the_traced_one_and_no_length_is_traced_twice(bytes_per_token, upper):
    (alone, tracer), known = (Tracer(bytes_per_token) for _ in range(2)), calibration(upper)
    (likely,) = predict_traced(ask(), LIMIT, alone)
    (found,) = predict_traced(ask(), LIMIT, tracer, known)
    outside = sum(term.bytes for term in found.footprint.outside)
    fits = assert_edge(likely, bytes_per_token, DEVICE_BYTES - outside)
    assert likely.replayed.fits == fits
    assert len(alone.asked) == len(set(alone.asked)) <= 2 * SIZE.bit_length()
    used = likely.device_used_bytes
    assert not fits or used == likely.replayed.peak_reserved_bytes + outside <= DEVICE_BYTES
    capacity = most_predicted_bytes(DEVICE_BYTES, known.factors[0]) - outside
    fits = assert_edge(found, bytes_per_token, capacity)
    assert found.capacity_tokens <= found.likely_tokens == likely.capacity_tokens
    assert likely.likely_tokens == likely.capacity_tokens
    assert len(tracer.asked) == len(set(tracer.asked))
    assert found.interval is not None
    assert found.headroom_bytes == DEVICE_BYTES - found.device_used_bytes
    if fits:
        assert found.interval.high_bytes <= DEVICE_BYTES
        assert found.headroom_bytes >= 0


def calibration(upper: float) -> Any:
    usual = {"allocator": "expandable", "coverage": 0.95, "residuals": 20, "is_widened": False}
    known = calibrate(ask(), "trace", bundled=bundled_residuals())
    factors = Factors(**usual, lower=0.9, upper=upper)
    return msgspec.structs.replace(known, factors=(factors,))


def test_where_the_formula_is_right_two_traces_answer():
    question = ask()
    guessed = guess(question, LIMIT)
    tracer = Tracer((34 * GIB - 200 * MIB) // guessed)
    (found,) = predict_traced(question, LIMIT, tracer)
    assert found.capacity_tokens == guessed
    assert sorted(tracer.asked) == [guessed, guessed + STEP]


def test_where_the_upper_end_does_not_fit_the_next_shorter_length_waits_for_no_longer_one():
    question = ask()
    guessed = guess(question, LIMIT)
    known = Tracer((34 * GIB - 200 * MIB) // guessed)
    is_shorter_asked = Event()

    def tracer(spec: TrialSpec) -> EventLog:
        if spec.length_tokens == guessed - STEP:
            is_shorter_asked.set()
        if spec.length_tokens == guessed + STEP:
            assert is_shorter_asked.wait(10)
        return known(spec)

    (found,) = predict_traced(question, LIMIT, tracer, calibration(1.02))
    assert found.capacity_tokens < guessed == found.likely_tokens


def test_where_the_formula_is_far_off_the_line_through_two_traces_leads_to_the_edge():
    question = ask()
    guessed = guess(question, LIMIT)
    tracer = Tracer(3 * (34 * GIB) // guessed)
    (found,) = predict_traced(question, LIMIT, tracer)
    assert 0 < found.capacity_tokens < 0.4 * guessed
    edges = {found.capacity_tokens, found.capacity_tokens + STEP, guessed, guessed + STEP}
    assert edges <= set(tracer.asked)
    assert len(tracer.asked) <= 6


@given(st.integers(SIZE // 2, 2 * SIZE), st.integers(1, SIZE), st.floats(1, 1.5))
def test_a_token_budget_of_no_memory_hides_no_length_whose_trace_fits(budget, held, upper):
    """Shorter lengths fill it: their traces need more than one that leaves almost half empty."""
    packed = Settings(allocator="expandable", token_budget_tokens=budget * STEP)
    cell = Cell(layout=Layout(), settings=packed)
    question, known = ask(cells=(cell,)), calibration(upper)
    tracer, every = (Tracer((34 * GIB - 200 * MIB) // (held * STEP)) for _ in range(2))
    (found,) = predict_traced(question, LIMIT, tracer, known)
    outside = sum(term.bytes for term in found.footprint.outside)
    lengths = [n * STEP for n in range(1, question.size_of(cell) + 1)]
    logs = {length: every(question.trial(cell, length)) for length in lengths}

    def longest(limit_bytes: float) -> int:
        memory_limits = {"allocator": "expandable", "capacity_bytes": limit_bytes - outside}
        fitting = [tokens for tokens, log in logs.items() if replay(log, **memory_limits).fits]
        return max(fitting, default=0)

    assert found.likely_tokens == longest(DEVICE_BYTES)
    assert found.capacity_tokens == longest(most_predicted_bytes(DEVICE_BYTES, known.factors[0]))
    assert len(tracer.asked) == len(set(tracer.asked))


def test_the_hosts_limit_ends_traces_as_an_error_does_and_only_our_steps_have_any():
    offloaded = Settings(offload=True, loss="chunked", allocator="expandable")
    question = ask(cells=(Cell(layout=Layout(), settings=offloaded),))
    tracer, limit = Tracer(1), MemoryLimit(device_bytes=DEVICE_BYTES, host_bytes=16 * GIB)
    (found,) = predict_traced(question, limit, tracer)
    assert found.binding in ("host", "ceiling")
    assert max(tracer.asked) == found.capacity_tokens

    def broken(spec: TrialSpec) -> EventLog:
        raise RuntimeError(f"{spec.length_tokens}")

    with pytest.raises(RuntimeError):
        predict_traced(ask(), LIMIT, broken)
    with pytest.raises(UsageError, match="this engine's own steps"):
        highwater.predict("Qwen3-0.6B", gpus="A100-80GB", exact=True, trainer="trinity")


THOUSAND, GRID_SIZE = 1000, 64
ASKED: dict[str, Any] = {"gpus": [1], "memory": "79.15GiB"}
ASKED |= {"allocator": "expandable", "loss": "full", "offload": False}
ASKED |= {"activations": "gpu", "ulysses": [1]}


def question_of_cells(*cells: Cell, **changes: Any) -> Question:
    return question_on(
        grid_of(THOUSAND, GRID_SIZE * THOUSAND), *cells, device_total_bytes=80 * GIB, **changes
    )


@given(st.integers(0, GRID_SIZE), st.integers(0, 2 * GRID_SIZE))
def test_a_right_predicted_edge_costs_two_trials_and_a_wrong_one_no_answer(capacity, expected):
    cell = Cell(layout=Layout(), settings=Settings())
    question = question_of_cells(cell)
    runner = SimulatedRunner(fits_up_to(capacity * THOUSAND))
    events = search_cells(question, runner, expected={cell: expected * THOUSAND}.get)
    (answer,) = answers_among(events)
    assert answer.capacity_tokens == capacity * THOUSAND
    if expected == capacity:
        assert answer.trials <= 2
    assert answer.trials <= 2 * max(1, capacity).bit_length() + 2 + HINT_COST


def predicted(folder: Path, **changes: Any) -> Path:
    asked: dict[str, Any] = {"gpus": "1xH200-141GB", "gpu_memory": "79.15GiB", "loss": "full"}
    asked |= {"allocator": "expandable", "offload": False, "activations": "gpu", **changes}
    named = {name: value for name, value in asked.items() if value is not None}
    found = highwater.predict(named.pop("model", "Qwen3-0.6B"), **named)
    path = folder / "prediction.json"
    path.write_text(to_json(found), encoding="utf-8")
    return path


def find(path: Path, **changes: Any) -> Study:
    asked = {"model": "Qwen3-0.6B", "device": "cuda", "dry_run": True, "prediction": str(path)}
    return highwater.find(**asked | ASKED | changes)


@pytest.mark.parametrize("has_intervals", [True, False])
def test_the_first_trial_of_a_search_is_the_likely_length_in_the_file(tmp_path, has_intervals):
    """A file from before there were intervals names it as its capacity."""
    path = predicted(tmp_path)
    told = json.loads(path.read_text())
    if not has_intervals:
        del told["calibration"], told["cells"][0]["likely_tokens"], told["cells"][0]["interval"]
    told["cells"][0]["likely_tokens" if has_intervals else "capacity_tokens"] = 61_440
    path.write_text(json.dumps(told))
    assert find(path).trials[0].spec.length_tokens == 61_440


@pytest.mark.corpus
@pytest.mark.parametrize(
    "path", sorted(FOUND.glob("*.prediction.json")), ids=lambda path: path.name
)
def test_every_prediction_that_was_made_before_can_still_be_read(path):
    found = from_json(path.read_bytes(), Prediction)
    assert found.cells
    assert all(cell.likely_edge_tokens >= cell.capacity_tokens for cell in found.cells)


def test_a_cell_that_a_file_does_not_name_is_left_to_the_formula_with_a_note(tmp_path):
    study = find(predicted(tmp_path), allocator=None)
    assert [answer.cell.settings.label for answer in study.answers] == ["vanilla", "Env"]
    assert any(note.endswith(" nothing set, 1 GPU") for note in study.notes)


def test_a_study_says_what_was_predicted_of_each_cell_and_by_what(tmp_path):
    path = predicted(tmp_path)
    (told,) = from_json(path.read_bytes(), Prediction).cells
    find(path, allocator=None, study=str(tmp_path / "study.jsonl"))
    vanilla, env = highwater.open_study(tmp_path / "study.jsonl").expectations
    assert (env.cell.settings.label, env.likely_tokens) == ("Env", told.likely_edge_tokens)
    assert env.prediction == str(path)
    assert (vanilla.cell.settings.label, vanilla.prediction) == ("vanilla", "formula")
    assert vanilla.likely_tokens > 0
    beginning = highwater.study_report(tmp_path / "study.jsonl").beginning
    assert beginning.predictions == (str(path),)
    assert beginning.likely_tokens == {"expandable, 1 GPU": told.likely_edge_tokens}


def test_a_prediction_that_came_after_the_trials_is_not_recorded(tmp_path):
    asked: dict[str, Any] = {"study": str(tmp_path / "study.jsonl")}
    before = find(Path("formula"), **asked)
    assert [each.prediction for each in before.expectations] == ["formula"]
    assert find(predicted(tmp_path), **asked).expectations == before.expectations
    lines = (tmp_path / "study.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "older.jsonl").write_text(
        without_checksums("".join(line for line in lines if '"cell_expected"' not in line))
    )
    assert find(predicted(tmp_path), study=str(tmp_path / "older.jsonl")).expectations == ()


def test_a_formula_that_says_nothing_of_the_trials_is_not_recorded():
    cell = Cell(layout=Layout(), settings=Settings())
    question = question_of_cells(cell)
    shape = msgspec.structs.replace(question.model.shape, model_type="of no kind")
    of_no_kind = msgspec.structs.replace(question.model, shape=shape)

    def is_expected(**changes: Any) -> bool:
        asked = msgspec.structs.replace(question, **changes)
        request = Request(model="Qwen3-0.6B")
        return predicted_start.expectation(request, asked, cell, None) is not None

    assert is_expected()
    assert not is_expected(device_total_bytes=None)
    assert not is_expected(device="cpu")
    assert not is_expected(data="my.batches:packed")
    assert not is_expected(model=of_no_kind)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "Qwen3-1.7B"}, "speaks of Qwen3-1.7B, not of Qwen3-0.6B"),
        ({"gpu_memory": "40GiB"}, "speaks of GPUs with 40.00 GiB, these trials have 79.15 GiB"),
        ({"loss": "chunked"}, "says nothing of expandable, 1 GPU"),
        ({"length": "32k"}, "longest lengths"),
        ({"trainer": "trinity", "allocator": "native", "activations": None}, "longest lengths"),
    ],
)
def test_a_file_that_speaks_of_other_trials_is_refused(tmp_path, changes, problem):
    with pytest.raises(UsageError, match=problem):
        find(predicted(tmp_path, **changes))


def test_what_is_no_prediction_is_refused_and_a_dry_run_traces_nothing(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        find(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a prediction"):
        find(tmp_path / "other.json")
    with pytest.raises(UsageError, match="a dry run traces nothing"):
        find(Path("trace"))


def test_cells_are_traced_in_their_order_and_the_search_begins_where_the_traces_end(monkeypatch):
    cells = tuple(
        Cell(layout=Layout(), settings=Settings(allocator=name))
        for name in ("native", "expandable")
    )
    question = question_of_cells(*cells, memory_budget_bytes=40 * GIB)
    monkeypatch.setattr(predicted_start, "probe", lambda: machine_with(1))
    monkeypatch.setattr(predicted_start, "CachedTracer", StepTracer)
    request = Request(model="Qwen3-0.6B", prediction="trace")
    assert predicted_start.check_prediction(request, question) == ()
    with predicted_start.predicted_start(request, question) as expected:
        capacities = [expected(cell) for cell in cells]
    limit = MemoryLimit(device_bytes=40 * GIB)
    first, *_ = predict_cells(question, limit, MEMORY["highwater"].predictor)
    room = 40 * GIB - first.footprint.outside_bytes
    assert capacities == [room // StepTracer.BYTES_PER_STEP * THOUSAND] * 2


class StepTracer:
    """Trials that need so much for each step of the grid."""

    BYTES_PER_STEP = GIB

    def __init__(self, directory: Path, *, kernel: str) -> None:
        assert directory.name == "traces"
        assert kernel == "cudnn"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, spec: TrialSpec) -> EventLog:
        events = (
            Enter("forward"),
            Allocate(1, self.BYTES_PER_STEP * (spec.length_tokens // THOUSAND), 0, 0),
        )
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)
