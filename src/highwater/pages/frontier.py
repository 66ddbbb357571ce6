"""Frontier: settings, the simplest first, each as far as it reaches, with what it leaves of a GPU
and how fast it is there. A guide and a report open with one.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log2
from typing import Any, NamedTuple

from highwater.pages.text import plain_lines
from highwater.spec.study import Cell
from highwater.units import MIB, format_bytes, format_seconds, format_tokens

_ROOM = 1.06
"""How many times the longest length the picture is wide: a length beyond it has to be askable."""
_OFFERED = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
_MOST_OFFERED = 3


class Point(NamedTuple):
    """What a step of one length leaves and how long it takes."""

    length_tokens: int
    left_bytes: int | None = None
    """Bytes that a GPU has left, at least; None: nobody knows."""
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    speed_source: str = ""
    """``measured`` or ``predicted``."""
    risk: str | None = None
    """How near to its end memory is, in a word; None: nobody says."""


class Reach(NamedTuple):
    """How far some settings reach."""

    cell: Cell
    words: str
    """The settings as one says them."""
    label: str
    """The settings as tables and commands call them."""
    trained_tokens: int
    """The longest length with every layer computed; 0: none."""
    reach_tokens: int
    """The longest length that memory holds: no less than ``trained_tokens``."""
    fails_tokens: int | None
    """The shortest length above that was tried and did not fit; None: none was tried."""
    is_at_least: bool
    """Whether nobody knows of an end above ``reach_tokens``."""
    source: str
    """Who says so: ``measured``, ``predicted``, ``published``, ``simulated``."""
    points: tuple[Point, ...]
    """Points of lengths that fit, the shortest first."""
    sure_tokens: int | None = None
    """The longest length that is not tight; None: none is known to be."""
    asked: str | None = None
    """For ``fails_tokens``: the request that had no room, in words."""

    @property
    def opening_tokens(self) -> int:
        """The longest length that trains, or that memory holds, and that is not tight; 0: none."""
        most = self.trained_tokens or self.reach_tokens
        return most if self.sure_tokens is None else min(most, self.sure_tokens)

    def at(self, length_tokens: int) -> Point | None:
        """The first point that is no shorter: what it leaves is the least that a shorter one
        leaves.
        """
        return next((each for each in self.points if each.length_tokens >= length_tokens), None)

    @property
    def reach_in_words(self) -> str:
        """``≥ 65,536``, ``none``, ``262,144; memory holds 671,744``."""
        if not self.reach_tokens:
            return "none"
        least = "≥ " if self.is_at_least else ""
        if not self.trained_tokens:
            return f"memory holds {least}{format_tokens(self.reach_tokens)}"
        if self.trained_tokens == self.reach_tokens:
            return f"{least}{format_tokens(self.reach_tokens)}"
        beyond = format_tokens(self.reach_tokens)
        return f"{format_tokens(self.trained_tokens)}; memory holds {least}{beyond}"

    @property
    def note(self) -> str:
        """What stands beside its end: who says so, where that is no prediction, and from which
        length on it is tight.
        """
        said = [] if self.source == "predicted" else [self.source]
        if self.reach_tokens and self.opening_tokens < self.trained_tokens:
            sure = self.opening_tokens
            said.append(f"tight past {format_tokens(sure)}" if sure else "tight")
        return ", ".join(said)


class Frontier(NamedTuple):
    """Settings of one model on some GPUs."""

    rows: tuple[Reach, ...]
    native_length_tokens: int
    device_bytes: int
    """Memory that a GPU may use; 0: nobody knows."""
    shortest_tokens: int
    """The shortest length that was asked about."""
    longest_asked_tokens: int
    """The longest length that was asked about, whether it fits or not."""
    rank_word: str = "GPU"
    """What each of the ranks runs on."""
    scales_positions: bool = True
    """Whether YaRN scales positions past the native length; what another trainer does is not
    known."""

    @property
    def longest(self) -> Reach | None:
        """The simplest settings that reach farthest; trained in full counts before memory alone."""
        reaching = [row for row in self.rows if row.reach_tokens]
        trained = [row for row in reaching if row.trained_tokens]
        if trained:
            return max(trained, key=lambda row: row.opening_tokens)
        return max(reaching, key=lambda row: row.reach_tokens, default=None)

    @property
    def farthest_tokens(self) -> int:
        """The longest length that any settings reach; 0: none does."""
        return max((row.reach_tokens for row in self.rows), default=0)

    @property
    def longest_tokens(self) -> int:
        """The length that the page opens with; 0: none fits."""
        row = self.longest
        return 0 if row is None else row.opening_tokens or row.trained_tokens or row.reach_tokens

    @property
    def top_tokens(self) -> int:
        """The length at the right edge of the picture."""
        farthest = self.farthest_tokens
        fails = [row.fails_tokens for row in self.rows if row.fails_tokens is not None]
        beyond = min((tokens for tokens in fails if tokens > farthest), default=0)
        reached = max(farthest, beyond, self.shortest_tokens, 1)
        most = reached if self.rows else self.longest_asked_tokens
        return max(1024, -(-round(most * _ROOM) // 1024) * 1024)

    @property
    def offered(self) -> tuple[int, ...]:
        """Round lengths for buttons, the farthest of those in the picture."""
        kept = [each for each in _OFFERED if self.shortest_tokens <= each <= self.top_tokens]
        return tuple(kept[-_MOST_OFFERED:])

    @property
    def ticks(self) -> tuple[int, ...]:
        """Lengths for the axis: at most five, from zero, in steps of a power of two."""
        step = 1 << max(8, int(log2(self.top_tokens)) - 2)
        if self.top_tokens / step > 5:
            step *= 2
        return tuple(range(0, self.top_tokens + 1, step))

    @property
    def past_native_words(self) -> str:
        """What is said behind the settings of a length past the native one."""
        return "; YaRN scales positions" if self.scales_positions else ""

    def percent(self, length_tokens: int) -> float:
        """Where a length stands in the picture, in per cent of its width."""
        return round(min(100.0, 100 * length_tokens / self.top_tokens), 2)


class Headline(NamedTuple):
    """What stands above the picture: the answer."""

    number: str
    """``65,536``, ``≥ 1,044,480``; ``none``."""
    what: str
    """What the number is, in a sentence's part."""
    words: str
    figures: tuple[tuple[str, str], ...]
    """Names and figures: memory, speed, host."""
    used_percent: float | None
    """What a GPU's memory is filled to; None: nobody knows."""
    risk: str | None = None


