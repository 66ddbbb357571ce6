"""Predictor: one protocol for every way to predict the memory of a length in a cell, and the search
for the longest length that fits, which is the same for all predictors.

A predictor gets a length, and the room: bytes of a GPU that the training may use. There are two
rooms: ``MemoryLimit.device_bytes``, all of it; and ``capacity_room_bytes``, in which a capacity is
searched for: the limit less what the headroom and the interval take. A formula answers in closed
form; a replay of a traced step tells if the allocator runs out of memory in that room.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from highwater.memory.capacity import Binding, CellPrediction, MemoryLimit
from highwater.memory.formula.constants import Footprint, Term
from highwater.memory.formula.formula import Formula, outside_terms_of
from highwater.memory.formula.layers import Step
from highwater.memory.formula.rollout import with_rollout
from highwater.memory.interval.calibration import (
    Calibration,
    Factors,
    interval,
    most_predicted_bytes,
)
from highwater.memory.trace.replay import Alive, Replayed
from highwater.nouns.study import HOST_KEPT, Cell, Question, Risk, default_headroom_bytes

Extent = Literal["everything", "longest", "fit"]
"""Extent of a cell's prediction: everything; the longest length with the headroom; or that by
replays only if a length fits, else by formula, which is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPeak:
    """Predicted memory of a GPU at one length, and whether the GPU and the host hold it."""

    footprint: Footprint
    """Bytes by term, of the GPU and of the host, as the formula has them."""
    needed_bytes: int
    """Bytes that a GPU has to have; a lower bound if a replay ran out of the room."""
    fits: bool
    """True if the room holds ``needed_bytes``, and the host its part."""
    replayed: Replayed | None = None
    """The traced step, replayed in the allocator; None: answered by formula."""
    alive: Callable[[], tuple[Alive, ...]] | None = None
    """Returns the tensors alive at the peak, which ``replayed`` leaves out to save time."""


class Predictor(Protocol):
    """Predicts memory at any length of one cell: by formula, or by replay of a trace."""

    @property
    def by_formula(self) -> "FormulaPredictor":
        """Predictor of the same cell in closed form, for bytes by term and for a first guess."""
        ...

    def start(self, room_bytes: int, likely_index: int | None) -> int | None:
        """Grid index at which to start the search for the longest length that fits ``room_bytes``.
        ``likely_index``: the index found without headroom, if known. None: start in the middle.
        """
        ...

    def at(self, length_tokens: int, room_bytes: int | None) -> PredictedPeak:
        """Peak at a length on a GPU with ``room_bytes`` of memory; None: as much as it takes."""
        ...


PredictorOf = Callable[[Question, Cell, MemoryLimit], Predictor]
"""Makes the predictor of one cell of a question, on GPUs with this memory."""


@dataclass(frozen=True, slots=True)
class FormulaPredictor:
    """Predicts the memory of a cell by a trainer's formula, without a trace."""

    closed_form: Formula
    question: Question
    cell: Cell
    memory_limit: MemoryLimit

    @property
    def by_formula(self) -> "FormulaPredictor":
        """This predictor, which is by formula already."""
        return self

    def start(self, room_bytes: int, likely_index: int | None) -> int | None:
        """Return the likely edge if it is known: a formula needs no better start."""
        del room_bytes
        return likely_index

    def at(self, length_tokens: int, room_bytes: int | None = None) -> PredictedPeak:
        """Predict the peak at a length by formula, with a user's own readings of libraries."""
        question = self.question
        limit = self.memory_limit
        step = Step(
            question.model.shape,
            self.cell.settings,
            self.cell.layout,
            length_tokens,
            question.device,
            question.prompt_tokens,
        )
        found = self.closed_form(step)
        if limit.constants is not None:
            outside = outside_terms_of(step, limit.constants)
            found = found.with_libraries(outside, sum(limit.cublas_workspaces_bytes))
        if limit.rollout is not None:
            total_bytes = question.device_total_bytes or limit.device_bytes
            found = with_rollout(found, step, limit.rollout, total_bytes=total_bytes)
        needed_bytes = found.needed_bytes
        fits = room_bytes is None or needed_bytes <= room_bytes
        fits = fits and found.fits_host(limit.host_bytes) and not found.lacks_for_rollout_bytes
        return PredictedPeak(footprint=found, needed_bytes=needed_bytes, fits=fits)

    def capacity_room_bytes(self, factors: Factors | None) -> int:
        """Most bytes that a prediction may have for its pessimistic end to leave the headroom."""
        limit_bytes = self.memory_limit.device_bytes
        left_bytes = limit_bytes - self.question.margin_bytes
        if factors is None:
            return left_bytes
        return min(left_bytes, most_predicted_bytes(limit_bytes, factors))


