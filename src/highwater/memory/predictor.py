"""Predictor: one protocol for every way to tell what a length takes in a cell, and the search for
the longest length that fits, which is the same whoever tells.

A predictor is asked for a length in a room, the bytes of a GPU that training has: a formula answers
in closed form; a replay of a traced step finds out whether the allocator runs out there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

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

Asked = Literal["everything", "longest", "fit"]
"""What is asked of a cell: all that is known; the longest length with its headroom; or that only
where any length fits. The rest may be left out where it takes replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPeak:
    """Predicted: what one length takes of the fullest GPU, in the room that was named."""

    footprint: Footprint
    """Bytes by term, of the GPU and of the host, as the formula has them."""
    needed_bytes: int
    """Bytes that a GPU has to have. At least those, where a replay ran out of the room."""
    fits: bool
    """Whether the room holds them."""
    replayed: Replayed | None = None
    """The traced step, replayed in the allocator; None for an answer by formula."""
    alive: Callable[[], tuple[Alive, ...]] | None = None
    """Names what is alive at the peak, where ``replayed`` leaves that out to save time."""


class Predictor(Protocol):
    """Tells what training takes at any length of one cell."""

    @property
    def formula(self) -> "FormulaPredictor":
        """The same cell by formula, which has the bytes by term and says where a search begins."""
        ...

    def start(self, room_bytes: int, likely: int | None) -> int | None:
        """Index of the length that most likely is the longest to fit, given that of the likely
        longest, which leaves no headroom; None: nobody knows.
        """
        ...

    def at(self, length_tokens: int, room_bytes: int | None) -> PredictedPeak:
        """The peak of one length on a GPU with this much for training; None: without end."""
        ...


PredictorOf = Callable[[Question, Cell, MemoryLimit], Predictor]
"""Gives the predictor of one cell of a question, on GPUs with this memory."""


@dataclass(frozen=True, slots=True)
class FormulaPredictor:
    """Tells by the formula of a trainer, in closed form."""

    closed_form: Formula
    question: Question
    cell: Cell
    memory_limit: MemoryLimit

    @property
    def formula(self) -> "FormulaPredictor":
        """The formula is its own."""
        return self

    def start(self, room_bytes: int, likely: int | None) -> int | None:
        """Only at the likely longest: any length costs the same."""
        del room_bytes
        return likely

    def at(self, length_tokens: int, room_bytes: int | None = None) -> PredictedPeak:
        """Bytes by term; outside the allocator as measured on the user's own GPUs, if so."""
        question, limit, settings = self.question, self.memory_limit, self.cell.settings
        place = question.model.shape, settings, self.cell.layout
        step = Step(*place, length_tokens, question.device, question.prompt_tokens)
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

    def sure_bytes(self, factors: Factors | None) -> int:
        """The room for a prediction that leaves the headroom, and whose upper end fits."""
        limit_bytes = self.memory_limit.device_bytes
        left_bytes = limit_bytes - self.question.margin_bytes
        if factors is None:
            return left_bytes
        return min(left_bytes, most_predicted_bytes(limit_bytes, factors))


Replay = Callable[[int, int | None], tuple[Replayed, int]]
"""Replays a step of a length, or of so many tokens, in this much for the allocator, as ``replay``
does but for what is alive at the peak: the second value is how many events come before that."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of a step, each made once: one that gave nothing back is alike in larger rooms."""

    replay: Replay
    _made: dict[tuple[int, int | None], tuple[Replayed, int]] = field(default_factory=dict)
    _roomy: dict[int, tuple[Replayed, int]] = field(default_factory=dict)

    def __call__(self, size: int, capacity_bytes: int | None) -> tuple[Replayed, int]:
        """The replay in a room."""
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
    """Tells by replays of traced steps; the host's memory, and what no trace has, by formula."""

    formula: FormulaPredictor
    replay: Replay
    """Replays a length."""
    alive: Callable[[int, int], tuple[Alive, ...]]
    """The tensors that are alive after so many events of a length."""
    outside: tuple[Term, ...] | None = None
    """Memory of the GPU that no trace has; None: as the formula has it."""
    aim: Callable[[int], int] | None = None
    """Where to begin, given the index of the longest length by formula; None: there."""

    def start(self, room_bytes: int, likely: int | None) -> int | None:
        """The longest length by formula, or what ``aim`` makes of it, which is done once."""
        if self.aim is None:
            return longest(self.formula, room_bytes)
        return self.aim(longest(self.formula, room_bytes)) if likely is None else likely

    def at(self, length_tokens: int, room_bytes: int | None) -> PredictedPeak:
        """The peak of a replay: near the end of its room an allocator takes less than elsewhere."""
        footprint = self.formula.at(length_tokens).footprint
        if self.outside is not None:
            footprint = msgspec.structs.replace(footprint, outside=self.outside)
        outside_bytes = footprint.outside_bytes
        capacity_bytes = None if room_bytes is None else room_bytes - outside_bytes
        replayed, peak_at = self.replay(length_tokens, capacity_bytes)
        return PredictedPeak(
            footprint=footprint,
            needed_bytes=replayed.peak_reserved_bytes + outside_bytes,
            fits=replayed.fits and footprint.fits_host(self.formula.memory_limit.host_bytes),
            replayed=replayed,
            alive=lambda: self.alive(length_tokens, peak_at),
        )


