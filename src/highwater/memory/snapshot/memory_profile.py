"""Memory profile: allocations live on a device at its peak, their timeline, and advice."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from highwater.memory.snapshot.attribution import CATEGORIES, Attribution, Category, is_traced
from highwater.memory.snapshot.history import History, Moment, free_blocks, history_of
from highwater.memory.snapshot.snapshot import Snapshot, read_snapshot
from highwater.nouns.codec import Record, from_json

Key = TypeVar("Key")
_PLACES = 40
_STACKS = 40
"""Most places, and most stacks, that a profile lists, the largest first."""
_COLUMNS = 240
"""Most points of a timeline."""
_LEAST_SHARE = 400
"""A box of the flame graph has at least 1/400 of all bytes: narrower ones are left out."""
_DEEPEST = 48
"""Most frames of a stack in a flame graph, from the outermost."""
_COORDINATES = re.compile(r"rank[-_]?(?P<rank>\d+)(?:_(?P<place>(?:[a-z]{1,3}\d+)+))?")
_COORDINATE = re.compile(r"[a-z]+\d+")


class InCategory(Record, frozen=True, kw_only=True):
    """Bytes and number of the allocations of one category."""

    category: Category
    bytes: int
    count: int


class InPlace(Record, frozen=True, kw_only=True):
    """Bytes and number of the allocations requested by one line of a program."""

    place: str
    """The line, ``engine/models/loss.py:88 forward``; empty for allocations without a stack."""
    category: Category
    bytes: int
    count: int


class InStack(Record, frozen=True, kw_only=True):
    """Bytes and number of the allocations that one stack requested."""

    frames: tuple[str, ...]
    """The frames of the stack, the innermost first."""
    phase: str
    category: Category
    bytes: int
    count: int


class TimePoint(Record, frozen=True, kw_only=True):
    """Bytes by category at the highest point of one part of the trace."""

    event: int
    time_s: float
    """Seconds since the first event."""
    bytes: tuple[int, ...]
    """Bytes of each category, in the order of ``CATEGORIES``."""


class FlameBox(Record, frozen=True, kw_only=True):
    """One box of a flame graph: a frame, with all bytes that it and its callees hold."""

    frame: str
    depth: int
    """0 for the outermost frame."""
    start_bytes: int
    """Bytes to the left of the box."""
    bytes: int
    category: Category
    """The category of most of these bytes."""


class MemoryProfile(Record, frozen=True, kw_only=True):
    """What held the memory of one GPU in a snapshot: by category, line, stack and time."""

    path: str
    rank: int | None
    """The rank in the name of the file; None without one."""
    coordinates: tuple[str, ...]
    """The rank's coordinates in its mesh, in the name of the file: ``p0``, ``d1``."""
    device: int
    devices: int
    """Number of devices in the file; ``device`` has the most events."""
    is_traced: bool
    """True if the file is a prediction: a timeline that ``predict --exact`` wrote."""
    events: int
    """Number of events in the file; earlier events were not kept."""
    moment: Moment
    moment_event: int | None
    """Number of the moment's event; None without events."""
    phase: str
    """The phase that the program had named at the moment; empty if none."""
    time_s: float | None
    """Seconds from the first event to the moment; None without events."""
    allocated_bytes: int
    """Bytes alive at the moment, as they were requested."""
    before_bytes: int
    """The part of ``allocated_bytes`` from before the first event."""
    reserved_bytes: int | None
    requested_bytes: int | None
    """Size of the request that failed; None if memory did not run out."""
    device_free_bytes: int | None
    free_bytes: int | None
    """Bytes that the allocator had reserved and not allocated; None without recorded segments."""
    largest_free_bytes: int | None
    """The largest block of ``free_bytes``."""
    categories: tuple[InCategory, ...]
    places: tuple[InPlace, ...]
    stacks: tuple[InStack, ...]
    timeline: tuple[TimePoint, ...]
    flame_graph: tuple[FlameBox, ...]
    allocator_settings: dict[str, str]

    @property
    def name(self) -> str:
        """The rank and its coordinates, else the name of the file."""
        if self.rank is None:
            return Path(self.path).name
        return " ".join((f"rank {self.rank}", *self.coordinates))

    def bytes_of(self, category: Category) -> int:
        """Bytes of a category live at the snapshot's moment; 0 if it has none."""
        return next((each.bytes for each in self.categories if each.category == category), 0)