Replay = Callable[[int, int | None], tuple[Replayed, int]]
"""Replays a step of a length, or of a number of tokens, in an allocator with this many bytes: as
``replay`` does, without what is alive at the peak, but with the number of events before it."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Cache of one traced step's replays: one with room to spare also answers for more memory."""

    replay: Replay
    _made: dict[tuple[int, int | None], tuple[Replayed, int]] = field(default_factory=dict)
    _roomy: dict[int, tuple[Replayed, int]] = field(default_factory=dict)

    def __call__(self, size: int, capacity_bytes: int | None) -> tuple[Replayed, int]:
        """Replay a length, or a number of tokens, in an allocator of ``capacity_bytes``; cached."""
        found = self._roomy.get(size)
        if found and (capacity_bytes is None or found[0].peak_reserved_bytes <= capacity_bytes):
            return found
        key = size, capacity_bytes
        found = self._made.get(key)
        if found is None:
            self._made[key] = found = self.replay(*key)
            if found[0].fits and not found[0].retries:
                self._roomy[size] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPredictor:
    """Predicts by replay of traced steps in the allocator, and by formula what no trace has."""

    by_formula: FormulaPredictor
    replay: Replay
    """Replays a length."""
    alive: Callable[[int, int], tuple[Alive, ...]]
    """Returns the tensors alive in the step of a length, after a number of its events."""
    outside: tuple[Term, ...] | None = None
    """Memory of the GPU outside the allocator, which no trace has; None: the formula's."""
    aim: Callable[[int], int] | None = None
    """Grid index at which to begin, given that of the longest length by formula; None: there."""

    def start(self, room_bytes: int, likely_index: int | None) -> int | None:
        """Grid index to try first: the formula's longest, moved by ``aim``, or the known edge."""
        if self.aim is not None and likely_index is not None:
            return likely_index
        index = longest(self.by_formula, room_bytes)
        return index if self.aim is None else self.aim(index)

    def at(self, length_tokens: int, room_bytes: int | None) -> PredictedPeak:
        """Predict the peak by replay in ``room_bytes``; with little room less is cached."""
        footprint = self.by_formula.at(length_tokens).footprint
        if self.outside is not None:
            footprint = footprint.replace(outside=self.outside)
        outside_bytes = footprint.outside_bytes
        capacity_bytes = None if room_bytes is None else room_bytes - outside_bytes
        replayed, peak_at = self.replay(length_tokens, capacity_bytes)
        return PredictedPeak(
            footprint=footprint,
            needed_bytes=replayed.peak_reserved_bytes + outside_bytes,
            fits=replayed.fits and footprint.fits_host(self.by_formula.memory_limit.host_bytes),
            replayed=replayed,
            alive=lambda: self.alive(length_tokens, peak_at),
        )


def predict_cells(
    question: Question,
    memory_limit: MemoryLimit,
    make_predictor: PredictorOf,
    calibration: Calibration | None = None,
    extent: Extent = "everything",
) -> tuple[CellPrediction, ...]:
    """Predict every cell of a question, in order; without ``calibration`` no intervals."""
    return tuple(
        predict_cell(
            make_predictor(question, cell, memory_limit),
            calibration and calibration.of(cell.settings.allocator),
            extent,
        )
        for cell in question.cells
    )


