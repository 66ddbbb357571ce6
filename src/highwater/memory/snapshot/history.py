"""History: which allocations were live at each event of a snapshot, and at its moment: the peak, or
the point when memory ran out.

A snapshot holds a program's last events (``max_entries``). An allocation from before the first of
them is known only if it was freed later, or is in the segments at the end.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from highwater.errors import SnapshotError
from highwater.memory.snapshot.snapshot import AllocatorEvent, Snapshot

Moment = Literal["peak", "out of memory"]
_ROUNDED_BYTES = 512
"""The allocator hands out multiples of this. Source: kMinBlockSize, CUDACachingAllocator."""
_MOST_ALIVE_BYTES = 1 << 53
_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")
_MOST_UNDOING = 20_000_000
"""Most segment events since the moment, times segments, that are undone to find free blocks."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A block of memory, from its allocation until it was freed, by number of events."""

    address: int
    size_bytes: int
    stack: int
    phase: str
    born: int
    """Number of the event that allocated it; -1: before the first event."""
    died: int
    """Number of the event that freed it; the number of all events if alive at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All allocations of a snapshot, and which were live at its peak or when memory ran out."""

    snapshot: Snapshot
    allocations: tuple[Allocation, ...]
    moment: Moment
    at: int
    """Number of the moment's event; -1: before the first event."""
    allocated_bytes: int
    """Bytes allocated and not yet freed at the moment."""
    reserved_bytes: int | None
    """Bytes that the allocator had from the driver at the moment; None if not recorded."""
    requested_bytes: int | None
    """Size of the request that failed; None at a peak."""
    device_free_bytes: int | None
    """Bytes that the driver still had when the request failed; None at a peak."""

    @property
    def alive(self) -> Iterator[Allocation]:
        """Yield the allocations that were live at the snapshot's moment."""
        return (each for each in self.allocations if each.born <= self.at < each.died)


def history_of(snapshot: Snapshot) -> History:
    """Follow a snapshot's allocator events: return every allocation, and what was live at the peak
    or at the request that failed. Raises SnapshotError if more bytes were live than any GPU has.
    """
    allocations = tuple(_allocations(snapshot))
    changes = [0] * (len(snapshot.events) + 2)
    for each in allocations:
        changes[each.born + 1] += each.size_bytes
        changes[each.died + 1] -= each.size_bytes
    levels = list(accumulate(changes))[:-1]  # bytes live before the first event, and after each
    if max(levels) > _MOST_ALIVE_BYTES:
        raise _too_much(snapshot)
    at, is_out_of_memory = _moment(snapshot.events, levels)
    event = snapshot.events[at] if is_out_of_memory else None
    return History(
        snapshot=snapshot,
        allocations=allocations,
        moment="out of memory" if is_out_of_memory else "peak",
        at=at,
        allocated_bytes=levels[at + 1],
        reserved_bytes=_reserved_bytes(snapshot, at),
        requested_bytes=event.size_bytes if event else None,
        device_free_bytes=event.device_free_bytes if event else None,
    )


def _too_much(snapshot: Snapshot) -> SnapshotError:
    problem = f"{snapshot.path} is no memory snapshot: more was alive in it than any device has"
    return SnapshotError(problem, hint="name a file that `torch.cuda.memory._dump_snapshot` wrote")


def _allocations(snapshot: Snapshot) -> Iterator[Allocation]:
    events = snapshot.events
    names_requests = any(event.action == "free_requested" for event in events)
    living: dict[int, tuple[int, AllocatorEvent]] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            if event.address in living:  # its end was not recorded
                yield _ended(*living.pop(event.address), number)
            living[event.address] = number, event
        elif event.action in ("free", "free_requested") or (
            event.action == "free_completed" and not names_requests
        ):
            yield _ended(*living.pop(event.address, (-1, event)), number)
    yield from (_ended(*each, len(events)) for each in living.values())
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.is_allocated and block.address not in living:
                size = block.requested_bytes
                yield Allocation(block.address, size, block.stack, "", -1, len(events))