def memory_profile(path: str | Path) -> MemoryProfile:
    """The profile of a snapshot of any program, written by ``torch.cuda.memory._dump_snapshot``, or
    of a timeline by ``predict --exact``. Raises SnapshotError for any other file.
    """
    snapshot = read_snapshot(Path(path))
    history, attribution = history_of(snapshot), Attribution(snapshot)
    at, free = history.at, free_blocks(history)
    rank, coordinates = _coordinates(Path(snapshot.path).stem)
    grouped = _grouped(history, attribution)
    return MemoryProfile(
        path=snapshot.path,
        rank=rank,
        coordinates=coordinates,
        device=snapshot.device,
        devices=snapshot.devices,
        is_traced=any(is_traced(snapshot, stack) for stack in range(len(snapshot.stacks))),
        events=len(snapshot.events),
        moment=history.moment,
        moment_event=max(at, 0) if snapshot.events else None,
        phase=snapshot.events[at].phase if at >= 0 else "",
        time_s=_seconds(snapshot, at) if snapshot.events else None,
        allocated_bytes=history.allocated_bytes,
        before_bytes=sum(each.size_bytes for each in history.alive if each.born < 0),
        reserved_bytes=history.reserved_bytes,
        requested_bytes=history.requested_bytes,
        device_free_bytes=history.device_free_bytes,
        free_bytes=None if free is None else sum(free),
        largest_free_bytes=None if free is None else max(free, default=0),
        categories=tuple(_categories(grouped)),
        places=tuple(_places(grouped, attribution)),
        stacks=tuple(_stacks(grouped, attribution, snapshot)),
        timeline=tuple(_timeline(history, attribution)),
        flame_graph=tuple(_flame_graph(grouped, attribution, snapshot)),
        allocator_settings=dict(snapshot.allocator_settings),
    )


_Group = tuple[int, str, Category]
"""A stack, a phase and a category."""
_Callers = tuple[int, Category, tuple[str, ...]]
"""Bytes, their category, and the frames of their stack, the outermost first."""
_Groups = dict[_Group, tuple[int, int]]
"""Bytes and number of the live allocations, by stack, phase and category; the largest first."""


def _grouped(history: History, attribution: Attribution) -> _Groups:
    return _added_up(
        ((each.stack, each.phase, attribution.category(each)), each.size_bytes, 1)
        for each in history.alive
    )


def _added_up(parts: Iterable[tuple[Key, int, int]]) -> dict[Key, tuple[int, int]]:
    """Sum bytes and number of the parts with the same key; the largest first."""
    sizes: Counter[Key] = Counter()
    counts: Counter[Key] = Counter()
    for key, size, count in parts:
        sizes[key] += size
        counts[key] += count
    return {key: (size, counts[key]) for key, size in sizes.most_common()}


def _coordinates(stem: str) -> tuple[int | None, tuple[str, ...]]:
    """The rank and its coordinates in a file's name, such as ``snapshot_rank00_p0d1c0t0``."""
    found = _COORDINATES.search(stem)
    # a number of more than 6 digits is no rank
    if found is None or len(found["rank"]) > 6:
        return None, ()
    return int(found["rank"]), tuple(_COORDINATE.findall(found["place"] or ""))


def _seconds(snapshot: Snapshot, at: int) -> float:
    first = snapshot.events[0].time_us
    return max(0, snapshot.events[max(at, 0)].time_us - first) / 1e6


def _categories(groups: _Groups) -> Iterator[InCategory]:
    found = _added_up((category, *told) for (_, _, category), told in groups.items())
    for category in CATEGORIES:
        size, count = found.get(category, (0, 0))
        yield InCategory(category=category, bytes=size, count=count)


def _places(groups: _Groups, attribution: Attribution) -> Iterator[InPlace]:
    parts: Iterator[tuple[tuple[str, Category], int, int]] = (
        ((attribution.place(stack), category), size, count)
        for (stack, _, category), (size, count) in groups.items()
    )
    for (place, category), (size, count) in islice(_added_up(parts).items(), _PLACES):
        yield InPlace(place=place, category=category, bytes=size, count=count)


def _stacks(groups: _Groups, attribution: Attribution, snapshot: Snapshot) -> Iterator[InStack]:
    for (stack, phase, category), (size, count) in islice(groups.items(), _STACKS):
        yield InStack(
            frames=tuple(map(attribution.line, snapshot.stacks[stack])),
            phase=phase,
            category=category,
            bytes=size,
            count=count,
        )


