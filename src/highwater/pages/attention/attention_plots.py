"""Plots of a benchmark of attentions as numbers: time, or memory, by the length, both in powers.

The template draws them, for a page and as a file of its own. Lengths are in the units of the
picture; y grows downwards.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from highwater.nouns.attention_bench import AttentionBench, BenchRow, Direction
from highwater.pages.attention.attention_conclusions import WORDS
from highwater.pages.page import page_template
from highwater.recommendation.attention_summary import entries, peak_bytes, rows_of
from highwater.units import format_bytes, format_pass, format_tokens

_WIDTH, _ABOVE, _BESIDE, _AREA, _TO_THE_RIGHT = 760.0, 14.0, 84.0, 300.0, 20.0
_LEGEND_ROW, _LEGEND_COLUMNS = 20.0, 3
COLOURS = 6
"""Colours that lines have, in turn; what comes again is dashed."""


class PlotPoint(NamedTuple):
    """One case."""

    x: float
    y: float
    text: str


class PlotLine(NamedTuple):
    """One implementation and mode."""

    name: str
    colour: int
    is_dashed: bool
    points: tuple[PlotPoint, ...]
    legend_x: float
    legend_y: float

    @property
    def path(self) -> str:
        """Points of a polyline."""
        return " ".join(f"{point.x:g},{point.y:g}" for point in self.points)


class PlotTick(NamedTuple):
    """A place on an axis and its label."""

    at: float
    text: str


class Plot(NamedTuple):
    """Lines of one figure by the length."""

    name: str
    """Of its file."""
    title: str
    width: float
    height: float
    left: float
    bottom: float
    lines: tuple[PlotLine, ...]
    lengths: tuple[PlotTick, ...]
    sizes: tuple[PlotTick, ...]

    def svg(self, *, alone: bool = False) -> Markup:
        """The picture, in a page or ``alone``, as a file."""
        drawn = page_template("attention_plot.svg.j2").render(plot=self, alone=alone)
        return Markup(drawn)  # noqa: S704 -- the template has escaped what it was given


def plots(bench: AttentionBench) -> list[Plot]:
    """Time and memory of each direction; those of which something was measured."""
    made = [
        plot
        for direction in bench.order.directions
        for plot in (
            _plot(bench, direction, "time", "time of a pass", _time, format_pass),
            _plot(bench, direction, "memory", "peak allocated", peak_bytes, _size),
        )
    ]
    return [plot for plot in made if plot is not None]


def _time(row: BenchRow) -> float:
    return row.time_s or 0.0


def _size(count: float) -> str:
    return format_bytes(round(count))


def _plot(
    bench: AttentionBench,
    direction: Direction,
    what: str,
    title: str,
    figure: Callable[[BenchRow], float],
    said: Callable[[float], str],
) -> Plot | None:
    series = {
        entry: [row for row in rows_of(bench, entry) if row.fits and figure(row) > 0]
        for entry in entries(bench)
        if entry.direction == direction and entry.mode != "data parallel"  # as of one GPU alone
    }
    series = {entry: rows for entry, rows in series.items() if rows}
    if not series:
        return None
    every = [row for rows in series.values() for row in rows]
    x = _Axis([row.length_tokens or 1 for row in every], _BESIDE, _WIDTH - _TO_THE_RIGHT)
    y = _Axis([figure(row) for row in every], _ABOVE + _AREA, _ABOVE)
    powers_of = 10 if what == "time" else 4
    lines: list[PlotLine] = []
    for number, (entry, rows) in enumerate(series.items()):
        name = entry.implementation
        points = (
            PlotPoint(
                x(row.length_tokens or 1),
                y(figure(row)),
                f"{name}, {format_tokens(row.length_tokens)} tokens: {said(figure(row))}",
            )
            for row in rows
        )
        row, column = divmod(number, _LEGEND_COLUMNS)
        lines.append(
            PlotLine(
                name=name,
                colour=number % COLOURS,
                is_dashed=number >= COLOURS,
                points=tuple(points),
                legend_x=_BESIDE + column * (_WIDTH - _BESIDE) / _LEGEND_COLUMNS,
                legend_y=_ABOVE + _AREA + 52 + row * _LEGEND_ROW,
            )
        )
    return Plot(
        name=f"{what}-{direction.replace('+', '-')}",
        title=f"{title} by length, {WORDS[direction]}",
        width=_WIDTH,
        height=lines[-1].legend_y + 12,
        left=_BESIDE,
        bottom=_ABOVE + _AREA,
        lines=tuple(lines),
        lengths=tuple(
            PlotTick(x(length), format_tokens(round(length))) for length in x.powers(2, 8)
        ),
        sizes=tuple(PlotTick(y(size), said(size)) for size in y.powers(powers_of, 8)),
    )


class _Axis:
    """From a figure to its place, by its logarithm."""

    def __init__(self, figures: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = min(figures), max(figures)
        self._start, self._end = start, end

    def __call__(self, figure: float) -> float:
        span = math.log(self._high / self._low) or 1.0
        share = math.log(figure / self._low) / span
        return round(self._start + share * (self._end - self._start), 1)

    def powers(self, base: int, most: int) -> list[float]:
        """Powers of a number within the figures, at the most so many; both ends where none is."""
        first = math.ceil(math.log(self._low, base) - 1e-9)
        last = math.floor(math.log(self._high, base) + 1e-9)
        step = max(1, -(-(last - first + 1) // most))
        found = [float(base) ** power for power in range(first, last + 1, step)]
        ends = [self._low] if self._low == self._high else [self._low, self._high]
        whole = found if len(found) > 1 else ends
        return list(whole)