def predict_cell(
    predictor: Predictor, factors: Factors | None = None, extent: Extent = "everything"
) -> CellPrediction:
    """Predict a cell: the longest length that leaves the headroom and (with factors) whose upper
    end fits, and the longest that fits by the prediction alone.
    """
    by_formula = predictor.by_formula
    grid = by_formula.question.grid
    limit = by_formula.memory_limit
    if not by_formula.at(grid.length(1)).footprint.fits_host(limit.host_bytes):
        return predict_at(by_formula, grid.length(1), factors).replace(likely_tokens=0)
    capacity_room_bytes = by_formula.capacity_room_bytes(factors)
    capacity_index, likely_index = _edges(predictor, capacity_room_bytes, extent)
    if capacity_index:
        shown_index = capacity_index
        room_bytes = capacity_room_bytes
    elif likely_index:  # no length leaves the headroom: the longest that may fit is shown
        shown_index = likely_index
        room_bytes = limit.device_bytes
    else:  # none fits at all: the shortest is shown, in as much room as it needs
        shown_index = 1
        room_bytes = None
    if not capacity_index and extent == "fit":
        predictor = by_formula
    is_whole = extent == "everything"
    predicted = _predicted_length(
        predictor, grid.length(shown_index), factors, room_bytes=room_bytes, is_whole=is_whole
    )
    if not capacity_index and shown_index > 1:
        shortest = _predicted_length(predictor, grid.length(1), factors)
        predicted = predicted.replace(lacks_bytes=shortest.lacks_bytes)
    predicted = predicted.replace(
        capacity_tokens=grid.length(capacity_index) if capacity_index else 0,
        likely_tokens=grid.length(likely_index) if likely_index else likely_index,
    )
    if capacity_index >= max(1, by_formula.question.size_of(by_formula.cell)):
        return predicted.replace(binding="ceiling")
    longer_tokens = grid.length(capacity_index + 1)
    longer = by_formula.at(longer_tokens).footprint
    return predicted.replace(does_not_fit_tokens=longer_tokens, binding=_binding(longer, limit))


def _edges(predictor: Predictor, room_bytes: int, extent: Extent) -> tuple[int, int | None]:
    """Grid indices of the longest length that fits ``room_bytes``, and of the longest that fits the
    whole limit. 0: no length fits; None: it is not searched for, since replays take time.
    """
    limit_bytes = predictor.by_formula.memory_limit.device_bytes
    if room_bytes == limit_bytes:
        index = longest(predictor, limit_bytes)
        return index, index
    likely_index = None
    if predictor is predictor.by_formula or extent == "everything":
        likely_index = longest(predictor, limit_bytes)
    return longest(predictor, room_bytes, likely_index=likely_index), likely_index


def predict_at(
    predictor: Predictor, length_tokens: int, factors: Factors | None = None
) -> CellPrediction:
    """Predict one length of a cell: ``capacity_tokens`` is the length if it leaves the headroom and
    (with factors) its upper end fits, else 0.
    """
    by_formula = predictor.by_formula
    limit = by_formula.memory_limit
    predicted = _predicted_length(
        predictor, length_tokens, factors, room_bytes=by_formula.capacity_room_bytes(factors)
    )
    has_host = predicted.footprint.fits_host(limit.host_bytes)
    fits = predicted.lacks_bytes is None and has_host
    return predicted.replace(
        capacity_tokens=length_tokens if fits else 0,
        does_not_fit_tokens=None if fits else length_tokens,
        binding=_binding(predicted.footprint, limit),
        risk=predicted.risk if has_host else None,
    )


def _binding(footprint: Footprint, limit: MemoryLimit) -> Binding:
    """Which memory is too small for a footprint that does not fit: GPU's, host's, vLLM's."""
    if not footprint.fits_host(limit.host_bytes):
        return "host"
    return "rollout" if footprint.lacks_for_rollout_bytes else "device"