def _timeline(history: History, attribution: Attribution) -> Iterator[TimePoint]:
    """Highest point in each of ``_COLUMNS`` equal parts of the trace, by category."""
    events = len(history.snapshot.events)
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in history.allocations:
        index = CATEGORIES.index(attribution.category(each))
        changes[each.born].append((index, each.size_bytes))
        changes[each.died].append((index, -each.size_bytes))
    level = [0] * len(CATEGORIES)
    for index, size in changes[-1]:
        level[index] += size
    total = sum(level)
    for column in range(min(_COLUMNS, events)):
        first, last = (events * edge // min(_COLUMNS, events) for edge in (column, column + 1))
        most: tuple[int, int, tuple[int, ...]] = (-1, first, tuple(level))
        for number in range(first, last):
            for index, size in changes.get(number, ()):
                level[index] += size
                total += size
            if total > most[0]:
                most = total, number, tuple(level)
        yield TimePoint(event=most[1], time_s=_seconds(history.snapshot, most[1]), bytes=most[2])


def _flame_graph(
    groups: _Groups, attribution: Attribution, snapshot: Snapshot
) -> Iterator[FlameBox]:
    """Boxes of the stacks, the outermost frame at the bottom, from the largest to the smallest."""
    least = max(1, sum(size for size, _ in groups.values()) // _LEAST_SHARE)

    @cache
    def from_outside(stack: int) -> tuple[str, ...]:
        """Frames of a stack, the outermost first, without those that only pass a call on."""
        frames = reversed(snapshot.stacks[stack])
        told = (index for index in frames if not attribution.is_between(index))
        return tuple(map(attribution.line, islice(told, _DEEPEST)))

    callers: list[_Callers] = []
    for (stack, phase, category), (size, _) in groups.items():
        if size:
            without = f"no stack, in phase {phase}" if phase else "no stack"
            callers.append((size, category, from_outside(stack) or (without,)))
    waiting = [(0, 0, callers)]
    while waiting:
        depth, start, together = waiting.pop()
        by_frame: dict[str, list[_Callers]] = defaultdict(list)
        for each in together:
            if depth < len(each[2]):
                by_frame[each[2][depth]].append(each)
        sizes = {name: sum(size for size, _, _ in own) for name, own in by_frame.items()}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            if sizes[name] < least:
                break
            yield FlameBox(
                frame=name,
                depth=depth,
                start_bytes=start,
                bytes=sizes[name],
                category=next(iter(_added_up((of, size, 1) for size, of, _ in by_frame[name]))),
            )
            waiting.append((depth + 1, start, by_frame[name]))
            start += sizes[name]


Advice = Literal[
    "expandable segments",
    "chunked loss",
    "recompute",
    "context parallel",
    "fewer copies",
    "one-micro-batch",
    "offload",
    "smaller buckets",
]
"""Settings to try, by their words in a rung's label or their field."""
ADVICE: Mapping[Advice, str] = from_json(
    Path(__file__).with_name("advice.json").read_bytes(), dict[Advice, str]
)
"""Text for each advice: the reason, and what to type, in highwater and in other programs."""
_STATES: tuple[Category, ...] = ("parameters", "gradients", "optimizer_states")
_MOST_OF_IT = 4
"""Logits or buffers of at least 1/4 of all bytes are advised on first: it costs little speed."""
_MANY_GRADIENTS = 8
"""Gradients of at least 1/8 of all bytes are worth a step of one micro-batch."""
NOT_IN_A_SNAPSHOT: tuple[Advice, ...] = ("fewer copies", "one-micro-batch")
"""Settings that may be in use already: a snapshot does not tell."""


def advice_of(
    sizes: Mapping[Category, int],
    *,
    requested_bytes: int | None,
    free_bytes: int | None,
    tried: Collection[Advice] = (),
) -> Advice | None:
    """The setting to try first, by ``sizes``, the live bytes by category; None if none stands out.
    ``free_bytes``: reserved but not allocated. ``tried``: settings already in use.
    """
    total = sum(sizes.values())
    states = sum(sizes.get(each, 0) for each in _STATES)
    activations = sizes.get("activations", 0)
    are_states = states * 2 >= total and states >= activations
    fits_in_pieces = requested_bytes is not None and (free_bytes or 0) >= requested_bytes > 0
    helps: dict[Advice, bool] = {
        "expandable segments": fits_in_pieces,
        "chunked loss": sizes.get("logits", 0) * _MOST_OF_IT >= total,
        "smaller buckets": sizes.get("communication", 0) * _MOST_OF_IT >= total,
        "fewer copies": are_states,
        "one-micro-batch": are_states and sizes.get("gradients", 0) * _MANY_GRADIENTS >= total,
        "offload": are_states,
        "recompute": activations * 2 >= total,
        "context parallel": activations * 2 >= total,
    }
    return next(
        (advice for advice, does in helps.items() if total and does and advice not in tried), None
    )
