"""A scaled trace is replayed as its event log is, to the byte."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scaled_trace import STEPS, WORKSPACES, log

from highwater.memory.trace.replay import Replayed, alive_at, replay
from highwater.memory.trace.scaled_trace import ScaledTrace, replay_scaled, scaled_trace
from highwater.model.model import load_model
from highwater.nouns.events import Allocate, EventLog, Free, GiveBack, TraceEvent
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.trainers.trinity.law import bundled_trace
from highwater.units import GIB, MIB

ALLOCATORS = pytest.mark.parametrize("allocator", ["native", "expandable"])


def scaled(trace: ScaledTrace, tokens: int, **asked: Any) -> Replayed:
    """The scaled replay, with what is alive at its peak."""
    found, peak_at = replay_scaled(trace, tokens, **asked)
    return msgspec.structs.replace(found, alive=alive_at(trace.at(tokens), peak_at))


def given_back(events: EventLog, share: int) -> EventLog:
    """One of so many frees is waited for by another stream; some of these never come."""
    changed: list[TraceEvent] = []
    for number, event in enumerate(events.events):
        if not isinstance(event, Free) or number % share:
            changed.append(event)
        elif number % 2:
            changed += [GiveBack(event.id), event]
        else:
            changed.append(GiveBack(event.id))
    return msgspec.structs.replace(events, events=tuple(changed))


@ALLOCATORS
@given(
    steps=STEPS,
    tokens=st.integers(0, 10**4),
    share=st.integers(1, 4),
    spare_bytes=st.one_of(st.none(), st.integers(-(2**26), 2**30)),
)
def test_what_is_replayed_of_any_events_is_what_their_log_gives(
    allocator, steps, tokens, share, spare_bytes
):
    trace = scaled_trace({n: given_back(log(steps, n), share) for n in (64, 1024)})
    capacity_bytes = None
    if spare_bytes is not None:
        capacity_bytes = WORKSPACES + 64 * MIB + max(0, trace.least_bytes(tokens) + spare_bytes)
    asked: dict[str, Any] = {"allocator": allocator, "capacity_bytes": capacity_bytes}
    assert scaled(trace, tokens, **asked) == replay(trace.at(tokens), **asked)


@ALLOCATORS
@given(steps=STEPS, tokens=st.integers(0, 10**4), spare_bytes=st.integers(0, 2**30))
def test_what_gave_nothing_back_does_the_same_on_every_device_that_holds_its_peak(
    allocator, steps, tokens, spare_bytes
):
    trace = scaled_trace({64: log(steps, 64), 1024: log(steps, 1024)})
    free = replay_scaled(trace, tokens, allocator=allocator)
    held = free[0].peak_reserved_bytes + spare_bytes
    assert free[0].retries == 0
    assert replay_scaled(trace, tokens, allocator=allocator, capacity_bytes=held) == free


@ALLOCATORS
@pytest.mark.parametrize("capacity_bytes", [None, 75 * GIB, 60 * GIB, 30 * GIB])
def test_a_bundled_step_is_replayed_as_its_log_is(allocator, capacity_bytes):
    cell = Cell(layout=Layout(gpus=4, ulysses_degree=2), settings=Settings(strategy="fsdp"))
    trace = bundled_trace(load_model("Qwen3-8B").shape, cell)
    assert trace is not None
    asked: dict[str, Any] = {"allocator": allocator, "capacity_bytes": capacity_bytes}
    assert scaled(trace, 16_384, **asked) == replay(trace.at(16_384), **asked)
    blocks = [event for event in trace.at(16_384).events if isinstance(event, Allocate)]
    assert len(blocks) > 50_000
