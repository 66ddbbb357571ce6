"""Traces as they are scaled to other lengths and replayed."""

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay, timeline
from highwater.memory.trace.scaled_trace import scaled_trace
from highwater.model.model import load_model
from highwater.nouns.events import (
    Allocate,
    Enter,
    EventLog,
    Free,
    GiveBack,
    ReleaseCached,
    TraceEvent,
)
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.trainers.trinity.law import bundled_trace
from highwater.units import GIB, MIB

STEPS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=40,
)
"""Fixed bytes, bytes per token, stream; and whether the oldest that is alive is freed
afterwards."""
WORKSPACES = sum(CUBLAS_WORKSPACES_BYTES)


def log(steps: list[tuple[int, int, int, bool]], tokens: int) -> EventLog:
    events: list[TraceEvent] = [Enter("setup")]
    alive: list[int] = []
    for number, (fixed, slope, stream, is_freed) in enumerate(steps, start=7):
        events.append(Allocate(number, fixed + slope * tokens, stream, number % 2, 0))
        alive.append(number)
        if is_freed:
            events.append(Free(alive.pop(0)))
        if number % 5 == 0:
            events += [Enter("backward"), ReleaseCached()]
    return EventLog(
        source="traced", versions={"torch": "2"}, operators=("mm", "add"), events=tuple(events)
    )


def renumbered(events: EventLog) -> EventLog:
    """Allocations count from 1: which number they have means nothing."""
    numbers: dict[int, int] = {}
    fresh: list[TraceEvent] = []
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
def test_the_lines_through_two_lengths_give_any_other(steps, tokens):
    lines = scaled_trace({64: log(steps, 64), 1024: log(steps, 1024)})
    assert lines.at(tokens) == renumbered(log(steps, tokens))
    assert msgspec.json.decode(msgspec.json.encode(lines), type=type(lines)) == lines


@given(STEPS, st.integers(0, 10**4))
def test_what_is_alive_at_once_is_what_pages_without_end_have_allocated(steps, tokens):
    lines = scaled_trace({64: log(steps, 64), 1024: log(steps, 1024)})
    free = replay(lines.at(tokens), allocator="expandable")
    assert WORKSPACES + lines.least_bytes(tokens) == free.peak_allocated_bytes


@pytest.mark.parametrize("allocator", ["native", "expandable"])
@given(steps=STEPS, tokens=st.integers(0, 10**4), lacking_bytes=st.integers(1, 2**30))
def test_no_allocator_does_with_less_than_what_is_alive_at_once(
    allocator, steps, tokens, lacking_bytes
):
    lines = scaled_trace({64: log(steps, 64), 1024: log(steps, 1024)})
    capacity_bytes = WORKSPACES + lines.least_bytes(tokens) - lacking_bytes
    assert not replay(lines.at(tokens), allocator=allocator, capacity_bytes=capacity_bytes).fits