def _predicted_length(
    predictor: Predictor,
    length_tokens: int,
    factors: Factors | None,
    *,
    room_bytes: int | None = None,
    is_whole: bool = False,
) -> CellPrediction:
    """Predict one length; the caller sets which is the longest. ``room_bytes`` None: the length is
    known not to fit, so its need has no limit. ``is_whole``: list the tensors live at the peak.
    """
    by_formula = predictor.by_formula
    limit_bytes = by_formula.memory_limit.device_bytes
    peak = predictor.at(length_tokens, room_bytes)
    replayed = peak.replayed
    footprint = peak.footprint.within(limit_bytes)
    used_bytes = footprint.device_used_bytes
    needed_bytes = peak.needed_bytes
    high_bytes = needed_bytes
    around = None
    if replayed is not None:
        alive = peak.alive() if is_whole and peak.alive is not None else ()
        fits = peak.fits and room_bytes is not None
        replayed = replayed.replace(fits=fits, alive=alive)
        used_bytes = needed_bytes
    if factors is not None:
        high_bytes = interval(needed_bytes, factors).high_bytes
        around = interval(used_bytes, factors)
        # what is only cached never exceeds the GPU, what is needed may
        high = max(high_bytes, min(around.high_bytes, limit_bytes))
        around = around.replace(high_bytes=high)
    headroom_bytes = limit_bytes - needed_bytes
    lacks_bytes = max(by_formula.question.margin_bytes - headroom_bytes, high_bytes - limit_bytes)
    lacks_bytes = max(lacks_bytes, footprint.lacks_for_rollout_bytes)
    return CellPrediction(
        cell=by_formula.cell,
        capacity_tokens=0,
        does_not_fit_tokens=None,
        binding="device",
        footprint=footprint,
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, lacks_bytes) or None,
        risk=_risk(by_formula, footprint, headroom_bytes, high_bytes),
        replayed=replayed,
        interval=around,
    )


def _risk(
    by_formula: FormulaPredictor, footprint: Footprint, headroom_bytes: int, high_bytes: int
) -> Risk | None:
    """How sure it is that a length fits that leaves ``headroom_bytes`` by the prediction itself and
    needs ``high_bytes`` by its upper end; None if not even the prediction itself fits.
    """
    limit = by_formula.memory_limit
    if headroom_bytes < 0 or footprint.lacks_for_rollout_bytes:
        return None
    if high_bytes > limit.device_bytes:
        return "tight"
    host_bytes = limit.host_bytes and int(HOST_KEPT * limit.host_bytes)
    if by_formula.cell.settings.uses_host and not footprint.fits_host(host_bytes):
        return "likely"
    card_bytes = by_formula.question.device_total_bytes or limit.device_bytes
    return "safe" if headroom_bytes >= default_headroom_bytes(card_bytes) else "likely"


def longest(predictor: Predictor, room_bytes: int, *, likely_index: int | None = None) -> int:
    """Grid index of the longest length that fits into ``room_bytes``; 0 if none fits."""
    by_formula = predictor.by_formula
    question = by_formula.question
    end = max(1, question.size_of(by_formula.cell))
    start = predictor.start(room_bytes, likely_index)

    def fits(index: int) -> bool:
        return predictor.at(question.grid.length(index), room_bytes).fits

    for first, last in question.growing_ranges(by_formula.cell, end):
        # A range without the start is searched from its shortest length: if that does not fit,
        # nothing in it does.
        holds_start = last == end if start is None else first <= start <= last
        found = edge(start if holds_start else first, last, fits, first=first)
        if found:
            return found
    return 0


def edge(start: int | None, last: int, fits: Callable[[int], bool], *, first: int = 1) -> int:
    """Highest index in ``first`` to ``last`` that fits below one that does not; 0 if there is none.
    The search doubles its strides away from ``start``, then bisects; without ``start`` it bisects.
    """
    low, high, stride = first - 1, last + 1, 1
    index = (low + high) // 2 if start is None else start
    while high - low > 1:
        if fits(index):
            low = index
        else:
            high = index
        if start is None or (low >= first and high <= last):
            index = (low + high) // 2
        else:
            index = min(low + stride, last) if low >= first else max(high - stride, first)
        stride *= 2
    return low if low >= first else 0