def _ended(born: int, event: AllocatorEvent, died: int) -> Allocation:
    """The allocation that ``event`` made or, with ``born`` -1, freed: its stack is then unknown."""
    stack, phase = (event.stack, event.phase) if born >= 0 else (0, "")
    return Allocation(event.address, event.size_bytes, stack, phase, born, died)


def _moment(events: Sequence[AllocatorEvent], levels: Sequence[int]) -> tuple[int, bool]:
    """Number of the event to show: where memory ran out, and True; else the peak, and False."""
    failed = [number for number, event in enumerate(events) if event.action == "oom"]
    if failed:
        most = max(failed, key=lambda number: levels[number + 1] + events[number].size_bytes)
        return most, True
    return max(range(len(levels)), key=levels.__getitem__) - 1, False


def _reserved_bytes(snapshot: Snapshot, at: int) -> int | None:
    """Bytes reserved at an event: segments at the end, later changes undone; None if unrecorded."""
    changes = [event for event in snapshot.events if event.action in _GROWS + _SHRINKS]
    if not snapshot.segments and not changes:
        return None
    reserved = sum(segment.size_bytes for segment in snapshot.segments)
    for event in snapshot.events[at + 1 :]:
        if event.action in _GROWS:
            reserved -= event.size_bytes
        elif event.action in _SHRINKS:
            reserved += event.size_bytes
    if abs(reserved) > _MOST_ALIVE_BYTES:
        raise _too_much(snapshot)
    return max(0, reserved)


def free_blocks(history: History) -> list[int] | None:
    """Bytes of each gap between live allocations in the segments at the moment; None if unknown. A
    request fails if no gap is as large; a gap below 1 MiB may be the unused end of a block.
    """
    segments = _segments_then(history)
    if not segments:
        return None
    alive = sorted((each.address, each.size_bytes) for each in history.alive)
    addresses = [address for address, _ in alive]
    gaps: list[int] = []
    for start, end in segments:
        at = start
        for address, size in alive[bisect_left(addresses, start) : bisect_left(addresses, end)]:
            gaps.append(address - at)
            at = max(at, address + -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES)
        gaps.append(end - at)
    return [gap for gap in gaps if gap > 0]


def _segments_then(history: History) -> list[tuple[int, int]]:
    """Starts and ends of the segments at the moment; empty if undoing changes takes too long."""
    snapshot = history.snapshot
    later = snapshot.events[history.at + 1 :]
    since = [event for event in later if event.action in _GROWS + _SHRINKS]
    if len(since) * (len(since) + len(snapshot.segments)) > _MOST_UNDOING:
        return []
    ranges = sorted((each.address, each.address + each.size_bytes) for each in snapshot.segments)
    for event in reversed(since):
        start, end = event.address, event.address + event.size_bytes
        if event.action in _GROWS:
            ranges = list(_without(ranges, start, end))
        else:
            insort(ranges, (start, end))
    expands = any(segment.is_expandable for segment in snapshot.segments) or any(
        event.action == "segment_map" for event in snapshot.events
    )
    return list(_joined(ranges, neighbours=expands))


def _without(ranges: Iterable[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    for first, last in ranges:
        if last <= start or first >= end:
            yield first, last
            continue
        if first < start:
            yield first, start
        if end < last:
            yield end, last


def _joined(ranges: Iterable[tuple[int, int]], *, neighbours: bool) -> Iterator[tuple[int, int]]:
    """Merge sorted ranges that overlap; with ``neighbours`` also those that touch."""
    held: tuple[int, int] | None = None
    for first, last in ranges:
        if held is None:
            held = first, last
        elif first < held[1] or (neighbours and first == held[1]):
            held = held[0], max(held[1], last)
        else:
            yield held
            held = first, last
    if held is not None:
        yield held