@given(
    st.integers(1, 64),
    st.integers(1, 7),
    st.integers(0, 10**6),
    st.integers(513, 10**4),
    st.integers(0, 10**5),
)
def test_a_line_may_be_a_part_of_a_byte_steep_and_end_at_a_ceiling(
    numerator, denominator, fixed, most, tokens
):
    def at(count: int) -> EventLog:
        own = min(fixed + numerator * count // denominator, fixed + numerator * most // denominator)
        return log([(own, 0, 0, False), (0, 3, 0, False)], count)

    few, many = 64 * denominator, 73 * denominator
    longest = 11 * max(most, many)
    lines = scaled_trace({few: at(few), many: at(many), longest: at(longest)})
    assert [kind.most_bytes is None for kind in lines.kinds] == [False, True]
    assert lines.at(tokens) == renumbered(at(tokens))


def test_a_line_that_is_a_part_of_a_byte_steep_has_no_ceiling_where_it_ends_between_bytes():
    def at(tokens: int) -> EventLog:
        return log([(tokens // 7, 0, 0, False)], tokens)

    lines = scaled_trace({448: at(448), 511: at(511), 1000: at(1000)})
    assert lines.at(2000) == renumbered(at(2000))


def test_events_that_differ_in_more_than_bytes_are_refused():
    def at(*ends: TraceEvent) -> EventLog:
        events = (Allocate(1, 512, 0, 0), Allocate(2, 512, 0, 0), *ends)
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)

    for other in (at(Free(2)), at(GiveBack(1))):
        with pytest.raises(ValueError, match=r"not on the line|tokens, GiveBack"):
            scaled_trace({2: at(Free(1)), 3: other})
        with pytest.raises(ValueError, match="not on the line"):
            scaled_trace({2: at(Free(1)), 3: at(Free(1)), 4: other})


def test_what_is_given_back_while_another_stream_uses_it_is_no_more_needed():
    def at(tokens: int) -> EventLog:
        events: tuple[TraceEvent, ...] = (
            *(
                Allocate(1, 2**20 * tokens, 0, 0),
                Allocate(2, 2**21, 1, 0),
                GiveBack(1),
                Allocate(3, 2**22, 0, 0),
            ),
            *(Free(1), Free(3), GiveBack(2), Free(2)),
        )
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)

    lines = scaled_trace({2: at(2), 3: at(3)})
    assert lines.at(34) == at(34)
    assert lines.least_bytes(34) == 36 * 2**20
    free = replay(lines.at(34), allocator="expandable")
    assert free.peak_allocated_bytes == WORKSPACES + 36 * 2**20
    assert free.peak_reserved_bytes == 140 * 2**20
    # A page is 20 MiB: what is awaited makes room for what is asked.
    assert replay(lines.at(34), allocator="expandable", capacity_bytes=120 * 2**20).fits


def test_what_is_on_no_line_is_refused():
    steps = [(0, 4, 0, False)]
    bent = msgspec.structs.replace(
        log(steps, 1024), events=(Enter("setup"), Allocate(7, 999, 0, 1, 0))
    )
    with pytest.raises(ValueError, match="not on the line"):
        scaled_trace({64: log(steps, 64), 512: log(steps, 512), 1024: bent})
    with pytest.raises(ValueError, match="whole bytes"):
        scaled_trace({64: log(steps, 64), 1024: bent})
    with pytest.raises(ValueError, match="2 events at 64 tokens, 3 at 1024"):
        scaled_trace({64: log(steps, 64), 1024: log([*steps, (1, 0, 0, False)], 1024)})
    with pytest.raises(ValueError, match="Free"):
        scaled_trace(
            {64: log([(0, 4, 0, True)], 64), 1024: log([(0, 4, 0, False), (0, 4, 0, False)], 1024)}
        )


LOG = EventLog(
    source="traced",
    versions={},
    operators=("mm", "add"),
    modules=("", "model.layers.3.mlp"),
    events=(
        Allocate(1, 100 * MIB + 1, 0, 0),
        Enter("forward"),
        Allocate(2, 40 * MIB, 7, 1, 1),
        Allocate(3, 0, 0, 1),
        Free(2),
        Free(3),
        ReleaseCached(),
        Allocate(4, 300 * MIB, 0, 0),
        Free(1),
    ),
)


def peak_of(entries) -> int:
    """Of all that is alive; fails where a place is taken twice."""
    alive, peak = {}, 0
    for entry in entries:
        if entry["action"] == "alloc":
            assert not any(
                at < entry["addr"] + entry["size"] and entry["addr"] < at + size
                for at, size in alive.items()
            )
            alive[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
        peak = max(peak, sum(alive.values()))
    return peak


@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_every_allocation_has_its_place_its_time_and_its_names(allocator):
    snapshot = pickle.loads(timeline(LOG, allocator=allocator))  # noqa: S301 -- ours
    (entries,) = snapshot["device_traces"]
    assert peak_of(entries) == replay(LOG, allocator=allocator).peak_allocated_bytes
    born = next(entry for entry in entries if entry["stream"] == 7)
    assert (born["action"], born["size"]) == ("alloc", 40 * MIB)
    assert [frame["name"] for frame in born["frames"]] == ["add", "forward"]
    assert born["frames"][0]["filename"] == "model.layers.3.mlp"
    assert [entry["time_us"] for entry in entries] == sorted(entry["time_us"] for entry in entries)


def test_what_does_not_fit_is_the_last_entry():
    drawn = timeline(LOG, allocator="native", capacity_bytes=GIB // 4)
    (entries,) = pickle.loads(drawn)["device_traces"]  # noqa: S301 -- ours
    assert [entry["action"] for entry in entries].count("oom") == 1
    assert entries[-1]["action"] == "oom"
    assert entries[-1]["size"] == 300 * MIB


@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_no_place_is_taken_twice_where_memory_waits_for_what_was_given_back(allocator):
    events = (
        Allocate(1, 300 * MIB, 0, 0),
        GiveBack(1),
        Allocate(2, 400 * MIB, 0, 0),
        Free(1),
        GiveBack(2),
        ReleaseCached(),
        Free(2),
    )
    log = EventLog(source="traced", versions={}, operators=("mm",), events=events)
    drawn = timeline(log, allocator=allocator, capacity_bytes=600 * MIB)
    (entries,) = pickle.loads(drawn)["device_traces"]  # noqa: S301 -- ours
    assert peak_of(entries) == 464 * MIB, "the larger one, and cuBLAS's two workspaces"
    assert [entry["action"] for entry in entries][2:] == [
        "alloc",
        "free_requested",
        "free_completed",
    ] * 2


RESULTS = Path(__file__).parents[2] / "docs" / "results" / "lab"
TRIALS = json.loads((RESULTS / "trinity_trials.json").read_text())
SETTINGS = Settings(
    strategy="fsdp", loss="full", objective="grpo", entropy="full", sequences_per_micro_batch=2
)
NEAR_BYTES = {"native": 24 * MIB, "expandable": 128 * MIB}
"""When the GPU comes to free what other streams used decides which of the last segments are given
back; pages are of 20 MiB."""
RACED_BYTES = GIB
"""Where gradients of 4B on two GPUs are free depends on whether they are reduced when the host has
launched the next layer: its two ranks are 0.7 GiB apart.
"""
UNSPLIT_BYTES = 16 * MIB
"""A block of which less than a MiB would be left is allocated whole: which ones are, the order
decides."""

LAST_BYTES = 32 * MIB
"""With no more left, when the GPU comes to free what other streams used decides."""


def name(row: dict[str, Any]) -> str:
    return (
        f"{row['model']}, {row['gpus']} GPUs, SP {row['ulysses_degree']}, {row['allocator']}, "
        f"{row['length_tokens']}"
    )


@pytest.mark.corpus
@pytest.mark.parametrize("row", TRIALS, ids=name)
def test_a_step_on_gpus_ends_as_its_shipped_trace(row):
    settings = msgspec.structs.replace(SETTINGS, allocator=row["allocator"])
    cell = Cell(
        layout=Layout(gpus=row["gpus"], ulysses_degree=row["ulysses_degree"]), settings=settings
    )
    shape = load_model(row["model"]).shape
    lines = bundled_trace(shape, cell)
    assert lines is not None
    log = lines.at(Step(shape, settings, cell.layout, row["length_tokens"]).tokens)
    ours = replay(
        log, allocator=row["allocator"], capacity_bytes=row["capacity_bytes"], is_share=True
    )
    near_bytes = (
        RACED_BYTES
        if (row["model"], row["gpus"]) == ("Qwen3-4B", 2)
        else NEAR_BYTES[row["allocator"]]
    )
    for measured in row["ranks"]:
        assert row["fits"] == (measured["error"] is None)
        is_full = row["capacity_bytes"] - measured["peak_reserved_bytes"] < LAST_BYTES
        assert ours.fits == row["fits"] or is_full
        assert ours.peak_allocated_bytes == pytest.approx(
            measured["peak_allocated_bytes"], abs=UNSPLIT_BYTES
        )
        assert ours.peak_reserved_bytes == pytest.approx(
            measured["peak_reserved_bytes"], abs=near_bytes
        )
        assert abs(ours.retries - measured["retries"]) <= 1
