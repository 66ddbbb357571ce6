"""A timeline holds what the replay saw, in the form of PyTorch's memory snapshots."""

import pickle

import pytest

from highwater.memory.trace.replay import replay, timeline
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack, ReleaseCached
from highwater.units import GIB, MIB

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