def headline(frontier: Frontier) -> Headline:
    """The answer that a page opens with: the longest length."""
    row, tokens = frontier.longest, frontier.longest_tokens
    if row is None:
        return Headline("none", "no length is known to fit", "", (), None)
    point, size = row.at(tokens), frontier.device_bytes
    what = "the longest that trains"
    if not row.trained_tokens:
        what = "the longest that memory alone holds"
    elif tokens < row.trained_tokens:
        what = "the longest that trains and is not tight"
    at_least = row.is_at_least and tokens == row.reach_tokens
    if at_least:
        what = "the longest that was asked about"
    left = None if point is None else point.left_bytes
    is_scaled = tokens > frontier.native_length_tokens
    return Headline(
        number=f"{'≥ ' if at_least else ''}{format_tokens(tokens)}",
        what=f"{what}, {row.source}",
        words=f"{row.words}{frontier.past_native_words if is_scaled else ''}",
        figures=tuple(_figures(point, size, frontier.rank_word)),
        used_percent=None if left is None or not size else round(100 * (1 - left / size), 1),
        risk=None if point is None else point.risk,
    )


def _figures(point: Point | None, device_bytes: int, rank_word: str) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if point is not None and point.left_bytes is not None:
        of = f" of {format_bytes(device_bytes)}" if device_bytes else ""
        found.append((f"left{of} a {rank_word}, at least", format_bytes(point.left_bytes)))
    if point is not None and point.tokens_per_s is not None:
        found.append((f"tokens a second, {point.speed_source}", f"{point.tokens_per_s:,.0f}"))
    if point is not None and point.step_time_s is not None:
        step = format_seconds(point.step_time_s)
        found.append((f"a step takes, {point.speed_source}", step))
    return found


def first_that_reach(rows: Iterable[Reach]) -> tuple[Reach, ...]:
    """The rows that reach farther than all simpler ones, in their order."""
    kept: list[Reach] = []
    for row in rows:
        if row.reach_tokens > max((each.reach_tokens for each in kept), default=0):
            kept.append(row)
    return tuple(kept)


def frontier_data(frontier: Frontier) -> Mapping[str, Any]:
    """A frontier as ``frontier.js`` reads it: texts, bytes, seconds and tokens."""
    said = headline(frontier)
    return {
        "rows": [
            [
                plain_lines(row.words),
                plain_lines(row.label),
                row.trained_tokens,
                row.reach_tokens,
                row.fails_tokens,
                int(row.is_at_least),
                row.source,
                _columns(row.points),
                row.reach_in_words,
                None if row.asked is None else plain_lines(row.asked),
                row.note,
            ]
            for row in frontier.rows
        ],
        "native": frontier.native_length_tokens,
        "device": frontier.device_bytes,
        "asked": [frontier.shortest_tokens, frontier.longest_asked_tokens],
        "top": frontier.top_tokens,
        "longest": frontier.longest_tokens,
        "farthest": frontier.farthest_tokens,
        "opening": [
            None if frontier.longest is None else frontier.rows.index(frontier.longest),
            *map(plain_lines, (said.number, said.what, said.words)),
        ],
        "past": frontier.past_native_words,
        "ticks": frontier.ticks,
        "offered": frontier.offered,
        "each": frontier.rank_word,
    }


def _columns(points: Sequence[Point]) -> list[list[Any]]:
    """Points, column by column: lengths, MiB left, seconds, tokens a second, sources, risks.

    A column whose entries are all alike has one; what nobody knows is null.
    """
    columns = (
        [point.length_tokens for point in points],
        [None if p.left_bytes is None else round(p.left_bytes / MIB, 1) for p in points],
        [None if p.step_time_s is None else float(f"{p.step_time_s:.4g}") for p in points],
        [None if p.tokens_per_s is None else round(p.tokens_per_s) for p in points],
        [point.speed_source[:1] for point in points],
        [point.risk for point in points],
    )
    return [column[:1] if len(set(column)) == 1 else column for column in columns]
