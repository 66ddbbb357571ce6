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


@given(st.integers(1, 2**23))
def test_the_edge_is_the_traced_one_and_no_length_is_traced_twice(bytes_per_token):
    tracer = Tracer(bytes_per_token)
    (found,) = predict_traced(ask(), MemoryLimit(device_bytes=DEVICE_BYTES), tracer)
    outside = sum(term.bytes for term in found.footprint.outside)
    fits = assert_edge(found, bytes_per_token, DEVICE_BYTES - outside)
    assert len(tracer.asked) == len(set(tracer.asked)) <= 2 * SIZE.bit_length()
    assert found.replayed is not None
    assert found.replayed.fits == fits
    if fits:
        assert (
            found.device_used_bytes == found.replayed.peak_reserved_bytes + outside <= DEVICE_BYTES
        )


@given(st.integers(1, 2**23), st.floats(1, 1.5))
def test_with_an_interval_it_is_the_upper_end_that_fits_and_still_no_length_is_traced_twice(
    bytes_per_token, upper
):
    tracer = Tracer(bytes_per_token)
    known = calibration(upper)
    (likely,) = predict_traced(
        ask(), MemoryLimit(device_bytes=DEVICE_BYTES), Tracer(bytes_per_token)
    )
    (found,) = predict_traced(ask(), MemoryLimit(device_bytes=DEVICE_BYTES), tracer, known)
    outside = sum(term.bytes for term in found.footprint.outside)
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
    factors = Factors(
        allocator="expandable",
        coverage=0.95,
        lower=0.9,
        upper=upper,
        residuals=20,
        is_widened=False,
    )
    known = calibrate(ask(), "trace", bundled=bundled_residuals())
    return msgspec.structs.replace(known, factors=(factors,))


def test_where_the_formula_is_right_two_traces_answer():
    question, memory_limit = ask(), MemoryLimit(device_bytes=DEVICE_BYTES)
    guessed = guess(question, memory_limit)
    tracer = Tracer((34 * GIB - 200 * MIB) // guessed)
    (found,) = predict_traced(question, memory_limit, tracer)
    assert found.capacity_tokens == guessed
    assert sorted(tracer.asked) == [guessed, guessed + STEP]


def test_where_the_upper_end_does_not_fit_the_next_shorter_length_waits_for_no_longer_one():
    question, memory_limit = ask(), MemoryLimit(device_bytes=DEVICE_BYTES)
    guessed = guess(question, memory_limit)
    known = Tracer((34 * GIB - 200 * MIB) // guessed)
    is_shorter_asked = Event()

    def tracer(spec: TrialSpec) -> EventLog:
        if spec.length_tokens == guessed - STEP:
            is_shorter_asked.set()
        if spec.length_tokens == guessed + STEP:
            assert is_shorter_asked.wait(10)
        return known(spec)

    (found,) = predict_traced(question, memory_limit, tracer, calibration(1.02))
    assert found.capacity_tokens < guessed == found.likely_tokens


def test_where_the_formula_is_far_off_the_line_through_two_traces_leads_to_the_edge():
    question, memory_limit = ask(), MemoryLimit(device_bytes=DEVICE_BYTES)
    guessed = guess(question, memory_limit)
    tracer = Tracer(3 * (34 * GIB) // guessed)
    (found,) = predict_traced(question, memory_limit, tracer)
    assert 0 < found.capacity_tokens < 0.4 * guessed
    assert {found.capacity_tokens, found.capacity_tokens + STEP, guessed, guessed + STEP} <= set(
        tracer.asked
    )
    assert len(tracer.asked) <= 6


@given(st.integers(SIZE // 2, 2 * SIZE), st.integers(1, SIZE), st.floats(1, 1.5))
def test_a_token_budget_that_memory_does_not_hold_hides_no_length_whose_trace_fits(
    budget, held, upper
):
    """Shorter lengths fill it: their traces need more than that of one that leaves almost half of
    it empty.
    """
    cell = Cell(
        layout=Layout(),
        settings=Settings(allocator="expandable", token_budget_tokens=budget * STEP),
    )
    question, known = ask(cells=(cell,)), calibration(upper)
    tracer, every = (Tracer((34 * GIB - 200 * MIB) // (held * STEP)) for _ in range(2))
    (found,) = predict_traced(question, MemoryLimit(device_bytes=DEVICE_BYTES), tracer, known)
    outside = sum(term.bytes for term in found.footprint.outside)
    logs = {
        n * STEP: every(question.trial(cell, n * STEP))
        for n in range(1, question.size_of(cell) + 1)
    }

    def longest(limit_bytes: float) -> int:
        memory_limits = {"allocator": "expandable", "capacity_bytes": limit_bytes - outside}
        return max(
            (tokens for tokens, log in logs.items() if replay(log, **memory_limits).fits), default=0
        )

    assert found.likely_tokens == longest(DEVICE_BYTES)
    assert found.capacity_tokens == longest(most_predicted_bytes(DEVICE_BYTES, known.factors[0]))
    assert len(tracer.asked) == len(set(tracer.asked))


def test_the_hosts_limit_is_the_longest_that_is_traced():
    question = ask(
        cells=(
            Cell(
                layout=Layout(),
                settings=Settings(offload=True, loss="chunked", allocator="expandable"),
            ),
        )
    )
    tracer = Tracer(1)
    (found,) = predict_traced(
        question, MemoryLimit(device_bytes=DEVICE_BYTES, host_bytes=16 * GIB), tracer
    )
    assert found.binding in ("host", "ceiling")
    assert max(tracer.asked) == found.capacity_tokens


def test_what_the_tracer_raises_ends_the_prediction():
    def broken(spec: TrialSpec) -> EventLog:
        raise RuntimeError(f"{spec.length_tokens}")

    with pytest.raises(RuntimeError):
        predict_traced(ask(), MemoryLimit(device_bytes=DEVICE_BYTES), broken)


def test_only_our_own_steps_are_traced():
    with pytest.raises(UsageError, match="this engine's own steps"):
        highwater.predict("Qwen3-0.6B", gpus="A100-80GB", exact=True, trainer="trinity")
