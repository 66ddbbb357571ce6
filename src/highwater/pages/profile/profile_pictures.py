"""Pictures of a memory profile as numbers: the areas of its timeline, the boxes of its flame graph.

The template draws them. Lengths are in the units of the picture, which are pixels on a screen; y
grows downwards.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from highwater.memory.snapshot.attribution import CATEGORIES, Category
from highwater.memory.snapshot.memory_profile import FlameBox, MemoryProfile
from highwater.pages.profile.profile_tables import WORDS, share
from highwater.pages.text import plain
from highwater.units import GIB, MIB, format_bytes, format_seconds

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
            upper = [
                (x, bottom - each[index + 1] * scale) for x, each in zip(xs, ends, strict=True)
            ]
            lower = [(x, bottom - each[index] * scale) for x, each in zip(xs, ends, strict=True)]
            areas.append(Area(category, WORDS[category], _polygon([*upper, *lower[::-1]])))
    peak = max(range(len(points)), key=lambda index: ends[index][-1])
    return TimelinePicture(
        width=width,
        height=bottom + _BELOW,
        left=_LEFT,
        top=_PLOT_TOP,
        bottom=bottom,
        areas=tuple(areas),
        sizes=tuple(_sizes(most_bytes, bottom, scale)),
        times=tuple(GridLine(xs[at], _time(profile, at)) for at in _ends_of(len(points))),
        moment=xs[_moment(profile, peak)],
        text=f"{plain(profile.name)}: what was allocated over the trace, by category: "
        f"{format_bytes(ends[peak][-1])} at the most",
    )


def most_bytes(profiles: Sequence[MemoryProfile]) -> int:
    """The most that any of them had allocated: the scale that their pictures share."""
    return max((sum(point.bytes) for profile in profiles for point in profile.timeline), default=0)


def _polygon(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:.1f}" for x, y in points)


def _sizes(most: int, bottom: float, scale: float) -> Iterator[GridLine]:
    """Whole GiB, or MiB, at most five of them."""
    unit = GIB if most >= GIB else MIB
    step = unit
    while most // step > 5:
        step *= 2
    for size in range(0, most + 1, step):
        yield GridLine(
            round(bottom - size * scale, 1), f"{size // unit} {'GiB' if unit == GIB else 'MiB'}"
        )


def _ends_of(points: int) -> tuple[int, ...]:
    return (0,) if points == 1 else (0, points - 1)


def _time(profile: MemoryProfile, at: int) -> str:
    """The time of a point; of a trace, which has no clock, its event."""
    point = profile.timeline[at]
    return f"event {point.event:,}" if profile.is_traced else format_seconds(point.time_s)


def _moment(profile: MemoryProfile, peak: int) -> int:
    """The point of the moment: the peak, or the end of the part in which memory ran out."""
    if profile.moment == "peak" or profile.moment_event is None:
        return peak
    later = (
        index for index, point in enumerate(profile.timeline) if point.event >= profile.moment_event
    )
    return next(later, len(profile.timeline) - 1)


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
