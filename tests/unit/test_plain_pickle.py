"""Plain pickles: equal to what was written, whatever it was."""

import os
import pickle
import pickletools
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import SnapshotError
from highwater.memory.snapshot.memory_profile import MemoryProfile, memory_profile
from highwater.memory.snapshot.plain_pickle import PlainPickleError, read_plain_pickle
from highwater.memory.snapshot.snapshot import MOST_FRAMES, read_snapshot
from highwater.nouns.codec import to_json
from highwater.pages.profile import profile_page
from highwater.units import MIB

SNAPSHOTS = sorted((Path(__file__).parents[1] / "data" / "snapshots").glob("*.pickle"))
REAL = [path.read_bytes() for path in SNAPSHOTS]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.booleans() | st.integers(-(2**127), 2**127 - 1) | st.floats(allow_nan=False)
LEAVES = st.none() | NUMBERS | TEXTS
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(TEXTS, inner)
    ),
)
CALLING = "INST OBJ GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ NEWOBJ_EX PERSID BINPERSID EXT1 EXT2"
CALLING = [*CALLING.split(), "EXT4", "NEXT_BUFFER"]


@given(PLAIN, st.integers(2, 5))
def test_what_pickle_writes_is_read_as_it_was(value, protocol):
    assert read_plain_pickle(pickle.dumps(value, protocol)) == value


def test_what_is_shared_stays_shared():
    frames = [{"name": "forward"}]
    first, second = read_plain_pickle(pickle.dumps([frames, frames]))
    assert first is second


class Calls:
    """An object that runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_that_would_run_a_command_runs_none(tmp_path, protocol):
    marker = tmp_path / "ran"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Calls(marker)]]}, protocol))
    with pytest.raises(SnapshotError) as refused:
        memory_profile(path)
    assert not marker.exists()
    if protocol >= 2:
        assert "would run code" in refused.value.problem
    pickle.loads(path.read_bytes())  # noqa: S301 -- that it would have run, ours shows
    assert marker.exists()


@pytest.mark.parametrize("name", CALLING)
def test_every_opcode_that_calls_something_is_refused_by_its_name(name):
    code = next(each.code for each in pickletools.opcodes if each.name == name).encode("latin-1")
    with pytest.raises(PlainPickleError, match=rf"{name} at byte 3 would run code"):
        read_plain_pickle(b"\x80\x04]" + code + b"os\nsystem\n")


PLAIN_CODES = """
PROTO STOP FRAME MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT
BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS
EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def test_the_opcodes_that_are_read_make_plain_data_and_no_others_are():
    read = set()
    for each in pickletools.opcodes:
        code = each.code.encode("latin-1")
        try:
            read_plain_pickle(b"\x80\x04]" + code + bytes(16) + b".")
        except PlainPickleError as error:
            if "byte 3 " in str(error):
                continue
        read.add(each.name)
    assert read == {*PLAIN_CODES.split()}


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of four billion values
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",  # a text of four exabytes
        b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b".",
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",  # an integer of 255 bytes
        b"\x80\x04" + b"(" * 1_000_000,  # marks within marks
        b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
        b"\x80\x04N" + b"2" * 1000 + b".",  # DUP, which pickle.dump never writes
        b"\x80\x04})Ns.",  # a tuple as a key
        *(b"", b".", b"\x80\x04", b"\x80\xff.", b"\x80\x04NN.", b"\x80\x04a."),
        *(b"\x80\x04Na.", b"\x80\x04N(Ne.", b"\x80\x04](NNs.", b"\x80\x04}(Nu."),
        *(b"\x80\x04h\x00.", b"\x80\x04q\x00.", b"\x80\x04t.", b"\x80\x04(\x85."),
    ],
)
def test_a_bomb_is_refused_before_it_takes_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(PlainPickleError):
            read_plain_pickle(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB + 9 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [10, 200_000])
def test_nesting_takes_no_recursion_and_what_contains_itself_is_left_so(depth):
    value = read_plain_pickle(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == []
    (itself,) = read_plain_pickle(b"\x80\x04]\x94h\x00a.")
    assert itself[0] is itself


def profile_or_refusal(path: Path) -> MemoryProfile | None:
    """What a file is: a profile that can be shown in every form, or refused in words."""
    try:
        profile = memory_profile(path)
    except SnapshotError:
        return None
    assert profile_page([profile])
    assert to_json(profile)
    assert sum(each.bytes for each in profile.categories) == profile.allocated_bytes
    return profile


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots") / "mutated.pickle"


@given(
    st.sampled_from(REAL),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=8),
    st.none() | st.integers(0, 2**20),
)
def test_a_damaged_snapshot_is_refused_or_read_and_nothing_else(file, real, changes, end):
    damaged = bytearray(real)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    file.write_bytes(damaged if end is None else damaged[: end % len(damaged)])
    profile_or_refusal(file)


