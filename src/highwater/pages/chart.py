"""Charts as values, which ``charts.html.j2`` draws: how a study's brackets closed, the memory of
its trials, and the live bytes of a memory snapshot, over time and by stack.

Coordinates are pixels, and y grows downwards; in a memory picture, per cent of its width.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from highwater.memory.snapshot.attribution import CATEGORIES, CATEGORY_WORDS
from highwater.memory.snapshot.memory_profile import MemoryProfile
from highwater.nouns.trial import Outcome
from highwater.pages.study_report import CellReport, StudyReport, TrialReport
from highwater.pages.text import plain
from highwater.units import GIB, MIB, counted, format_bytes, format_seconds, format_tokens


class Tick(NamedTuple):
    """A mark on an axis: its place in pixels, and its label."""

    at: float
    text: str
    anchor: str = "middle"


class Shape(NamedTuple):
    """A part of a chart to draw: a rectangle, a polygon, or the mark of an outcome."""

    kind: str
    """CSS class: the colour; for a mark also its form."""
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0
    points: str = ""
    """The corners of a polygon."""
    text: str = ""
    """Tooltip: what the shape means."""
    label: str = ""
    """The part of ``text`` that fits into the shape; empty if none does."""


class Chart(NamedTuple):
    """A chart as shapes and axes, for a template to draw."""

    text: str
    """Text for readers who do not see the chart."""
    width: float
    height: float
    left: float = 0
    bottom: float = 0
    up: Sequence[Tick] = ()
    """Ticks of the vertical axis, with a line across the chart at each."""
    across: Sequence[Tick] = ()
    across_at: float = 0
    across_name: str = ""
    spans: Sequence[Shape] = ()
    areas: Sequence[Shape] = ()
    marks: Sequence[Shape] = ()
    boxes: Sequence[Shape] = ()
    moment: Tick | None = None
    """A dashed vertical line."""


_LEFT, _TOP, _PLOT_HEIGHT, _BOTTOM = 64, 12, 190, 40
_WIDTH = 340
"""Width in pixels that a phone shows without scrolling."""
_STEP, _LABEL = 15, 26
"""Least space in pixels between two trials, and between two of their numbers."""
_MOST_ROWS = 24
SHAPES: dict[Outcome | None, str] = {
    Outcome.FIT: "fit",
    Outcome.MEMORY_ONLY_FIT: "memory-only",
    Outcome.OUT_OF_MEMORY: "ran-out",
    Outcome.HOST_OUT_OF_MEMORY: "host-ran-out",
    Outcome.TIMEOUT: "late",
    Outcome.CRASHED: "crashed",
    None: "unknown",
}
"""Form of the mark for each outcome."""


def bracket_chart(cell: CellReport, report: StudyReport) -> Chart | None:
    """Chart of a cell's trials, their lengths in order of start; None without trials."""
    trials = [report.trials[step.trial - 1] for step in cell.bracket]
    if not trials:
        return None
    width = max(_WIDTH, _LEFT + _STEP * len(trials) + 8)
    spacing = (width - _LEFT - 8) / len(trials)
    top = max(trial.length_tokens for trial in trials) * 1.08
    bottom = _TOP + _PLOT_HEIGHT
    # ticks: at most five lengths from zero, in steps of a power of two times 256
    unit = 256
    while top / unit > 4.5:
        unit *= 2

    def y(tokens: float) -> float:
        return round(bottom - _PLOT_HEIGHT * min(1.0, tokens / top), 1)

    def x(index: int) -> float:
        return round(_LEFT + spacing * (index + 0.5), 1)

    marks = [
        Shape(
            "ran-out" if trial.lacks_headroom else SHAPES[trial.outcome],
            x=x(index),
            y=y(trial.length_tokens),
            text=f"trial {trial.number}, {format_tokens(trial.length_tokens)} tokens: "
            f"{trial.outcome_in_words}",
        )
        for index, trial in enumerate(trials)
    ]
    spans = [
        Shape(
            "bracket",
            x=round(x(index) - spacing / 2, 1),
            y=(upper := y(step.does_not_fit_tokens or top)),
            width=round(spacing, 1),
            height=round(y(step.fits_tokens or 0) - upper, 1),
        )
        for index, step in enumerate(cell.bracket)
    ]
    fits, fails = cell.bracket[-1].fits_tokens, cell.bracket[-1].does_not_fit_tokens
    longest = "no length fit" if fits is None else f"{format_tokens(fits)} tokens fit"
    beyond = "none above it failed" if fails is None else f"{format_tokens(fails)} did not"
    lengths = range(0, int(top) + 1, unit)
    numbered = list(enumerate(trials))[:: ceil(_LABEL / spacing)]
    return Chart(
        text=f"{cell.label}: the bracket after {counted(len(trials), 'trial')}: {longest}, "
        f"{beyond}. The table below has each.",
        width=width,
        height=bottom + _BOTTOM,
        left=_LEFT,
        bottom=bottom,
        up=[Tick(y(tokens), format_tokens(tokens)) for tokens in lengths],
        across=[Tick(x(index), str(trial.number)) for index, trial in numbered],
        across_at=bottom + 17,
        across_name="trial, in order",
        spans=spans,
        marks=marks,
    )


