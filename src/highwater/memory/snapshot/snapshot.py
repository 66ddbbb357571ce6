"""Snapshots: files of ``torch.cuda.memory._dump_snapshot``, read without PyTorch and checked.

The file is not trusted: it is read as plain data (``plain_pickle``), every number that is used is
checked, and unknown fields are ignored. A pickle may refer to one value many times, in two bytes
each. Stacks, frames and texts are shared so, and are read once; an event, a segment or a block that
occurs twice is refused. So time and memory are bounded by the size of the file. Source of the
fields: ``torch/cuda/memory.py`` and ``torch/csrc/cuda/Module.cpp``, PyTorch 2.11 and 2.13.
"""

import errno
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from highwater.errors import SnapshotError
from highwater.memory.snapshot.plain_pickle import PlainPickleError, read_plain_pickle
from highwater.nouns.codec import read_file
from highwater.units import MIB

MOST_SNAPSHOT_BYTES = 512 * MIB
"""Most bytes of a file; 100,000 events have 30 to 100 MiB."""
MOST_FRAMES = 1024
"""Most frames of one stack that are kept, from the innermost: Python itself allows 1,000."""
_LARGEST = 1 << 53
"""The largest size in bytes that is accepted: 8 PiB."""
_LARGEST_ADDRESS = 1 << 64
_LONGEST_NAME = 1000
"""Most characters of a name or a path that are kept; C++ templates have more."""
_NO_FRAMES: list[Any] = []
"""The stack of an event without one: a single list, since stacks are told apart by identity."""
_HINT = "name a file that `torch.cuda.memory._dump_snapshot` wrote"
_OF_A_TRAINING = (
    "PyTorch makes one: `torch.cuda.memory._record_memory_history()` before the first step, "
    "`torch.cuda.memory._dump_snapshot('snapshot.pickle')` after the last; `highwater profile "
    "--help` says what else is read"
)
"""Hint if the file is a log: how to record a training."""
HOW_TO_MAKE_ONE = (
    "name one that is there; `highwater predict tiny --gpus 1xH200-141GB --length 4k --loss full "
    "--allocator native --exact --timeline predicted.pickle` makes one in seconds, without a GPU"
)
"""Hint if there is no such file."""
_MOST_NEIGHBOURS = 10_000
"""Most files of a folder that are compared with a missing file's name, to suggest one."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    name: str
    """Name of the function."""


class AllocatorEvent(NamedTuple):
    """One action of PyTorch's allocator, such as an allocation, in a snapshot's history."""

    action: str
    address: int
    size_bytes: int
    """Bytes requested; for an event of a segment, the whole segment's."""
    time_us: int
    stack: int
    """Index into ``Snapshot.stacks``."""
    phase: str
    """The phase that the program had named (``user_metadata``); empty if none."""
    device_free_bytes: int
    """Bytes that the driver still had when memory ran out; 0 for other events."""


class SegmentBlock(NamedTuple):
    """A block of a segment when the snapshot was taken."""

    address: int
    size_bytes: int
    requested_bytes: int
    is_allocated: bool
    """True if a tensor used it."""
    stack: int


