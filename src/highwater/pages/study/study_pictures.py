"""Pictures of a study's report as numbers, which the template draws, and the published layout.

In the picture of a bracket lengths are pixels on a screen, and y grows downwards; in that of memory
they are per cent of its width.
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from highwater.nouns.trial import Outcome
from highwater.pages.study.study_report import CellReport, StudyReport, TrialReport
from highwater.pages.study.study_tables import lacks_headroom, outcome
from highwater.units import GIB, counted, format_bytes, format_tokens

_LEFT, _TOP, _PLOT_HEIGHT, _BOTTOM = 64, 12, 190, 40
_WIDTH = 340
"""Width that a phone shows without scrolling."""
_STEP, _LABEL = 15, 26
"""Space between two trials, and between two of their numbers, at least."""
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
"""Shapes by which the template tells outcomes apart."""


class Mark(NamedTuple):
    """One trial in the picture of a bracket."""

    x: float
    y: float
    shape: str
    text: str


class Span(NamedTuple):
    """The bracket after one trial."""

    x: float
    y: float
    width: float
    height: float


class Tick(NamedTuple):
    """A place on an axis and its label."""

    at: float
    text: str


class BracketPicture(NamedTuple):
    """How the bracket of one cell closed: length against the order of its trials."""

    label: str
    width: float
    height: float
    left: float
    bottom: float
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...]
    lengths: tuple[Tick, ...]
    trials: tuple[Tick, ...]
    text: str
    """What the picture shows, in words."""


class Row(NamedTuple):
    """One trial in a picture of memory: ends of bars in per cent of the picture's width."""

    text: str
    allocated: float
    reserved: float
    used: float
    asked: float | None
    """End of the request that had no room, which begins where ``reserved`` ends; None: none had."""
    low: float | None
    high: float | None
    predicted: float | None
    measured: float | None
    """Memory that a trial used which fit."""
    ran_out: bool
    limit: float | None


class MemoryPicture(NamedTuple):
    """A row for each trial."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    left_out: int
    """Trials that are not drawn: only those of the edges are where there are many."""

    @property
    def has_requests(self) -> bool:
        """Whether a trial was drawn that asked for more than there was."""
        return any(row.asked is not None for row in self.rows)


def bracket_picture(cell: CellReport, report: StudyReport) -> BracketPicture | None:
    """Draw how a cell's bracket closed; None for a cell without a trial."""
    trials = [report.trials[step.trial - 1] for step in cell.bracket]
    if not trials:
        return None
    width = max(_WIDTH, _LEFT + _STEP * len(trials) + 8)
    spacing = (width - _LEFT - 8) / len(trials)
    top = max(trial.length_tokens for trial in trials) * 1.08
    bottom = _TOP + _PLOT_HEIGHT

    def y(tokens: float) -> float:
        return round(bottom - _PLOT_HEIGHT * min(1.0, tokens / top), 1)

    def x(index: int) -> float:
        return round(_LEFT + spacing * (index + 0.5), 1)

    marks = (
        Mark(
            *(x(i), y(t.length_tokens), "ran-out" if lacks_headroom(t) else SHAPES[t.outcome]),
            f"trial {t.number}, {format_tokens(t.length_tokens)} tokens: {outcome(t)}",
        )
        for i, t in enumerate(trials)
    )
    spans = (
        Span(
            round(x(i) - spacing / 2, 1),
            upper := y(step.does_not_fit_tokens or top),
            round(spacing, 1),
            round(y(step.fits_tokens or 0) - upper, 1),
        )
        for i, step in enumerate(cell.bracket)
    )
    last = cell.bracket[-1]
    fits, fails = last.fits_tokens, last.does_not_fit_tokens
    longest = "no length fit" if fits is None else f"{format_tokens(fits)} tokens fit"
    beyond = "none above it failed" if fails is None else f"{format_tokens(fails)} did not"
    return BracketPicture(
        label=cell.label,
        width=width,
        height=bottom + _BOTTOM,
        left=_LEFT,
        bottom=bottom,
        marks=tuple(marks),
        spans=tuple(spans),
        lengths=tuple(Tick(y(tokens), format_tokens(tokens)) for tokens in _round_lengths(top)),
        trials=tuple(
            Tick(x(i), str(trial.number))
            for i, trial in enumerate(trials)
            if i % ceil(_LABEL / spacing) == 0
        ),
        text=f"{cell.label}: the bracket after {counted(len(trials), 'trial')}: {longest}, "
        f"{beyond}. The table below has each.",
    )