class MemoryRow(NamedTuple):
    """One trial in a memory picture; bars end at per cent of the picture's width."""

    text: str
    allocated: float
    reserved: float
    used: float
    asked: float | None
    """End of the refused request, whose bar begins where ``reserved`` ends; None: no refusal."""
    low: float | None
    high: float | None
    predicted: float | None
    measured: float | None
    """Memory in use on the device, of a trial that fit."""
    ran_out: bool
    limit: float | None


class MemoryPicture(NamedTuple):
    """Picture of the memory of a study's trials, a row of bars for each."""

    rows: tuple[MemoryRow, ...]
    ticks: tuple[Tick, ...]
    left_out: int
    """Number of trials that are not drawn: of many, only those at a bracket's edges are."""


def memory_picture(report: StudyReport) -> MemoryPicture | None:
    """Draw each trial's memory, limit and predicted interval; None if no trial's was measured."""
    known = [trial for trial in report.trials if max(_peaks(trial))]
    shown = known
    if len(known) > _MOST_ROWS:
        # of each cell, trials of the longest length that fit and the shortest that did not
        edges = {
            step.trial
            for cell in report.cells
            for step in cell.bracket
            if report.trials[step.trial - 1].length_tokens
            in (cell.bracket[-1].fits_tokens, cell.bracket[-1].does_not_fit_tokens)
        }
        shown = [trial for trial in known if trial.number in edges][:_MOST_ROWS]
    if not shown:
        return None
    intervals = [each.predicted.interval for each in shown if each.predicted is not None]
    longest = 1.02 * max(
        *(max(*_peaks(trial), trial.limit_bytes or 0, _request_end(trial)) for trial in shown),
        *(0 if around is None else around.high_bytes for around in intervals),
        0,
    )

    def x(count: int | None) -> float:
        return round(100 * (count or 0) / longest, 2)

    step = max(1, round(longest / GIB / 4))
    sizes = range(0, int(longest / GIB) + 1, step) if longest > GIB else ()
    return MemoryPicture(
        rows=tuple(_row(trial, x) for trial in shown),
        ticks=tuple(Tick(x(size * GIB), f"{size} GiB") for size in sizes),
        left_out=len(known) - len(shown),
    )


def _row(trial: TrialReport, x: Callable[[int | None], float]) -> MemoryRow:
    """Make the bars of a trial; ``x`` converts bytes to per cent of the picture's width."""
    predicted, limit = trial.predicted, trial.limit_bytes
    around = None if predicted is None else predicted.interval
    is_fit = trial.outcome is not None and trial.outcome.is_fit
    used = trial.device_used_bytes or trial.peak_reserved_bytes
    text = f"{trial.number}: {trial.cell}, {format_tokens(trial.length_tokens)}"
    if not trial.counts_as_fit or trial.is_memory_only:
        text += f", {trial.outcome_in_words}"
        asked = format_bytes(trial.requested_bytes)
        text += f", no room for {asked}" if trial.requested_bytes else ""
    return MemoryRow(
        text=text,
        allocated=x(trial.peak_allocated_bytes),
        reserved=x(trial.peak_reserved_bytes),
        used=x(used),
        asked=x(_request_end(trial)) if trial.requested_bytes else None,
        low=None if around is None else x(around.low_bytes),
        high=None if around is None else x(around.high_bytes),
        predicted=None if predicted is None else x(predicted.device_used_bytes),
        measured=x(used) if is_fit and used else None,
        ran_out=trial.outcome is Outcome.OUT_OF_MEMORY,
        limit=None if limit is None else x(limit),
    )


def _peaks(trial: TrialReport) -> tuple[int, int, int]:
    peaks = trial.peak_allocated_bytes, trial.peak_reserved_bytes, trial.device_used_bytes
    return peaks[0] or 0, peaks[1] or 0, peaks[2] or 0


def _request_end(trial: TrialReport) -> int:
    """Total bytes including the request that failed, where its bar ends; 0 if none failed."""
    if not trial.requested_bytes:
        return 0
    return trial.requested_bytes + max(trial.device_used_bytes or 0, trial.peak_reserved_bytes or 0)


