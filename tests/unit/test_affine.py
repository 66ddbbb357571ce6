"""One trace for every length: lines through two logs say what a third has, and logs that are on no lines are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.prediction.affine import affine
from highwater.prediction.constants import CUBLAS_WORKSPACES_BYTES
from highwater.prediction.replay import replay
from highwater.spec.events import Allocate, Enter, Event, EventLog, Free, ReleaseCached
from highwater.spec.settings import Allocator

STEPS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 2), st.booleans()), min_size=1, max_size=40)
"""Fixed bytes, bytes per token, stream; and whether the oldest that is alive is freed afterwards."""
WORKSPACES = sum(CUBLAS_WORKSPACES_BYTES)


def log(steps: list[tuple[int, int, int, bool]], tokens: int) -> EventLog:
    events: list[Event] = [Enter("setup")]
    alive: list[int] = []
    for number, (fixed, slope, stream, is_freed) in enumerate(steps, start=7):
        events.append(Allocate(number, fixed + slope * tokens, stream, number % 2, 0))
        alive.append(number)
        if is_freed:
            events.append(Free(alive.pop(0)))
        if number % 5 == 0:
            events += [Enter("backward"), ReleaseCached()]
    return EventLog(source="traced", versions={"torch": "2"}, operators=("mm", "add"), events=tuple(events))


def renumbered(events: EventLog) -> EventLog:
    """Allocations count from 1: which number they have means nothing."""
    numbers: dict[int, int] = {}
    fresh: list[Event] = []
    for event in events.events:
        match event:
            case Allocate():
                numbers[event.id] = len(numbers) + 1
                fresh.append(msgspec.structs.replace(event, id=numbers[event.id]))
            case Free():
                fresh.append(Free(numbers[event.id]))
            case _:
                fresh.append(event)
    return msgspec.structs.replace(events, events=tuple(fresh))


@given(STEPS, st.integers(1, 10**6))
def test_the_lines_through_two_lengths_give_any_other(steps: list[tuple[int, int, int, bool]], tokens: int) -> None:
    lines = affine({64: log(steps, 64), 1024: log(steps, 1024)})
    assert lines.at(tokens) == renumbered(log(steps, tokens))
    assert msgspec.json.decode(msgspec.json.encode(lines), type=type(lines)) == lines


@given(STEPS, st.integers(0, 10**4))
def test_what_is_alive_at_once_is_what_pages_without_end_have_allocated(
    steps: list[tuple[int, int, int, bool]], tokens: int
) -> None:
    lines = affine({64: log(steps, 64), 1024: log(steps, 1024)})
    free = replay(lines.at(tokens), allocator="expandable")
    assert WORKSPACES + lines.least_bytes(tokens) == free.peak_allocated_bytes


@pytest.mark.parametrize("allocator", ["native", "expandable"])
@given(steps=STEPS, tokens=st.integers(0, 10**4), lacking_bytes=st.integers(1, 2**30))
def test_no_allocator_does_with_less_than_what_is_alive_at_once(
    allocator: Allocator, steps: list[tuple[int, int, int, bool]], tokens: int, lacking_bytes: int
) -> None:
    lines = affine({64: log(steps, 64), 1024: log(steps, 1024)})
    capacity_bytes = WORKSPACES + lines.least_bytes(tokens) - lacking_bytes
    assert not replay(lines.at(tokens), allocator=allocator, capacity_bytes=capacity_bytes).fits


def test_what_is_on_no_line_is_refused() -> None:
    steps = [(0, 4, 0, False)]
    bent = msgspec.structs.replace(log(steps, 1024), events=(Enter("setup"), Allocate(7, 999, 0, 1, 0)))
    with pytest.raises(ValueError, match="not on the line"):
        affine({64: log(steps, 64), 512: log(steps, 512), 1024: bent})
    with pytest.raises(ValueError, match="no whole number of bytes"):
        affine({64: log(steps, 64), 1024: bent})
    with pytest.raises(ValueError, match="2 events at 64 tokens, 3 at 1024"):
        affine({64: log(steps, 64), 1024: log([*steps, (1, 0, 0, False)], 1024)})
    with pytest.raises(ValueError, match="Free"):
        affine({64: log([(0, 4, 0, True)], 64), 1024: log([(0, 4, 0, False), (0, 4, 0, False)], 1024)})