def predict_cells(
    question: Question,
    memory_limit: MemoryLimit,
    predictor_of: PredictorOf,
    calibration: Calibration | None = None,
    asked: Asked = "everything",
) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; without a calibration by the prediction alone."""
    return tuple(
        predict_cell(
            predictor_of(question, cell, memory_limit),
            calibration and calibration.of(cell.settings.allocator),
            asked,
        )
        for cell in question.cells
    )


def predict_cell(
    predictor: Predictor, factors: Factors | None = None, asked: Asked = "everything"
) -> CellPrediction:
    """The longest length with the headroom (by factors, its upper end), and the likely one."""
    formula = predictor.formula
    question, whole_bytes = formula.question, formula.memory_limit.device_bytes
    grid, size = question.grid, max(1, question.size_of(formula.cell))
    if not formula.at(grid.length(1)).footprint.fits_host(formula.memory_limit.host_bytes):
        bound = predict_at(formula, grid.length(1), factors)
        return msgspec.structs.replace(bound, likely_tokens=0)
    sure_bytes, likely = formula.sure_bytes(factors), None
    if predictor is formula or asked == "everything" or sure_bytes == whole_bytes:
        likely = longest(predictor, whole_bytes)
    found = likely
    if found is None or sure_bytes != whole_bytes:
        found = longest(predictor, sure_bytes, likely=likely)
    if not found and asked == "fit":
        predictor = formula
    # where nothing leaves the headroom, what is told is of the longest that may fit
    shown = found or likely or 1
    told = _told(
        *(predictor, grid.length(shown), factors),
        room_bytes=sure_bytes if found else whole_bytes if likely else None,
        is_whole=asked == "everything",
    )
    if not found and shown > 1:
        shortest = _told(predictor, grid.length(1), factors)
        told = msgspec.structs.replace(told, lacks_bytes=shortest.lacks_bytes)
    beyond = formula.at(grid.length(found + 1)).footprint if found < size else None
    return msgspec.structs.replace(
        told,
        capacity_tokens=grid.length(found) if found else 0,
        does_not_fit_tokens=grid.length(found + 1) if found < size else None,
        binding="ceiling" if beyond is None else _binding(beyond, formula.memory_limit),
        likely_tokens=likely and grid.length(likely),
    )


def predict_at(
    predictor: Predictor, length_tokens: int, factors: Factors | None = None
) -> CellPrediction:
    """Whether a length leaves the headroom in a cell; with factors, whether its upper end fits."""
    formula = predictor.formula
    told = _told(predictor, length_tokens, factors, room_bytes=formula.sure_bytes(factors))
    has_host = told.footprint.fits_host(formula.memory_limit.host_bytes)
    fits = told.lacks_bytes is None and has_host
    return msgspec.structs.replace(
        told,
        capacity_tokens=length_tokens if fits else 0,
        does_not_fit_tokens=None if fits else length_tokens,
        binding=_binding(told.footprint, formula.memory_limit),
        risk=told.risk if has_host else None,
    )


def _binding(footprint: Footprint, limit: MemoryLimit) -> Binding:
    """The memory that is too small where this does not fit."""
    if not footprint.fits_host(limit.host_bytes):
        return "host"
    return "rollout" if footprint.lacks_for_rollout_bytes else "device"


def _told(
    predictor: Predictor,
    length_tokens: int,
    factors: Factors | None,
    *,
    room_bytes: int | None = None,
    is_whole: bool = False,
) -> CellPrediction:
    """What is predicted of a length, whatever is the longest; in no room it is one that does not
    fit. ``is_whole``: with what is alive at the peak.
    """
    formula, peak = predictor.formula, predictor.at(length_tokens, room_bytes)
    question, limit_bytes = formula.question, formula.memory_limit.device_bytes
    footprint, replayed = peak.footprint.within(limit_bytes), peak.replayed
    needed_bytes = high_bytes = peak.needed_bytes
    used_bytes, around = footprint.device_used_bytes, None
    if replayed is not None:
        alive = peak.alive() if is_whole and peak.alive is not None else ()
        fits = peak.fits and room_bytes is not None
        replayed, used_bytes = (
            msgspec.structs.replace(replayed, fits=fits, alive=alive),
            needed_bytes,
        )
    if factors is not None:
        high_bytes = interval(needed_bytes, factors).high_bytes
        around = interval(used_bytes, factors)
        high = max(high_bytes, min(around.high_bytes, limit_bytes))
        around = msgspec.structs.replace(around, high_bytes=high)
    headroom_bytes = limit_bytes - needed_bytes
    lacks_bytes = max(question.margin_bytes - headroom_bytes, high_bytes - limit_bytes)
    lacks_bytes = max(lacks_bytes, footprint.lacks_for_rollout_bytes)
    return CellPrediction(
        cell=formula.cell,
        capacity_tokens=0,
        does_not_fit_tokens=None,
        binding="device",
        footprint=footprint,
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, lacks_bytes) or None,
        risk=_risk(formula, footprint, headroom_bytes, high_bytes),
        replayed=replayed,
        interval=around,
    )


def _risk(
    formula: FormulaPredictor, footprint: Footprint, headroom_bytes: int, high_bytes: int
) -> Risk | None:
    """How sure a length is that leaves ``headroom_bytes`` by the prediction itself, and needs
    ``high_bytes`` by its upper end; None where not even the prediction fits.
    """
    limit = formula.memory_limit
    if headroom_bytes < 0 or footprint.lacks_for_rollout_bytes:
        return None
    if high_bytes > limit.device_bytes:
        return "tight"
    host_bytes = limit.host_bytes and int(HOST_KEPT * limit.host_bytes)
    if formula.cell.settings.uses_host and not footprint.fits_host(host_bytes):
        return "likely"
    whole_bytes = formula.question.device_total_bytes or limit.device_bytes
    return "safe" if headroom_bytes >= default_headroom_bytes(whole_bytes) else "likely"


def longest(predictor: Predictor, room_bytes: int, *, likely: int | None = None) -> int:
    """Index of the longest length that fits the room, 0 for none; ``likely`` as in ``start``."""
    formula = predictor.formula
    grid, cell = formula.question.grid, formula.cell
    last, start = max(1, formula.question.size_of(cell)), predictor.start(room_bytes, likely)

    def fits(index: int) -> bool:
        return predictor.at(grid.length(index), room_bytes).fits

    for shortest, alike in formula.question.growing_ranges(cell, last):
        # if not even the shortest of a range fits, none of it does
        is_near = (start is None and alike == last) or shortest <= (start or 0) <= alike
        found = edge(start if is_near else shortest, alike, fits, shortest=shortest)
        if found:
            return found
    return 0


def edge(start: int | None, size: int, fits: Callable[[int], bool], *, shortest: int = 1) -> int:
    """The last index, of ``shortest`` to ``size``, that fits below one that does not, 0 for none:
    strides that double away from the start, then halves; halves alone without a start.
    """
    low, high, stride = shortest - 1, size + 1, 1
    index = (low + high) // 2 if start is None else start
    while high - low > 1:
        if fits(index):
            low = index
        else:
            high = index
        if start is None or (low >= shortest and high <= size):
            index = (low + high) // 2
        else:
            index = min(low + stride, size) if low >= shortest else max(high - stride, shortest)
        stride *= 2
    return low if low >= shortest else 0