WIDTHS = {1: 1080.0, 2: 540.0}
"""Width in pixels of a memory profile's charts, by how many are side by side."""
_TIME_LEFT, _TIME_TOP, _TIME_PLOT, _BELOW = 70, 22, 240, 26
_ROW_HEIGHT, _LETTER, _LEAST_LABEL = 19, 6.9, 34


def timeline_chart(profile: MemoryProfile, *, width: float, most_bytes: int) -> Chart | None:
    """Chart of bytes by category over a trace, up to ``most_bytes``; None without events."""
    points = profile.timeline
    if not points:
        return None
    bottom, last = _TIME_TOP + _TIME_PLOT, len(points) - 1
    step = (width - _TIME_LEFT - 8) / max(1, last)
    xs = [round(_TIME_LEFT + step * index, 1) for index in range(len(points))]
    # for each point, the upper end of each category's bytes, stacked from the bottom
    ends = [[0, *accumulate(point.bytes)] for point in points]
    scale = _TIME_PLOT / max(1, most_bytes)
    areas: list[Shape] = []
    for index, category in enumerate(CATEGORIES):
        if any(point.bytes[index] for point in points):
            lower, upper = (
                [(x, bottom - each[at] * scale) for x, each in zip(xs, ends, strict=True)]
                for at in (index, index + 1)
            )
            polygon = " ".join(f"{x:g},{y:.1f}" for x, y in (*upper, *lower[::-1]))
            areas.append(Shape(category, points=polygon, text=CATEGORY_WORDS[category]))
    moment = peak = max(range(len(points)), key=lambda index: ends[index][-1])
    if profile.moment != "peak" and profile.moment_event is not None:
        # the last event before memory ran out
        event = profile.moment_event
        moment = next((at for at, point in enumerate(points) if point.event >= event), last)
    at = xs[moment]
    return Chart(
        text=f"{plain(profile.name)}: what was allocated over the trace, by category: "
        f"{format_bytes(ends[peak][-1])} at the most",
        width=width,
        height=bottom + _BELOW,
        left=_TIME_LEFT,
        bottom=bottom,
        up=list(_sizes(most_bytes, bottom, scale)),
        across=[
            Tick(xs[index], _time(profile, index), "end" if index else "start")
            for index in sorted({0, last})
        ],
        across_at=bottom + 18,
        areas=areas,
        moment=Tick(
            at, profile.moment, "end" if at > width - 100 else "start" if at < 100 else "middle"
        ),
    )


def _sizes(most: int, bottom: float, scale: float) -> Iterator[Tick]:
    """Yield ticks at whole GiB (or MiB), at most five and zero."""
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    step = unit
    while most // step > 5:
        step *= 2
    for size in range(0, most + 1, step):
        yield Tick(round(bottom - size * scale, 1), f"{size // unit} {name}")


def _time(profile: MemoryProfile, at: int) -> str:
    """Time of a point of the timeline; for a trace, which has no clock, its event number."""
    point = profile.timeline[at]
    return f"event {point.event:,}" if profile.is_traced else format_seconds(point.time_s)


def share(size: int, profile: MemoryProfile) -> str:
    """Share of all allocated bytes, in per cent: ``56 %``."""
    return f"{100 * size / max(1, profile.allocated_bytes):.0f} %"


def flame_chart(profile: MemoryProfile, *, width: float) -> Chart:
    """Chart of live bytes by stack: outermost frames on top, callees below their callers."""
    scale = width / max(1, profile.allocated_bytes)
    boxes: list[Shape] = []
    for each in profile.flame_graph:
        own, name = max(1.0, round(each.bytes * scale, 1) - 1), plain(each.frame)
        room = int((own - 8) / _LETTER)
        label = name if len(name) <= room else f"{name[: max(0, room - 1)]}…"
        boxes.append(
            Shape(
                each.category,
                x=round(each.start_bytes * scale, 1),
                y=each.depth * _ROW_HEIGHT,
                width=own,
                label=label if own >= _LEAST_LABEL else "",
                text=f"{name}: {format_bytes(each.bytes)}, {share(each.bytes, profile)}; most of "
                f"it {CATEGORY_WORDS[each.category]}",
            )
        )
    depth = max((each.depth for each in profile.flame_graph), default=-1)
    return Chart(
        text=f"{plain(profile.name)}: what was allocated by stack, "
        f"{format_bytes(profile.allocated_bytes)}; the table of stacks has the largest",
        width=width,
        height=(depth + 1) * _ROW_HEIGHT,
        boxes=boxes,
    )
