"""Prediction by traces: the edge is that of the traced steps, wherever the formula begins, and each
length is traced once.
"""

from threading import Event

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.interval.calibration import (
    Calibration,
    Factors,
    calibrate,
    most_predicted_bytes,
)
from highwater.memory.interval.residuals import bundled_residuals
from highwater.memory.predictor import predict_cell
from highwater.memory.trace.replay import replay
from highwater.memory.trainers import predictor_of
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import TrialSpec
from highwater.trials.traced import predict_traced
from highwater.units import GIB, MIB
from trial_specs import grid_of, question_on

STEP, SIZE = 4096, 128
DEVICE_BYTES = 40 * GIB
LIMIT = MemoryLimit(device_bytes=DEVICE_BYTES)


def ask(**changes) -> Question:
    cells = (Cell(layout=Layout(), settings=Settings(allocator="expandable")),)
    fields = {"device_total_bytes": DEVICE_BYTES, "cells": cells, **changes}
    return question_on(grid_of(STEP, SIZE * STEP), **fields)


def guess(question: Question, memory_limit: MemoryLimit) -> int:
    predictor = predictor_of(question, question.cells[0], memory_limit.device_bytes)
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
def test_the_edge_is_the_traced_one_or_the_upper_end_that_fits_and_no_length_is_traced_twice(
    bytes_per_token, upper
):
    (alone, tracer), known = (Tracer(bytes_per_token) for _ in range(2)), calibration(upper)
    (likely,) = predict_traced(ask(), LIMIT, alone)
    (found,) = predict_traced(ask(), LIMIT, tracer, known)
    outside = sum(term.bytes for term in found.footprint.outside)
    fits = assert_edge(likely, bytes_per_token, DEVICE_BYTES - outside)
    assert likely.replayed is not None
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


def calibration(upper: float) -> Calibration:
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
def test_a_token_budget_that_memory_does_not_hold_hides_no_length_whose_trace_fits(
    budget, held, upper
):
    """Shorter lengths fill it: their traces need more than that of one that leaves almost half of
    it empty.
    """
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


def test_the_hosts_limit_is_the_longest_that_is_traced():
    offloaded = Settings(offload=True, loss="chunked", allocator="expandable")
    question = ask(cells=(Cell(layout=Layout(), settings=offloaded),))
    tracer, limit = Tracer(1), MemoryLimit(device_bytes=DEVICE_BYTES, host_bytes=16 * GIB)
    (found,) = predict_traced(question, limit, tracer)
    assert found.binding in ("host", "ceiling")
    assert max(tracer.asked) == found.capacity_tokens


def test_what_the_tracer_raises_ends_the_prediction():
    def broken(spec: TrialSpec) -> EventLog:
        raise RuntimeError(f"{spec.length_tokens}")

    with pytest.raises(RuntimeError):
        predict_traced(ask(), LIMIT, broken)


def test_only_our_own_steps_are_traced():
    with pytest.raises(UsageError, match="this engine's own steps"):
        highwater.predict("Qwen3-0.6B", gpus="A100-80GB", exact=True, trainer="trinity")
