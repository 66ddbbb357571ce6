"""The simulated allocator beside the real one: what an H200's did, step by step
(docs/results/lab/histories.py recorded it).
"""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from highwater.memory.trace import allocator
from highwater.memory.trace.allocator import CachingAllocator, segment_size
from highwater.memory.trace.replay import replay
from highwater.nouns.events import EventLog
from highwater.units import MIB
from places import script

SCRIPT = Path(__file__).parents[2] / "docs" / "results" / "lab" / "histories.py"
TOLD = json.loads(gzip.decompress(SCRIPT.with_suffix(".json.gz").read_bytes()))
SEQUENCES = [pytest.param(name, case, id=name) for name, case in TOLD["random"].items()]
TRIALS = [pytest.param(name, case, id=name) for name, case in TOLD["trials"].items()]
histories = script(SCRIPT)


def disagreeing() -> set[str]:
    """Sequences that the simulation, as it is now, does not follow to the end."""
    return {
        name
        for name, case in TOLD["random"].items()
        if histories.simulated(name, case) != histories.recorded(case)
    }


def merge_expandable(self, block, neighbour, merge=CachingAllocator._merge):
    if block.pool.is_expandable:
        merge(self, block, neighbour)


def test_the_histories_hold_what_is_to_be_agreed_upon():
    real = [histories.recorded(case) for case in TOLD["random"].values()]
    assert len(real) == 16
    assert len(TRIALS) == 6
    assert all(len(each.reserved) == 3000 for each in real)
    assert sum(each.retries for each in real) == 53
    assert [len(each.ran_out) for each in real] == [
        case["out_of_memory"] for case in TOLD["random"].values()
    ]
    assert sum(len(each.ran_out) for each in real) == 19


@pytest.mark.parametrize(("name", "case"), SEQUENCES)
def test_reserved_and_allocated_bytes_are_the_real_ones_after_every_step(name, case):
    ours, real = histories.simulated(name, case), histories.recorded(case)
    assert ours.reserved == real.reserved
    assert ours.allocated == real.allocated
    assert ours.ran_out == real.ran_out
    assert ours.retries == real.retries


@pytest.mark.parametrize(("name", "case"), TRIALS)
def test_the_peaks_of_a_recorded_trial_are_the_real_ones_to_the_byte(name, case):
    log = msgspec.convert(case["log"], EventLog)
    kind = "expandable" if "expandable" in name else "native"
    ours = replay(log, allocator=kind, capacity_bytes=case["cap_bytes"], is_share=case["is_share"])
    found = (ours.fits, ours.peak_reserved_bytes, ours.peak_allocated_bytes, ours.retries)
    assert found == (
        True,
        case["peak_reserved_bytes"],
        case["peak_allocated_bytes"],
        case["retries"],
    )


def test_with_addresses_that_go_up_some_native_sequences_are_missed(monkeypatch):
    """Where free blocks of one size lie decides which is taken: that is how the order of a driver's
    addresses was found.
    """

    def upwards(self, size):
        start = getattr(upwards, "next", 0)
        upwards.next = start + size + -size % (20 * MIB)
        return start

    monkeypatch.setattr(CachingAllocator, "_addresses", upwards)
    assert disagreeing() == {
        "native, seed 2, without end",
        "native, seed 2, a share",
        "native, seed 3, a share",
    }


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        pytest.param(
            allocator, "round_size", lambda size: -(-size // 256) * 256, id="other blocks"
        ),
        pytest.param(
            allocator,
            "segment_size",
            lambda size: max(20 * MIB, segment_size(size)),
            id="no small segments",
        ),
        pytest.param(allocator, "SMALL_BYTES", 2 * MIB, id="another small pool"),
        pytest.param(
            allocator, "_growable_size", lambda block: block.size, id="the best fit, growing or not"
        ),
        pytest.param(
            CachingAllocator, "_merge", merge_expandable, id="native neighbours stay apart"
        ),
        pytest.param(
            CachingAllocator, "release_cached", lambda _: None, id="nothing is given back"
        ),
    ],
)
def test_with_a_broken_rule_the_simulation_disagrees(monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    assert disagreeing()
