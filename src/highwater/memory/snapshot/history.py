"""History: which allocations were alive at each event of a snapshot, and at the moment that counts:
the peak, or when memory ran out.

A trace is the last events of a program (``max_entries``), and ends with the snapshot. What was
there before it began is known only by what was freed later, or is in the segments at the end.
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
"""Events of segments since the moment, times segments, that are undone to see the free blocks."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory from when it was asked for until it was given back."""

    address: int
    size_bytes: int
    stack: int
    phase: str
    born: int
    """Number of the event; -1: before the first that was kept."""
    died: int
    """Number of the event; the number of events for what was alive in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Every allocation of a snapshot, and the moment that counts."""

    snapshot: Snapshot
    allocations: tuple[Allocation, ...]
    moment: Moment
    at: int
    """Number of the event; -1 where there are none."""
    allocated_bytes: int
    """Bytes that were asked for and not given back at the moment."""
    reserved_bytes: int | None
    """Bytes that the allocator had from the driver at the moment; None where nothing tells."""
    requested_bytes: int | None
    """Size of the request for which there was no room."""
    device_free_bytes: int | None
    """Bytes that the driver still had then."""

    @property
    def alive(self) -> Iterator[Allocation]:
        """Allocations that were alive at the moment."""
        return (each for each in self.allocations if each.born <= self.at < each.died)


def history_of(snapshot: Snapshot) -> History:
    """Replay a snapshot's events; raises SnapshotError for sizes that no device has."""
    allocations = tuple(_allocations(snapshot))
    levels = _levels(allocations, len(snapshot.events))
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
    """The allocation that an event began, or that it ended; who ended it says not who made it."""
    stack, phase = (event.stack, event.phase) if born >= 0 else (0, "")
    return Allocation(event.address, event.size_bytes, stack, phase, born, died)


def _levels(allocations: Iterable[Allocation], events: int) -> list[int]:
    """Bytes alive before the first event, and after each."""
    levels = [0] * (events + 2)
    for each in allocations:
        levels[each.born + 1] += each.size_bytes
        levels[each.died + 1] -= each.size_bytes
    return list(accumulate(levels))[:-1]


def _moment(events: Sequence[AllocatorEvent], levels: Sequence[int]) -> tuple[int, bool]:
    """The out of memory at which the most was needed, else the peak; and which of them it is."""
    failed = [number for number, event in enumerate(events) if event.action == "oom"]
    if failed:
        most = max(failed, key=lambda number: levels[number + 1] + events[number].size_bytes)
        return most, True
    return max(range(len(levels)), key=levels.__getitem__) - 1, False


def _reserved_bytes(snapshot: Snapshot, at: int) -> int | None:
    """The segments at the end, less what came and plus what went since the moment."""
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
    """Bytes of each gap between what was alive in the segments of the moment; None where nothing
    tells. A request fails where no gap is as large; one of less than 1 MiB may be the unused end of
    a block.
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
    """Starts and ends of the segments at the moment: those of the end, later changes undone."""
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
    """Ranges of which none overlaps another; with ``neighbours`` none begins where one ends."""
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
