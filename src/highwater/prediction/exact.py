"""Exact: the longest length whose traced steps fit the allocator, replayed; the formula only says where to begin."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from highwater.prediction.capacity import CellPrediction, Room, predict_at, predict_cell
from highwater.prediction.formula import likely_footprint
from highwater.prediction.replay import Replayed, replay
from highwater.spec.events import EventLog
from highwater.spec.study import Cell, Question
from highwater.spec.trial import TrialSpec

Tracer = Callable[[TrialSpec], EventLog]
"""What the fullest rank of a trial allocates and frees; called from two threads at once."""


def predict_exactly(question: Question, room: Room, tracer: Tracer) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; raises what the tracer raises.

    The host's memory is the formula's: only a GPU's is traced. A cell takes two traces where the formula begins at the edge.
    """
    return tuple(_cell(question, cell, room, tracer) for cell in question.cells)


def _cell(question: Question, cell: Cell, room: Room, tracer: Tracer) -> CellPrediction:
    guessed = predict_cell(question, cell, room, likely_footprint)
    grid, size = question.grid, max(1, question.size_of(cell))
    if guessed.binding == "host":
        size = grid.index_at_most(guessed.capacity_tokens)
    if not size:
        return guessed  # not even the shortest: no trace would change that
    start = min(size, max(1, grid.index_at_most(guessed.capacity_tokens)))
    replays: dict[int, Replayed] = {}
    pool = ThreadPoolExecutor(max_workers=2)
    # Both sides of the edge at once: where the formula is right, that is all.
    traces = {index: pool.submit(tracer, question.trial(cell, grid.length(index))) for index in (start, start + 1) if index <= size}

    def fits(index: int) -> bool:
        spec = question.trial(cell, grid.length(index))
        log = traces.pop(index).result() if index in traces else tracer(spec)
        replays[index] = _replayed(question, cell, room, log, spec.length_tokens)
        if index == 1 and not replays[index].fits:  # what it would need, where nothing fits
            replays[index] = msgspec.structs.replace(replay(log, allocator=cell.settings.allocator), fits=False)
        return replays[index].fits

    try:
        longest = edge(start, size, fits)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # who owns the tracer ends what is tracing
        raise
    pool.shutdown()
    found = _at(question, cell, room, grid.length(max(1, longest)), replays[max(1, longest)])
    if longest < size:
        return msgspec.structs.replace(found, binding="device", does_not_fit_tokens=grid.length(longest + 1))
    if guessed.binding == "host":
        return msgspec.structs.replace(found, binding="host", does_not_fit_tokens=guessed.does_not_fit_tokens)
    return msgspec.structs.replace(found, binding="ceiling", does_not_fit_tokens=None)


def edge(start: int, size: int, fits: Callable[[int], bool]) -> int:
    """The last index that fits below one that does not, 0 for none: strides that double away from the start, then halves."""
    low, high, index, stride = 0, size + 1, start, 1
    while high - low > 1:
        if fits(index):
            low = index
        else:
            high = index
        outward = min(low + stride, high - 1) if low else max(high - stride, 1)
        index = (low + high) // 2 if low and high <= size else outward
        stride *= 2
    return low


def _replayed(question: Question, cell: Cell, room: Room, log: EventLog, length_tokens: int) -> Replayed:
    outside = predict_at(question, cell, room, likely_footprint, length_tokens).footprint.outside_bytes
    capacity = room.device_bytes - question.margin_bytes - outside
    return replay(log, allocator=cell.settings.allocator, capacity_bytes=capacity)


def _at(question: Question, cell: Cell, room: Room, length_tokens: int, replayed: Replayed) -> CellPrediction:
    """The formula's answer at a length, its memory of a GPU put right."""
    predicted = msgspec.structs.replace(predict_at(question, cell, room, likely_footprint, length_tokens), replayed=replayed)
    return msgspec.structs.replace(
        predicted,
        capacity_tokens=length_tokens if replayed.fits else 0,
        does_not_fit_tokens=None if replayed.fits else length_tokens,
        headroom_bytes=room.device_bytes - predicted.device_used_bytes,
    )
