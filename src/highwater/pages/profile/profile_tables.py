"""A memory profile as text and as pictures in numbers: what was alive by category and by place, the
areas of its timeline, the boxes of its flame graph.

The template draws them. Lengths are pixels on a screen; y grows downwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from highwater.memory.snapshot.attribution import CATEGORIES, Category
from highwater.memory.snapshot.memory_profile import (
    ADVICE,
    NOT_IN_A_SNAPSHOT,
    Advice,
    FlameBox,
    InStack,
    MemoryProfile,
    advice_of,
)
from highwater.pages.table import TextTable
from highwater.pages.text import plain
from highwater.units import GIB, MIB, counted, format_bytes, format_seconds

WORDS: Mapping[Category, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "backward_pass": "backward pass",
    "logits": "logits, loss",
    "communication": "communication",
    "workspaces": "workspaces",
    "unattributed": "unattributed",
}
"""The categories in words."""
_PLACES = 12
"""Places that a terminal shows; a page and JSON have more."""


def answer(profile: MemoryProfile) -> str:
    """What was alive, in a sentence."""
    known = (each for each in profile.categories if each.bytes)
    largest = sorted(known, key=lambda each: -each.bytes)
    parts = ", ".join(
        f"{WORDS[each.category]} {format_bytes(each.bytes)} ({share(each.bytes, profile)})"
        for each in largest[:2]
    )
    alive = f"{format_bytes(profile.allocated_bytes)} were allocated"
    if profile.moment == "peak":
        return f"{plain(profile.name)}: {alive} at the peak{_in(profile)}: {parts or 'nothing'}"
    return (
        f"{plain(profile.name)}: out of memory{_in(profile)}: no room for "
        f"{format_bytes(profile.requested_bytes)}; {alive}: {parts or 'nothing'}"
    )


def total(profile: MemoryProfile) -> str:
    """How much was alive, and when."""
    when = "at the peak" if profile.moment == "peak" else "when memory ran out"
    return f"{plain(profile.name)}: {format_bytes(profile.allocated_bytes)} {when}"


def _in(profile: MemoryProfile) -> str:
    return f", in {plain(profile.phase)}" if profile.phase else ""


def share(size: int, profile: MemoryProfile) -> str:
    """A size as a part of all that was allocated: ``56 %``."""
    return f"{100 * size / max(1, profile.allocated_bytes):.0f} %"


def category_table(profiles: Sequence[MemoryProfile]) -> TextTable:
    """What was alive by category, a row each; of two profiles with the difference."""
    first = profiles[0]
    if len(profiles) == 1:
        columns = ("category", "allocated", "share", "tensors")
        rows = [
            (
                *(WORDS[each.category], format_bytes(each.bytes)),
                *(share(each.bytes, first), f"{each.count:,}"),
            )
            for each in first.categories
            if each.bytes
        ]
        title = answer(first)
    else:
        columns = ("category", *_names(profiles), "difference")
        rows = [
            (
                WORDS[category],
                *(format_bytes(profile.bytes_of(category)) for profile in profiles),
                _difference(*(profile.bytes_of(category) for profile in profiles[:2])),
            )
            for category in CATEGORIES
            if any(profile.bytes_of(category) for profile in profiles)
        ]
        sizes = [profile.allocated_bytes for profile in profiles]
        rows.append(("all of it", *map(format_bytes, sizes), _difference(*sizes[:2])))
        title = "; ".join(map(total, profiles))
    notes = [line for profile in profiles for line in _notes(profile, named=len(profiles) > 1)]
    return TextTable(
        title=title, columns=columns, rows=tuple(rows), footnotes=tuple(notes), left_columns=1
    )


def _names(profiles: Sequence[MemoryProfile]) -> Iterator[str]:
    """A heading for each, never twice the same."""
    names = [plain(profile.name) for profile in profiles]
    for number, name in enumerate(names, 1):
        yield name if names.count(name) == 1 else f"{name} ({number})"


def _difference(one: int, other: int) -> str:
    sign = "+" if other > one else "-" if other < one else ""
    return f"{sign}{format_bytes(abs(other - one))}"


def memory_lines(profile: MemoryProfile) -> Iterator[str]:
    """Reserved, free and the largest free block, as far as they were recorded."""
    if profile.reserved_bytes is not None:
        said = f"{format_bytes(profile.reserved_bytes)} were reserved by the allocator"
        if profile.free_bytes is not None:
            said += f", of which {format_bytes(profile.free_bytes)} were free, the largest block "
            said += format_bytes(profile.largest_free_bytes)
        yield said
    if profile.device_free_bytes is not None:
        yield f"{format_bytes(profile.device_free_bytes)} were free on the device"


def advice(profile: MemoryProfile) -> Advice | None:
    """The setting to try first."""
    is_expandable = profile.allocator_settings.get("expandable_segments") == "True"
    return advice_of(
        {each.category: each.bytes for each in profile.categories},
        requested_bytes=profile.requested_bytes,
        free_bytes=profile.free_bytes,
        tried=[*NOT_IN_A_SNAPSHOT, *(["expandable segments"] if is_expandable else [])],
    )


def _notes(profile: MemoryProfile, *, named: bool) -> Iterator[str]:
    lines = list(memory_lines(profile))
    found = advice(profile)
    if found is not None:
        lines.append(f"try first: {found}: {ADVICE[found]}")
    lines += what_is_not_known(profile)
    for line in lines:
        yield f"{plain(profile.name)}: {line}" if named else line


def what_is_not_known(profile: MemoryProfile) -> Iterator[str]:
    """What the file does not tell, and why."""
    if profile.is_traced:
        yield (
            "predicted: traced, nothing was trained; gradients that stay are counted with the "
            "optimizer states, from which a trace does not tell them"
        )
    if profile.before_bytes:
        yield (
            f"{format_bytes(profile.before_bytes)} were there before the first of "
            f"{counted(profile.events, 'event')}: a longer history (`max_entries`) names them"
        )
    if not profile.events:
        yield "no events were recorded: this is what was alive when the snapshot was taken"
    if profile.devices > 1:
        yield f"device {profile.device} is shown, of {profile.devices} in the file: the busiest"


def place_table(profile: MemoryProfile, *, most: int = _PLACES) -> TextTable:
    """What was alive by the line that asked for it, the largest first."""
    places = profile.places[:most]
    rest = profile.allocated_bytes - sum(each.bytes for each in places)
    return TextTable(
        title=f"{plain(profile.name)}: who asked for it",
        columns=("place", "category", "allocated", "tensors"),
        rows=tuple(
            (
                *(plain(each.place) or "no stack", WORDS[each.category]),
                *(format_bytes(each.bytes), f"{each.count:,}"),
            )
            for each in places
        ),
        footnotes=(f"{format_bytes(rest)} elsewhere",) if rest > 0 else (),
        left_columns=2,
    )


def stack_heading(stack: InStack, profile: MemoryProfile) -> str:
    """What a stack asked for, and its innermost frame."""
    innermost = plain(stack.frames[0]) if stack.frames else "no stack"
    count = counted(stack.count, "tensor")
    return (
        f"{format_bytes(stack.bytes)} ({share(stack.bytes, profile)}), {count}, "
        f"{WORDS[stack.category]}: {innermost}{f', in {plain(stack.phase)}' if stack.phase else ''}"
    )


WIDTHS = {1: 1080.0, 2: 540.0}
"""Width of a picture, by how many stand beside each other."""
_LEFT, _PLOT_TOP, _PLOT, _BELOW = 70, 22, 240, 26
_ROW_HEIGHT, _LETTER, _LEAST_LABEL = 19, 6.9, 34


class Area(NamedTuple):
    """What was alive of one category, over the trace."""

    category: Category
    label: str
    points: str
    """Of a polygon."""


class GridLine(NamedTuple):
    """A place on an axis and its label."""

    at: float
    text: str


class TimelinePicture(NamedTuple):
    """What was alive over the trace, by category."""

    width: float
    height: float
    left: float
    top: float
    bottom: float
    areas: tuple[Area, ...]
    sizes: tuple[GridLine, ...]
    times: tuple[GridLine, ...]
    moment: float | None
    """Where the moment is; None where there are no events."""
    text: str
    """What the picture shows, in words."""


class Box(NamedTuple):
    """One frame of a flame graph."""

    x: float
    y: float
    width: float
    category: Category
    label: str
    """As much of it as there is room for; empty for none."""
    text: str


class FlamePicture(NamedTuple):
    """What was alive by stack: the outermost frame on top, what it called below it."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    text: str
    """What the picture shows, in words."""


