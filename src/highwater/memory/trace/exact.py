"""Exact: the longest length whose traced steps fit the allocator, replayed; the formula only says
where to begin.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit, predict_at, predict_cell
from highwater.memory.formula.constants import LIKELY_FILLED_SHARE
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.interval.calibration import (
    Calibration,
    Factors,
    interval,
    most_predicted_bytes,
)
from highwater.memory.trace.replay import Replayed, needed, replay
from highwater.nouns.corpus import least_packed
from highwater.nouns.events import EventLog
from highwater.nouns.study import Cell, Question, risk_of
from highwater.nouns.trial import TrialSpec

Tracer = Callable[[TrialSpec], EventLog]
"""What the fullest rank of a trial allocates and frees; called from two threads at once."""


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays of one length: in all of the room, and in what headroom and upper end leave of it."""

    likely: Replayed
    sure: Replayed


def predict_exactly(
    question: Question,
    memory_limit: MemoryLimit,
    tracer: Tracer,
    calibration: Calibration | None = None,
) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; raises what the tracer raises.

    The host's memory is the formula's: only a GPU's is traced. A cell takes two traces where the
    formula begins at the edge, two more where it does not and the line through the first two aims
    well; and with a calibration one more for each length that fits if the prediction is right, but
    not at the upper end.
    """
    return tuple(
        _cell(
            *(question, cell, memory_limit, tracer),
            calibration and calibration.of(cell.settings.allocator),
        )
        for cell in question.cells
    )


def _cell(
    question: Question,
    cell: Cell,
    memory_limit: MemoryLimit,
    tracer: Tracer,
    factors: Factors | None,
) -> CellPrediction:
    guessed = predict_cell(question, cell, memory_limit, likely_footprint)
    grid, size = question.grid, asked_lengths(question, cell, guessed)
    if not size:
        return guessed  # not even the shortest: no trace would change that
    shortest = least_packed(question, cell, size)
    with _Traces(question, cell, memory_limit, tracer, factors, size, shortest) as traces:

        def fits(index: int) -> bool:
            return traces.replays(index).likely.fits

        start = min(size, max(shortest, grid.index_at_most(guessed.capacity_tokens)))
        start = _aimed(traces, start, fits)
        likely = edge(start, size, fits, shortest=shortest)
        sure = 0
        if likely:
            sure = edge(
                likely, likely, lambda index: traces.replays(index).sure.fits, shortest=shortest
            )
        replayed = traces.replays(sure).sure if sure else traces.replays(1).likely
    found = with_replay(question, memory_limit, traces.by_formula(max(1, sure)), replayed, factors)
    found = msgspec.structs.replace(found, likely_tokens=grid.length(likely) if likely else 0)
    return ended(question, found, sure, size, guessed)


def asked_lengths(question: Question, cell: Cell, guessed: CellPrediction) -> int:
    """How many lengths of the grid a cell is asked about: those for which the host has memory."""
    if guessed.binding == "host":
        return question.grid.index_at_most(guessed.capacity_tokens)
    return max(1, question.size_of(cell))


def ended(
    question: Question, found: CellPrediction, longest: int, size: int, guessed: CellPrediction
) -> CellPrediction:
    """The prediction with its longest length that fits, index ``longest``, and what ends there."""
    grid = question.grid
    binding, beyond_tokens = "ceiling", None
    if longest < size:
        binding, beyond_tokens = "device", grid.length(longest + 1)
    elif guessed.binding == "host":
        binding, beyond_tokens = "host", guessed.does_not_fit_tokens
    return msgspec.structs.replace(
        found,
        capacity_tokens=grid.length(longest) if longest else 0,
        binding=binding,
        does_not_fit_tokens=beyond_tokens,
    )


@dataclass(slots=True, eq=False)
class _Traces:
    """Traces of one cell and their replays, two at once, each once; its context ends the rest."""

    question: Question
    cell: Cell
    memory_limit: MemoryLimit
    tracer: Tracer
    factors: Factors | None
    size: int
    shortest: int
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=2))
    _begun: dict[int, Future[EventLog]] = field(default_factory=dict[int, Future[EventLog]])
    _replays: dict[int, _Replays] = field(default_factory=dict[int, _Replays])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # who owns the tracer ends what is tracing
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, *indices: int) -> None:
        """Trace these soon, as far as they are on the grid."""
        for index in indices:
            if 1 <= index <= self.size and index not in self._begun:
                spec = self.question.trial(self.cell, self.question.grid.length(index))
                self._begun[index] = self._pool.submit(self.tracer, spec)

    def of(self, index: int) -> EventLog:
        """The events of a length; raises what the tracer raises."""
        self.begin(index)
        return self._begun[index].result()

    def by_formula(self, index: int) -> CellPrediction:
        """What the formula says of a length."""
        length_tokens = self.question.grid.length(index)
        limit = self.memory_limit
        return predict_at(self.question, self.cell, limit, likely_footprint, length_tokens)

    def outside_bytes(self, index: int) -> int:
        """Bytes that the allocator does not hold, which no trace has."""
        return self.by_formula(index).footprint.outside_bytes

    def replays(self, index: int) -> _Replays:
        """The replays of a length; of the shortest, where it does not fit, without end."""
        if index not in self._replays:
            found = self._replayed(index)
            if found.likely.fits and not found.sure.fits:
                # the next to be asked for, whatever is found above
                self.begin(max(self.shortest, index - 1))
            if index == 1 and not found.likely.fits:
                whole = needed(
                    self.of(index),
                    allocator=self.cell.settings.allocator,
                    workspaces_bytes=self.memory_limit.cublas_workspaces_bytes,
                )
                found = _Replays(whole, whole)
            self._replays[index] = found
        return self._replays[index]

    def _replayed(self, index: int) -> _Replays:
        """Replay one length in the room, and in what headroom and upper end leave of it: the upper
        end fits where a GPU so much smaller would do, as an allocator near its end takes less.
        """
        outside, limit_bytes = self.outside_bytes(index), self.memory_limit.device_bytes
        replayed = partial(
            replay,
            self.of(index),
            allocator=self.cell.settings.allocator,
            workspaces_bytes=self.memory_limit.cublas_workspaces_bytes,
        )
        likely = replayed(capacity_bytes=limit_bytes - outside)
        if not likely.fits:
            return _Replays(likely, likely)
        factors = self.factors
        most_bytes = limit_bytes if factors is None else most_predicted_bytes(limit_bytes, factors)
        sure_bytes = min(most_bytes, limit_bytes - self.question.margin_bytes) - outside
        if not likely.retries and likely.peak_reserved_bytes <= sure_bytes:
            return _Replays(likely, likely)  # it never came to the end of the smaller one
        return _Replays(likely, replayed(capacity_bytes=sure_bytes))


def _aimed(traces: _Traces, start: int, fits: Callable[[int], bool]) -> int:
    """The index of the edge by the line of allocated bytes through two traces next to the formula's
    ``start``, unless that is right; the traces of both sides of it are begun. The edge may be ten
    steps away, and is not looked for step by step.
    """
    traces.begin(start, start + 1)
    if start == traces.size or (fits(start) and not fits(start + 1)):
        return start
    allocator = traces.cell.settings.allocator
    one, other = (
        replay(traces.of(index), allocator=allocator).peak_allocated_bytes
        for index in (start, start + 1)
    )
    if other <= one:
        return start
    capacity_bytes = traces.memory_limit.device_bytes - traces.outside_bytes(start)
    aimed = start + (round(LIKELY_FILLED_SHARE[allocator] * capacity_bytes) - one) // (other - one)
    if fits(start):
        aimed = min(traces.size, max(aimed, start + 2))
    else:
        aimed = max(traces.shortest, min(aimed, start - 1))
    traces.begin(aimed, aimed + 1)
    return aimed


def edge(start: int, size: int, fits: Callable[[int], bool], *, shortest: int = 1) -> int:
    """The last index that fits below one that does not, 0 for none: strides that double away from
    the start, then halves. Nothing below ``shortest`` is asked about: of a token budget, those
    lengths pack more.
    """
    low, high, index, stride = 0, size + 1, start, 1
    while high - max(low, shortest - 1) > 1:
        if fits(index):
            low = index
        else:
            high = index
        outward = min(low + stride, high - 1) if low else max(high - stride, shortest)
        index = (low + high) // 2 if low and high <= size else outward
        stride *= 2
    return low


def with_replay(
    question: Question,
    memory_limit: MemoryLimit,
    predicted: CellPrediction,
    replayed: Replayed,
    factors: Factors | None = None,
) -> CellPrediction:
    """The formula's answer at a length, its memory of a GPU put right by a replay."""
    predicted = msgspec.structs.replace(predicted, replayed=replayed)
    around = None if factors is None else interval(predicted.device_used_bytes, factors)
    device_bytes, used_bytes = memory_limit.device_bytes, predicted.device_used_bytes
    headroom_bytes = device_bytes - used_bytes
    high_bytes = used_bytes if around is None else around.high_bytes
    lacks_bytes = max(question.margin_bytes - headroom_bytes, high_bytes - device_bytes)
    return msgspec.structs.replace(
        predicted,
        interval=around,
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, lacks_bytes) or None,
        risk=risk_of(
            headroom_bytes=headroom_bytes,
            pessimistic_bytes=high_bytes,
            device_bytes=device_bytes,
            whole_bytes=question.device_total_bytes,
        ),
    )