def _round_lengths(top: float) -> list[int]:
    """Lengths for an axis: at most five, from zero, in steps of a power of two."""
    step = 256
    while top / step > 4.5:
        step *= 2
    return [step * index for index in range(int(top / step) + 1)]


def memory_picture(report: StudyReport) -> MemoryPicture | None:
    """Draw the memory of each trial, its limit, and its predicted interval. Memory is allocated,
    reserved and device used. None where nothing was measured.
    """
    known = [trial for trial in report.trials if max(_peaks(trial))]
    shown = known
    if len(known) > _MOST_ROWS:
        edges = _edges(report)
        shown = [trial for trial in known if trial.number in edges][:_MOST_ROWS]
    if not shown:
        return None
    longest = 1.02 * max(
        max(*_peaks(trial), trial.limit_bytes or 0, _high(trial), _asked(trial)) for trial in shown
    )

    def x(count: int | None) -> float:
        return round(100 * (count or 0) / longest, 2)

    step = max(1, round(longest / GIB / 4))
    ticks = (
        tuple(Tick(x(size * GIB), f"{size} GiB") for size in range(0, int(longest / GIB) + 1, step))
        if longest > GIB
        else ()
    )
    return MemoryPicture(tuple(_row(trial, x) for trial in shown), ticks, len(known) - len(shown))


def _row(trial: TrialReport, x: Callable[[int | None], float]) -> Row:
    """The bars of a trial; ``x``: bytes to per cent of the picture's width."""
    around = None if trial.predicted is None else trial.predicted.interval
    is_fit = trial.outcome is not None and trial.outcome.is_fit
    used = trial.device_used_bytes or trial.peak_reserved_bytes
    return Row(
        text=_row_text(trial),
        allocated=x(trial.peak_allocated_bytes),
        reserved=x(trial.peak_reserved_bytes),
        used=x(used),
        asked=x(_asked(trial)) if trial.requested_bytes else None,
        low=None if around is None else x(around.low_bytes),
        high=None if around is None else x(around.high_bytes),
        predicted=None if trial.predicted is None else x(trial.predicted.device_used_bytes),
        measured=x(used) if is_fit and used else None,
        ran_out=trial.outcome is Outcome.OUT_OF_MEMORY,
        limit=None if trial.limit_bytes is None else x(trial.limit_bytes),
    )


def _asked(trial: TrialReport) -> int:
    """Where the request ends that had no room: beyond all that was reserved before it."""
    if not trial.requested_bytes:
        return 0
    return trial.requested_bytes + max(trial.device_used_bytes or 0, trial.peak_reserved_bytes or 0)


def _row_text(trial: TrialReport) -> str:
    name = f"{trial.number}: {trial.cell}, {format_tokens(trial.length_tokens)}"
    if trial.counts_as_fit and not trial.is_memory_only:
        return name
    asked = f", no room for {format_bytes(trial.requested_bytes)}" if trial.requested_bytes else ""
    return f"{name}, {outcome(trial)}{asked}"


def _peaks(trial: TrialReport) -> tuple[int, int, int]:
    peaks = trial.peak_allocated_bytes, trial.peak_reserved_bytes, trial.device_used_bytes
    return peaks[0] or 0, peaks[1] or 0, peaks[2] or 0


def _high(trial: TrialReport) -> int:
    interval = trial.predicted.interval if trial.predicted else None
    return 0 if interval is None else interval.high_bytes


def _edges(report: StudyReport) -> set[int]:
    """Trials of the longest length that fit and of the shortest that did not, of each cell."""
    return {
        step.trial
        for cell in report.cells
        for step in cell.bracket
        if report.trials[step.trial - 1].length_tokens
        in (cell.bracket[-1].fits_tokens, cell.bracket[-1].does_not_fit_tokens)
    }