def timeline_picture(
    profile: MemoryProfile, *, width: float, most_bytes: int
) -> TimelinePicture | None:
    """The timeline, to the scale of ``most_bytes``; None where there are no events."""
    points = profile.timeline
    if not points:
        return None
    bottom = _PLOT_TOP + _PLOT
    step = (width - _LEFT - 8) / max(1, len(points) - 1)
    xs = [round(_LEFT + step * index, 1) for index in range(len(points))]
    # of each point where each category ends, from the bottom up
    ends = [[0, *accumulate(point.bytes)] for point in points]
    scale = _PLOT / max(1, most_bytes)
    areas: list[Area] = []
    for index, category in enumerate(CATEGORIES):
        if any(point.bytes[index] for point in points):
            lower, upper = (
                [(x, bottom - each[at] * scale) for x, each in zip(xs, ends, strict=True)]
                for at in (index, index + 1)
            )
            polygon = " ".join(f"{x:g},{y:.1f}" for x, y in (*upper, *lower[::-1]))
            areas.append(Area(category, WORDS[category], polygon))
    peak = max(range(len(points)), key=lambda index: ends[index][-1])
    return TimelinePicture(
        width=width,
        height=bottom + _BELOW,
        left=_LEFT,
        top=_PLOT_TOP,
        bottom=bottom,
        areas=tuple(areas),
        sizes=tuple(_sizes(most_bytes, bottom, scale)),
        times=tuple(GridLine(xs[at], _time(profile, at)) for at in sorted({0, len(points) - 1})),
        moment=xs[_moment(profile, peak)],
        text=f"{plain(profile.name)}: what was allocated over the trace, by category: "
        f"{format_bytes(ends[peak][-1])} at the most",
    )