class Segment(NamedTuple):
    """Memory that the allocator had from the driver when the snapshot was taken, in blocks."""

    address: int
    size_bytes: int
    is_expandable: bool
    blocks: tuple[SegmentBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One GPU's part of a PyTorch memory snapshot."""

    path: str
    device: int
    devices: int
    """Number of devices in the file; ``device`` has the most events."""
    events: tuple[AllocatorEvent, ...]
    segments: tuple[Segment, ...]
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    """Indices into ``frames``, the innermost first; the stack 0 is empty."""
    allocator_settings: Mapping[str, str]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file, for its busiest device. Raises SnapshotError for a file that is
    missing, too large or damaged, that would run code, or that has impossible values.
    """
    try:
        data = read_file(path, most_bytes=MOST_SNAPSHOT_BYTES)
    except OSError as error:
        raise _unread(path, error) from error
    try:
        return _Reading(read_plain_pickle(data)).snapshot(str(path))
    except PlainPickleError as error:
        text = data[:4096].decode("latin-1")  # bytes past ASCII may be letters of any encoding
        if text and all(32 <= ord(each) != 127 or each in "\t\n\r\x1b\b" for each in text):
            problem = f"{path} is a text, such as a log, and no memory snapshot"
            raise SnapshotError(problem, hint=_OF_A_TRAINING) from error
        raise SnapshotError(f"{path} is no memory snapshot: {error}", hint=_HINT) from error


def _unread(path: Path, error: OSError) -> SnapshotError:
    if error.errno == errno.ENOENT:
        names = [each.name for each in islice(path.parent.glob("*.pickle"), _MOST_NEIGHBOURS)]
        near = get_close_matches(path.name, names, n=1, cutoff=0.5)
        meant = shlex.quote(str(path.parent / near[0])) if near else None
        hint = f"did you mean `highwater profile {meant}`?" if meant else HOW_TO_MAKE_ONE
        return SnapshotError(f"there is no file {path}", hint=hint)
    if error.errno == errno.EFBIG:
        hint = "record fewer events: `torch.cuda.memory._record_memory_history(max_entries=100000)`"
    else:
        hint = _HINT
    return SnapshotError(f"{path} cannot be read: {error.strerror}", hint=hint)


class _Reading:
    """Reads a snapshot's dictionaries. Raises PlainPickleError for impossible values."""

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict) or "device_traces" not in document:
            raise PlainPickleError("it has no device_traces")
        self._document: dict[str, Any] = document
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        # A shared stack or frame is read once, by its id: the document, which keeps it alive,
        # outlives these.
        self._by_frame: dict[int, int] = {}
        self._by_stack: dict[int, int] = {}
        self._by_text: dict[int, str] = {}
        self._single: set[int] = set()

    def snapshot(self, path: str) -> Snapshot:
        traces = [_list(trace, "a device's trace") for trace in self._field("device_traces")]
        segments = [self._once(segment, "a segment") for segment in self._field("segments")]
        owners = [_whole(segment.get("device", 0), "a device", most=1024) for segment in segments]
        owned = Counter(owners)
        busy = {
            device: (len(traces[device]) if device < len(traces) else 0, owned[device])
            for device in {*owned, *(index for index, trace in enumerate(traces) if trace)}
        }
        if not busy:
            raise PlainPickleError(
                "it has neither events nor segments: nothing was recorded, or nothing allocated"
            )
        device = max(sorted(busy), key=lambda each: busy[each])
        own = zip(owners, segments, strict=True)
        return Snapshot(
            path=path,
            device=device,
            devices=len(busy),
            events=tuple(self._events(traces[device] if device < len(traces) else [])),
            segments=tuple(self._segment(each) for owner, each in own if owner == device),
            frames=tuple(self._frames),
            stacks=tuple(self._stacks),
            allocator_settings=self._settings(),
        )

    def _field(self, name: str) -> list[Any]:
        return _list(self._document.get(name, []), name)

    def _settings(self) -> dict[str, str]:
        found = self._document.get("allocator_settings", {})
        values = found.items() if isinstance(found, dict) else ()
        return {
            self._text(name): self._text(str(value))
            for name, value in values
            if isinstance(value, str | int | float | bool)
        }

    def _events(self, trace: list[Any]) -> Iterator[AllocatorEvent]:
        for number, entry in enumerate(trace):
            found = self._once(entry, "an event")
            action = found.get("action")
            if not isinstance(action, str):
                raise PlainPickleError("an event has no action")
            time_us = found.get("time_us", number)
            phase = found.get("user_metadata", "")
            yield AllocatorEvent(
                action=action,
                address=_whole(found.get("addr", 0), "an address", most=_LARGEST_ADDRESS),
                size_bytes=_whole(found.get("size", 0), "a size"),
                time_us=time_us if type(time_us) is int and abs(time_us) < 1 << 63 else number,
                stack=self._stack(found.get("frames", _NO_FRAMES)),
                phase=self._text(phase) if isinstance(phase, str) else "",
                device_free_bytes=_whole(found.get("device_free", 0), "a size"),
            )

    def _segment(self, found: dict[str, Any]) -> Segment:
        address = _whole(found.get("address", 0), "an address", most=_LARGEST_ADDRESS)
        blocks: list[SegmentBlock] = []
        next_address = address
        for entry in _list(found.get("blocks", []), "a segment's blocks"):
            block = self._once(entry, "a block")
            size = _whole(block.get("size", 0), "a size")
            # files of PyTorch before 2.1 leave out where a block is
            at = _whole(block.get("address", next_address), "an address", most=_LARGEST_ADDRESS)
            next_address = at + size
            blocks.append(
                SegmentBlock(
                    address=at,
                    size_bytes=size,
                    requested_bytes=_whole(block.get("requested_size", size), "a size"),
                    is_allocated=block.get("state") == "active_allocated",
                    stack=self._stack(block.get("frames", _NO_FRAMES)),
                )
            )
        return Segment(
            address=address,
            size_bytes=_whole(found.get("total_size", 0), "a size"),
            is_expandable=found.get("is_expandable") is True,
            blocks=tuple(blocks),
        )

    def _stack(self, frames: Any) -> int:
        known = self._by_stack.get(id(frames))
        if known is not None:
            return known
        stack = tuple(map(self._frame, _list(frames, "a stack")[:MOST_FRAMES]))
        index = self._stacks.setdefault(stack, len(self._stacks))
        self._by_stack[id(frames)] = index
        return index

    def _frame(self, found: Any) -> int:
        known = self._by_frame.get(id(found))
        if known is not None:
            return known
        fields = _dict(found, "a frame")
        file, line, name = (fields.get(key) for key in ("filename", "line", "name"))
        frame = Frame(
            file=self._text(file) if isinstance(file, str) else "",
            line=line if type(line) is int and 0 <= line < _LARGEST else 0,
            name=self._text(name) if isinstance(name, str) else "",
        )
        index = self._frames.setdefault(frame, len(self._frames))
        self._by_frame[id(found)] = index
        return index

    def _text(self, text: str) -> str:
        """A name, cut to ``_LONGEST_NAME``; equal names share one text."""
        if len(text) <= _LONGEST_NAME:
            return text
        return self._by_text.setdefault(id(text), f"{text[:_LONGEST_NAME]}…")

    def _once(self, value: Any, what: str) -> dict[str, Any]:
        """Check a dict that PyTorch writes only once. Reading it again for each reference would
        multiply the time. Raises PlainPickleError if it occurs twice.
        """
        found = _dict(value, what)
        if id(found) in self._single:
            raise PlainPickleError(f"{what} is in it twice, and PyTorch writes each once")
        self._single.add(id(found))
        return found


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlainPickleError(f"{what} is no list")
    return value


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlainPickleError(f"{what} is no dict")
    return value


def _whole(value: Any, what: str, *, most: int = _LARGEST) -> int:
    """Check a number of bytes or an address. Raises PlainPickleError if it is out of range."""
    if type(value) is not int or not 0 <= value <= most:
        shown = value if isinstance(value, int | float) else type(value).__name__
        raise PlainPickleError(f"{what} is {shown}")
    return value
