"""Snapshots that say one thing again and again in two bytes each: what a pickle may share is read
once, what PyTorch writes once is refused the second time, and no file takes long for its size.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest

from highwater.errors import SnapshotError
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.memory.snapshot.snapshot import MOST_FRAMES, read_snapshot
from highwater.pages.profile import profile_page
from highwater.units import MIB

pytestmark = pytest.mark.timeout(60)
"""Seconds that each of these would take many times over if work were multiplied."""
MANY = 40_000
LONG = "/".join(["modeling_"] * 1000)
"""A path that is longer than what is kept of it."""


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document))
    return path


def block(**fields: object) -> dict[str, Any]:
    return {"size": 512, "state": "active_allocated", **fields}


def alloc(number: int, frames: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    return {"action": "alloc", "addr": 512 * number, "size": 512, "frames": frames, **fields}


def test_segments_that_are_one_and_share_their_blocks_are_refused(tmp_path):
    shared = {"device": 0, "blocks": [block()] * MANY}
    path = written(tmp_path, {"device_traces": [], "segments": [shared] * MANY})
    assert path.stat().st_size < MIB
    with pytest.raises(SnapshotError, match="a segment is in it twice"):
        memory_profile(path)


@pytest.mark.parametrize("blocks", [[block()] * 2, [block(), block()]])
def test_blocks_that_several_segments_share_are_refused(tmp_path, blocks):
    segments = [{"device": 0, "blocks": blocks} for _ in range(2)]
    with pytest.raises(SnapshotError, match="a block is in it twice"):
        memory_profile(written(tmp_path, {"device_traces": [], "segments": segments}))


def test_an_event_that_comes_again_is_refused(tmp_path):
    document = {"device_traces": [[alloc(0, [])] * 2], "segments": []}
    with pytest.raises(SnapshotError, match="an event is in it twice"):
        memory_profile(written(tmp_path, document))


def test_many_devices_with_many_segments_are_counted_once(tmp_path):
    segments = [{"device": 0, "blocks": []} for _ in range(2 * MANY)]
    traces = [[alloc(0, [])]] * (2 * MANY)
    document = {"device_traces": traces, "segments": segments}
    assert memory_profile(written(tmp_path, document)).devices == len(traces)


def test_frames_that_share_a_long_path_keep_one_copy_of_it(tmp_path):
    frames = [{"filename": LONG, "line": line, "name": LONG} for line in range(MANY)]
    stacks = [frames[start : start + 1000] for start in range(0, MANY, 1000)]
    events = [alloc(number, stack) for number, stack in enumerate(stacks)]
    snapshot = read_snapshot(written(tmp_path, {"device_traces": [events], "segments": []}))
    assert len(snapshot.frames) == MANY
    assert len({id(text) for frame in snapshot.frames for text in (frame.file, frame.name)}) == 1


def test_a_deep_stack_in_many_phases_is_looked_at_once(tmp_path):
    stack = [
        {"filename": LONG, "line": line, "name": f"step_{line}"} for line in range(MOST_FRAMES)
    ]
    events = [alloc(number, stack, user_metadata=f"p{number}") for number in range(MANY)]
    profile = memory_profile(written(tmp_path, {"device_traces": [events], "segments": []}))
    assert profile.allocated_bytes == 512 * MANY
    assert profile_page([profile])


def test_stacks_and_frames_that_are_shared_are_read_as_ever(tmp_path):
    """As PyTorch shares them: a frame among stacks, a stack among a block and events."""
    frame = {"filename": "/work/train.py", "line": 3, "name": "forward"}
    stacks = [[frame], [frame, frame]]
    events = [alloc(number, stacks[number % 2]) for number in range(MANY)]
    blocks = [block(address=2**40 + 512 * n, frames=stacks[0]) for n in range(MANY)]
    document = {"device_traces": [events], "segments": [{"device": 0, "blocks": blocks}]}
    profile = memory_profile(written(tmp_path, document))
    assert profile.allocated_bytes == 2 * 512 * MANY
    assert [place.place for place in profile.places] == ["work/train.py:3 forward"]