@given(
    st.lists(
        st.sampled_from([*map(bytes, zip(b"NK]}(aseut.\x94\x85\x86\x87)\x88\x89", strict=True))])
        | st.integers(0, 3).map(lambda index: b"h" + bytes([index]))
        | st.sampled_from([b"segments", b"device_traces", b"frames", b"blocks", b"action", b"size"])
        .map(lambda text: b"\x8c" + bytes([len(text)]) + text),
        max_size=60,
    )
)  # fmt: skip
def test_no_program_of_opcodes_does_anything_but_end(file, program):
    file.write_bytes(b"\x80\x04" + b"".join(program) + b".")
    profile_or_refusal(file)


VALUES = st.one_of(
    LEAVES,
    st.sampled_from(["alloc", "free_requested", "free_completed", "oom", "segment_map", -1, 2**70]),
    st.lists(LEAVES, max_size=3),
)
PLACE = {"filename": VALUES, "line": VALUES, "name": VALUES}
FRAME = st.fixed_dictionaries({}, optional=PLACE)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "action": VALUES | st.sampled_from(["alloc", "oom", "segment_unmap"]),
        "addr": VALUES | st.integers(0, 2048),
        "size": VALUES | st.integers(0, 4096),
        "time_us": VALUES,
        "device_free": VALUES,
        "user_metadata": VALUES,
        "frames": VALUES | st.lists(FRAME),
    },
)
BLOCK = st.fixed_dictionaries(
    {},
    optional={
        "address": VALUES | st.integers(0, 4096),
        "size": VALUES | st.integers(0, 2048),
        "requested_size": VALUES | st.integers(0, 2048),
        "state": VALUES | st.just("active_allocated"),
    },
)
SEGMENT = st.fixed_dictionaries(
    {},
    optional={
        "device": VALUES | st.integers(0, 2),
        "address": VALUES | st.integers(0, 4096),
        "total_size": VALUES | st.integers(0, 4096),
        "is_expandable": VALUES,
        "blocks": VALUES | st.lists(BLOCK, max_size=4),
    },
)


@given(st.lists(st.lists(ENTRY, max_size=6) | VALUES, max_size=2), st.lists(SEGMENT, max_size=3))
def test_values_of_any_type_are_refused_or_read(file, traces, segments):
    file.write_bytes(pickle.dumps({"device_traces": traces, "segments": segments}))
    profile_or_refusal(file)


MANY = 40_000
LONG = "/".join(["modeling_"] * 1000)
"""A path that is longer than what is kept of it."""


def written(folder: Path, traces: list[Any], segments: list[Any]) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"device_traces": traces, "segments": segments}))
    return path


def block(**fields: object) -> dict[str, Any]:
    return {"size": 512, "state": "active_allocated", **fields}


def alloc(number: int, frames: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    return {"action": "alloc", "addr": 512 * number, "size": 512, "frames": frames, **fields}


ONE_SEGMENT = {"device": 0, "blocks": [block()] * MANY}
SHARED = {
    "a segment": ([], [ONE_SEGMENT] * MANY),
    "a block": ([], [{"device": 0, "blocks": [block()] * 2} for _ in range(2)]),
    "an event": ([[alloc(0, [])] * 2], []),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SHARED)
def test_what_is_in_a_snapshot_twice_is_refused_before_it_is_multiplied(tmp_path, what):
    path = written(tmp_path, *SHARED[what])
    assert path.stat().st_size < MIB
    with pytest.raises(SnapshotError, match=f"{what} is in it twice"):
        memory_profile(path)


@pytest.mark.timeout(60)
def test_what_is_shared_is_counted_or_looked_at_once(tmp_path):
    segments = [{"device": 0, "blocks": []} for _ in range(2 * MANY)]
    traces = [[alloc(0, [])]] * (2 * MANY)
    assert memory_profile(written(tmp_path, traces, segments)).devices == len(traces)
    frames = [{"filename": LONG, "line": line, "name": LONG} for line in range(MANY)]
    stacks = [frames[start : start + 1000] for start in range(0, MANY, 1000)]
    events = [alloc(number, stack) for number, stack in enumerate(stacks)]
    snapshot = read_snapshot(written(tmp_path, [events], []))
    assert len(snapshot.frames) == MANY
    assert len({id(text) for frame in snapshot.frames for text in (frame.file, frame.name)}) == 1
    lines = range(MOST_FRAMES)
    stack = [{"filename": LONG, "line": line, "name": f"step_{line}"} for line in lines]
    events = [alloc(number, stack, user_metadata=f"p{number}") for number in range(MANY)]
    profile = memory_profile(written(tmp_path, [events], []))
    assert profile.allocated_bytes == 512 * MANY
    assert profile_page([profile])


@pytest.mark.timeout(60)
def test_stacks_and_frames_that_are_shared_are_read_as_ever(tmp_path):
    """As PyTorch shares them: a frame among stacks, a stack among a block and events."""
    frame = {"filename": "/work/train.py", "line": 3, "name": "forward"}
    stacks = [[frame], [frame, frame]]
    events = [alloc(number, stacks[number % 2]) for number in range(MANY)]
    blocks = [block(address=2**40 + 512 * n, frames=stacks[0]) for n in range(MANY)]
    profile = memory_profile(written(tmp_path, [events], [{"device": 0, "blocks": blocks}]))
    assert profile.allocated_bytes == 2 * 512 * MANY
    assert [place.place for place in profile.places] == ["work/train.py:3 forward"]