def most_bytes(profiles: Sequence[MemoryProfile]) -> int:
    """The most that any of them had allocated: the scale that their pictures share."""
    return max((sum(point.bytes) for profile in profiles for point in profile.timeline), default=0)


def _sizes(most: int, bottom: float, scale: float) -> Iterator[GridLine]:
    """Whole GiB, or MiB, at most five of them."""
    unit = GIB if most >= GIB else MIB
    step = unit
    while most // step > 5:
        step *= 2
    for size in range(0, most + 1, step):
        label = f"{size // unit} {'GiB' if unit == GIB else 'MiB'}"
        yield GridLine(round(bottom - size * scale, 1), label)


def _time(profile: MemoryProfile, at: int) -> str:
    """The time of a point; of a trace, which has no clock, its event."""
    point = profile.timeline[at]
    return f"event {point.event:,}" if profile.is_traced else format_seconds(point.time_s)


def _moment(profile: MemoryProfile, peak: int) -> int:
    """The point of the moment: the peak, or the end of the part in which memory ran out."""
    if profile.moment == "peak" or profile.moment_event is None:
        return peak
    events = [point.event for point in profile.timeline]
    later = (index for index, event in enumerate(events) if event >= profile.moment_event)
    return next(later, len(events) - 1)


def flame_picture(profile: MemoryProfile, *, width: float) -> FlamePicture:
    """The flame graph of what was alive at the moment."""
    scale = width / max(1, profile.allocated_bytes)
    boxes = [_box(each, profile, scale) for each in profile.flame_graph]
    depth = max((each.depth for each in profile.flame_graph), default=-1)
    return FlamePicture(
        width=width,
        height=(depth + 1) * _ROW_HEIGHT,
        boxes=tuple(boxes),
        text=f"{plain(profile.name)}: what was allocated by stack, "
        f"{format_bytes(profile.allocated_bytes)}; the table of stacks has the largest",
    )


def _box(each: FlameBox, profile: MemoryProfile, scale: float) -> Box:
    width = max(1.0, round(each.bytes * scale, 1) - 1)
    name = plain(each.frame)
    room = int((width - 8) / _LETTER)
    label = name if len(name) <= room else f"{name[: max(0, room - 1)]}…"
    return Box(
        x=round(each.start_bytes * scale, 1),
        y=each.depth * _ROW_HEIGHT,
        width=width,
        category=each.category,
        label=label if width >= _LEAST_LABEL else "",
        text=f"{name}: {format_bytes(each.bytes)}, {share(each.bytes, profile)}; most of it "
        f"{WORDS[each.category]}",
    )
