"""Frontier: the cells of a prediction that no other beats, and the simplest at the native length.

One cell beats another that trains no longer, or hardly so, and takes as much time or more for a
token (docs/decisions/003).
"""

from collections.abc import Sequence

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.interval.calibration import Calibration
from highwater.memory.trainers import predict_by_formula
from highwater.nouns.cells import simplicity
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import TrainerName
from highwater.speed import MEASURED, predicted_step, rates_of

_GAIN = 1.2
"""A slower cell has to train so many times as long as the one before it, or leave so much more."""


def with_frontier(
    question: Question, cells: Sequence[CellPrediction], *, is_one_length: bool
) -> tuple[CellPrediction, ...]:
    """The cells, each with whether it is on the frontier. Those that train nothing are not, unless
    none trains anything; at one length what a cell leaves of a GPU stands for how long it trains.
    """
    pool = [cell for cell in cells if cell.capacity_tokens] or list(cells)

    def reach(cell: CellPrediction) -> int:
        return (
            cell.headroom_bytes
            if is_one_length
            else cell.capacity_tokens or cell.likely_edge_tokens
        )

    times = {cell.cell: _token_s(question, cell.cell) for cell in pool}
    kept, longest = list[CellPrediction](), max(pool, key=reach)
    for each in sorted(pool, key=lambda c: (times[c.cell], -reach(c), simplicity(c.cell))):
        if not kept or reach(each) > max(reach(kept[-1]), _GAIN * reach(kept[-1])):
            kept.append(each)
    frontier = {each.cell for each in (*kept, longest)}
    return tuple(
        msgspec.structs.replace(cell, is_on_frontier=cell.cell in frontier) for cell in cells
    )


def _token_s(question: Question, cell: Cell) -> float:
    """Seconds of a token at the native length: an H200's for a kind whose rates nobody knows."""
    name = question.device_name if rates_of(question.device_name) else MEASURED
    step = predicted_step(
        *(question.model.shape, cell.settings, cell.layout),
        length_tokens=question.grid.native_length_tokens,
        device_name=name,
    )
    assert step is not None, "its rates are known"  # noqa: S101
    return step.time_s / step.step_tokens


def at_native(
    question: Question, limit: MemoryLimit, trainer: TrainerName, known: Calibration | None
) -> CellPrediction | None:
    """The simplest cell that trains the native length; None: none does, or lengths end before."""
    native = question.grid.native_length_tokens
    if not question.grid.start_tokens <= native <= question.grid.max_tokens:
        return None
    grid = msgspec.structs.replace(question.grid, start_tokens=native, max_tokens=native)
    for cell in sorted(question.cells, key=simplicity):
        alone = msgspec.structs.replace(question, cells=(cell,), grid=grid)
        (found,) = predict_by_formula(alone, limit, trainer, known)
        if found.capacity_tokens:
            return found
    return None
