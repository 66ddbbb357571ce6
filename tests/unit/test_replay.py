"""A replay tells peaks, by phase and by what is alive; and never less reserved than allocated."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.replay import replay
from highwater.nouns.codec import from_builtins, to_builtins
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack, ReleaseCached
from highwater.units import MIB

WORKSPACES = sum(CUBLAS_WORKSPACES_BYTES)
LOG = EventLog(
    source="traced",
    versions={},
    operators=("mm", "add"),
    events=(
        Allocate(1, 100 * MIB, 0, 0),
        Enter("forward"),
        Allocate(2, 40 * MIB, 0, 1),
        Allocate(3, 40 * MIB, 0, 1),
        Allocate(4, 0, 0, 1),
        Free(2),
        Enter("backward"),
        Allocate(5, 60 * MIB, 0, 0),
        Free(3),
        Free(4),
        Free(1),
        ReleaseCached(),
        Enter("optimizer"),
        Allocate(6, 20 * MIB, 0, 0),
        Free(6),
    ),
)

SIZES = st.one_of(st.integers(0, 3 * MIB), st.integers(0, 200 * MIB))
STEPS = st.lists(
    st.one_of(
        st.tuples(SIZES, st.sampled_from([0, 0, 1])).map(lambda pair: Allocate(0, *pair, 0)),
        st.integers(0, 30).map(Free),
        st.integers(0, 30).map(GiveBack),
        st.sampled_from(["forward", "backward", "optimizer"]).map(Enter),
        st.just(ReleaseCached()),
    ),
    max_size=80,
)


def log_of(steps, source) -> EventLog:
    """Allocations numbered in their order; what is freed may be no more, or not yet; given back is
    what is alive, and once.
    """
    events, alive = [], set()
    for number, step in enumerate(steps):
        match step:
            case Allocate():
                events.append(Allocate(number, step.bytes, step.stream, 0))
                alive.add(number)
            case GiveBack() if step.id not in alive:
                pass
            case _:
                events.append(step)
                alive.discard(getattr(step, "id", None))
    return EventLog(source=source, versions={}, operators=("mm",), events=tuple(events))


@pytest.mark.parametrize("allocator", ["native", "expandable"])
@given(
    STEPS,
    st.sampled_from(["traced", "recorded"]),
    st.one_of(st.none(), st.integers(16, 600)),
    st.booleans(),
)
def test_no_replay_reports_less_reserved_than_allocated(allocator, steps, source, spare, is_share):
    log = log_of(steps, source)
    capacity = None if spare is None else WORKSPACES + spare * MIB
    for end in range(0, len(log.events) + 1, 3):
        part = msgspec.structs.replace(log, events=log.events[:end])
        result = replay(part, allocator=allocator, capacity_bytes=capacity, is_share=is_share)
        assert result.peak_reserved_bytes >= result.peak_allocated_bytes
        assert result.peak_allocated_bytes == max(
            result.allocated_by_phase.values(), default=WORKSPACES * (source == "traced")
        )
        assert capacity is None or result.peak_reserved_bytes <= capacity


def test_peaks_are_told_by_phase_and_by_what_is_alive():
    result = replay(LOG, allocator="native")
    assert result.fits
    assert result.phase == "backward"
    assert result.peak_allocated_bytes == WORKSPACES + 200 * MIB
    assert result.peak_reserved_bytes == WORKSPACES + 240 * MIB, (
        "the 40 MiB that are free do not hold 60"
    )
    assert result.allocated_by_phase == {
        "setup": WORKSPACES + 100 * MIB,
        "forward": WORKSPACES + 180 * MIB,
        "backward": WORKSPACES + 200 * MIB,
        "optimizer": WORKSPACES + 80 * MIB,
    }
    found = [(kind.operator, kind.phase, kind.bytes, kind.count) for kind in result.alive]
    assert found == [
        ("mm", "setup", 100 * MIB, 1),
        ("mm", "backward", 60 * MIB, 1),
        ("add", "forward", 40 * MIB, 2),
    ]


def test_expandable_segments_are_reserved_in_whole_pages():
    assert replay(LOG, allocator="expandable").peak_reserved_bytes == WORKSPACES + 256 * MIB


@pytest.mark.parametrize(("spare", "retries"), [(240, 0), (200, 1)])
def test_a_device_that_is_just_large_enough_may_have_to_give_back_what_is_cached(spare, retries):
    result = replay(LOG, allocator="native", capacity_bytes=WORKSPACES + spare * MIB)
    assert (result.fits, result.retries) == (True, retries)


def test_a_device_that_is_too_small_runs_out_in_a_phase():
    result = replay(LOG, allocator="native", capacity_bytes=WORKSPACES + 199 * MIB)
    assert (result.fits, result.phase) == (False, "backward")


def test_a_log_is_the_same_after_a_round_trip():
    assert from_builtins(to_builtins(LOG), EventLog) == LOG
