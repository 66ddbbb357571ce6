"""Capacity: the longest length whose predicted footprint fits, cell by cell, by any formula."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import msgspec

from highwater.memory.formula.constants import (
    CUBLAS_WORKSPACES_BYTES,
    Footprint,
    MachineConstants,
    outside_terms,
)
from highwater.memory.formula.formula import Formula
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import Calibration, Factors, Interval, interval
from highwater.memory.interval.residuals import PredictionMethod
from highwater.memory.trace.replay import Replayed
from highwater.nouns.capacities import Capacity, kind_with_memory
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.optimizer import OPTIMIZERS
from highwater.nouns.study import Cell, Question, Risk, default_headroom_bytes, risk_of
from highwater.nouns.trainer import TrainerName
from highwater.speed import PredictedStep

Asked = Literal["everything", "longest", "fit"]
"""What is asked of a cell: all that is known; the longest length with its headroom; or that only
where any length fits. The rest may be left out where it takes replays."""
Binding = Literal["device", "host", "ceiling"]
"""What ends the lengths that fit: a GPU's memory, the host's, or the longest length asked about."""

TRACED_ACCURACY = (
    "the engine's own steps, traced, in a simulated allocator: whether it fits was told right of "
    "161 of 162 trials on H200s, 121 "
    "of them held out; the other ran out with 9 MiB to spare by its replay (docs/results/predict)"
)
PREDICTION_SCHEMA_VERSION = 1
"""Version of the document that ``highwater predict --json`` prints, as it is written and read."""
NOT_MODELLED = (
    "tensor, pipeline and expert parallelism",
    "a rollout engine on the same GPU (`--reserved 20GiB` leaves room for one)",
    f"optimizers other than {', '.join(each.words for each in OPTIMIZERS.values())}",
)


class MemoryLimit(Record, frozen=True, kw_only=True):
    """The memory that a prediction is about."""

    device_bytes: int
    """Bytes of one GPU, as its driver reports it, less what is reserved for others."""
    host_bytes: int | None = None
    """Bytes of the machine's own memory; None: nobody knows."""
    usual_host: str | None = None
    """The machine that usually has such GPUs, where its memory is taken because nobody said;
    ``this machine`` where its own was read."""
    constants: MachineConstants | None = None
    """Constants measured on the user's own GPUs; None: those that come along, read on H200s."""

    @property
    def cublas_workspaces_bytes(self) -> tuple[int, ...]:
        """Bytes of each workspace that cuBLAS keeps in the allocator."""
        own = self.constants
        return CUBLAS_WORKSPACES_BYTES if own is None else own.cublas_workspaces_bytes


class CellPrediction(Record, frozen=True, kw_only=True):
    """Predicted: what fits in one cell."""

    cell: Cell
    capacity_tokens: int
    """Longest length that leaves the headroom in question by the prediction itself, and whose upper
    end fits, where there is an interval. 0: nothing on the grid does."""
    does_not_fit_tokens: int | None
    """The next length, which does not; None where no longer one was asked about."""
    binding: Binding
    footprint: Footprint
    """The footprint by formula, at the capacity; at the shortest length where nothing fits."""
    headroom_bytes: int
    """Bytes of a GPU that the prediction itself leaves, at that length: blocks that the allocator
    would only keep count as left, since it gives them back before it fails. Below 0: bytes that are
    lacking."""
    lacks_bytes: int | None = None
    """Bytes of a GPU that are lacking for the shortest length, its upper end and the headroom in
    question; None where a length fits."""
    risk: Risk | None = None
    """How sure it is that this length fits; None: by the prediction itself it does not."""
    replayed: Replayed | None = None
    """The traced steps, replayed in the allocator at that length; None for an answer by formula."""
    likely_tokens: int | None = None
    """Longest length where the prediction itself fits, with no headroom: as likely too long as too
    short, where a search is to begin. None in files from before there were intervals, where it is
    the capacity."""
    interval: Interval | None = None
    """Interval of the GPU's memory at that length; None where no recorded trials tell."""
    step: PredictedStep | None = None
    """The time of a step at that length; None where nothing fits, of GPUs whose rates nobody knows,
    and of another trainer."""

    @property
    def likely_edge_tokens(self) -> int:
        """``likely_tokens``; the capacity in files from before they were written."""
        return self.capacity_tokens if self.likely_tokens is None else self.likely_tokens

    @property
    def device_used_bytes(self) -> int:
        """Bytes that the driver would report as used of the GPU, at that length."""
        if self.replayed is None:
            return self.footprint.device_used_bytes
        return self.replayed.peak_reserved_bytes + self.footprint.outside_bytes

    @property
    def peak_phase(self) -> str:
        """Name of the phase in which the peak is."""
        return self.footprint.peak.name if self.replayed is None else self.replayed.phase


class Prediction(Record, frozen=True, kw_only=True):
    """Predicted: a whole question, or all its cells at one length."""

    schema_version: int = PREDICTION_SCHEMA_VERSION
    model_name: str
    config_digest: str | None = None
    """Digest of the model's ``config.json``; None in files from before it was written."""
    native_length_tokens: int
    trainer: TrainerName
    gpus: int
    device_name: str
    device_bytes: int
    """Bytes of one GPU, as its driver reports it."""
    memory_limit: MemoryLimit = msgspec.field(name="room")
    """The memory that the prediction is about; recorded predictions call it ``room``."""
    margin_bytes: int = 0
    """Headroom, in bytes, that a length has to leave of a GPU to count as one that fits."""
    length_tokens: int | None
    """The length that was asked about; None: the longest that fits was asked for."""
    cells: tuple[CellPrediction, ...]
    method: PredictionMethod = "formula"
    accuracy: str
    calibration: Calibration | None = None
    """What the intervals were learned from; None: there are none."""
    not_modelled: tuple[str, ...] = NOT_MODELLED
    notes: tuple[str, ...] = ()

    @property
    def has_default_headroom(self) -> bool:
        """Whether a length has to leave what it has to by default, no more and no less."""
        return self.margin_bytes == default_headroom_bytes(self.device_bytes)

    @property
    def answer(self) -> CellPrediction | None:
        """The simplest cell that trains the length, or that of the longest capacity; else the
        roomiest that may fit without the default headroom; None where none does.
        """
        fitting = [cell for cell in self.cells if cell.capacity_tokens]
        if fitting and self.length_tokens:
            return fitting[0]
        if fitting:
            return max(fitting, key=lambda cell: cell.capacity_tokens)
        if self.margin_bytes > default_headroom_bytes(self.device_bytes):
            return None  # more headroom was asked for than anything leaves
        may_fit = [cell for cell in self.cells if cell.risk is not None]
        return max(
            may_fit, key=lambda cell: (cell.likely_edge_tokens, cell.headroom_bytes), default=None
        )

    @property
    def explained(self) -> CellPrediction:
        """The cell to explain: the one that answers; where none does, the first."""
        return self.answer or self.cells[0]


def predicted_capacities(prediction: Prediction, found_in: str) -> tuple[Capacity, ...]:
    """Capacities of a prediction's cells; the headroom is named where it is not the default."""
    kinds = {kind.name: kind.usable_bytes for kind in gpu_catalog()}
    limit_bytes = prediction.memory_limit.device_bytes
    is_whole = kinds.get(prediction.device_name, prediction.device_bytes) == limit_bytes
    return tuple(
        Capacity(
            model_name=prediction.model_name,
            config_digest=prediction.config_digest,
            native_length_tokens=prediction.native_length_tokens,
            device_name=kind_with_memory(prediction.device_name, None if is_whole else limit_bytes),
            cell=predicted.cell,
            capacity_tokens=predicted.capacity_tokens,
            does_not_fit_tokens=predicted.does_not_fit_tokens,
            margin_bytes=0 if prediction.has_default_headroom else prediction.margin_bytes,
            source="predicted",
            trainer=prediction.trainer,
            found_in=found_in,
        )
        for predicted in prediction.cells
    )


def predict_cells(
    question: Question,
    memory_limit: MemoryLimit,
    formula: Formula,
    calibration: Calibration | None = None,
) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; without a calibration by the prediction alone."""
    return tuple(
        predict_cell(
            *(question, cell, memory_limit, formula),
            calibration and calibration.of(cell.settings.allocator),
        )
        for cell in question.cells
    )


def predict_cell(
    question: Question,
    cell: Cell,
    memory_limit: MemoryLimit,
    formula: Formula,
    factors: Factors | None = None,
) -> CellPrediction:
    """The longest length that leaves the headroom in question, and the likely longest without."""
    whole = msgspec.structs.replace(question, margin_bytes=0)
    likely = _CellByFormula(whole, cell, memory_limit, formula).longest()
    found = likely
    if factors is not None or question.margin_bytes:
        found = _CellByFormula(question, cell, memory_limit, formula, factors).longest()
    if likely.capacity_tokens and not found.capacity_tokens:
        # nothing leaves the headroom: what is told is of the longest that may fit
        edge = predict_at(question, cell, memory_limit, formula, likely.capacity_tokens, factors)
        found = msgspec.structs.replace(
            edge,
            does_not_fit_tokens=found.does_not_fit_tokens,
            lacks_bytes=found.lacks_bytes,
            binding=found.binding,
        )
    return msgspec.structs.replace(found, likely_tokens=likely.capacity_tokens)


@dataclass(frozen=True, slots=True)
class _CellByFormula:
    """A cell of a question at any length of its grid, by the length's index there, from 1."""

    question: Question
    cell: Cell
    memory_limit: MemoryLimit
    formula: Formula
    factors: Factors | None = None

    def at(self, index: int) -> CellPrediction:
        """The prediction at one length: whether it fits."""
        question, limit = self.question, self.memory_limit
        length_tokens = question.grid.length(index)
        return predict_at(question, self.cell, limit, self.formula, length_tokens, self.factors)

    def fits(self, index: int) -> bool:
        return self.at(index).capacity_tokens > 0

    def longest(self) -> CellPrediction:
        """The longest length that fits; where none does, the shortest. By bisection: a footprint
        never shrinks with the length, unless a token budget packs fewer sequences then.
        """
        size = self.question.size_of(self.cell)
        if self.cell.settings.token_budget_tokens is not None:
            return self._longest_from_the_top(max(1, size))
        fits, fails = 0, size + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self.fits(middle) else (fits, middle)
        return self._ended(max(1, fits), fails=fails, size=size)

    def _longest_from_the_top(self, size: int) -> CellPrediction:
        """The longest length that fits, whatever does not fit below it. Of lengths that pack as
        many sequences a longer one needs no less: in the first such run from the top whose shortest
        fits, the longest is found by bisection.
        """
        last = size
        while last:
            first = self._first_packed_alike(last)
            if self.fits(first):
                alike = range(first + 1, last + 1)
                fits = first + bisect_left(alike, True, key=lambda index: not self.fits(index))
                return self._ended(fits, fails=fits + 1, size=size)
            last = first - 1
        return self.at(1)

    def _first_packed_alike(self, last: int) -> int:
        """Index of the shortest length that packs as many sequences as ``last``; below are more."""

        def sequences(index: int) -> int:
            length_tokens, degree = (
                self.question.grid.length(index),
                self.cell.layout.context_degree,
            )
            return self.cell.settings.sequences(length_tokens, context_degree=degree)

        alike, lengths = sequences(last), range(1, last + 1)
        return 1 + bisect_left(lengths, True, key=lambda index: sequences(index) <= alike)

    def _ended(self, longest: int, *, fails: int, size: int) -> CellPrediction:
        """The prediction at the longest length that fits, of ``size``, with what ends there."""
        found = self.at(longest)
        if fails > size:
            return msgspec.structs.replace(found, binding="ceiling")
        beyond = self.at(fails)
        return msgspec.structs.replace(
            found, binding=beyond.binding, does_not_fit_tokens=beyond.does_not_fit_tokens
        )


def predict_at(
    question: Question,
    cell: Cell,
    memory_limit: MemoryLimit,
    formula: Formula,
    length_tokens: int,
    factors: Factors | None = None,
) -> CellPrediction:
    """Whether a length leaves the headroom in a cell; with factors, whether its upper end fits."""
    footprint = _footprint(question, cell, memory_limit, formula, length_tokens)
    limit_bytes = memory_limit.device_bytes
    needed, used = footprint.needed_bytes, footprint.within(limit_bytes)
    headroom_bytes, high_needed, around = limit_bytes - needed, needed, None
    if factors is not None:
        high_needed = interval(needed, factors).high_bytes
        around = interval(used.device_used_bytes, factors)
        high = max(high_needed, min(around.high_bytes, limit_bytes))
        around = msgspec.structs.replace(around, high_bytes=high)
    fits_host = memory_limit.host_bytes is None or footprint.host_bytes <= memory_limit.host_bytes
    lacks_bytes = max(question.margin_bytes - headroom_bytes, high_needed - limit_bytes)
    fits = lacks_bytes <= 0 and fits_host
    risk = risk_of(
        headroom_bytes=headroom_bytes,
        pessimistic_bytes=high_needed,
        device_bytes=limit_bytes,
        whole_bytes=question.device_total_bytes,
    )
    return CellPrediction(
        cell=cell,
        capacity_tokens=length_tokens if fits else 0,
        does_not_fit_tokens=None if fits else length_tokens,
        binding="device" if fits_host else "host",
        footprint=used,
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, lacks_bytes) or None,
        risk=risk if fits_host else None,
        interval=around,
    )


def _footprint(
    question: Question, cell: Cell, memory_limit: MemoryLimit, formula: Formula, length_tokens: int
) -> Footprint:
    """The footprint by formula; outside the allocator as measured on the user's own GPUs, if so."""
    shape, settings, layout = question.model.shape, cell.settings, cell.layout
    device, own = question.device, memory_limit.constants
    found = formula(Step(shape, settings, layout, length_tokens, device, question.prompt_tokens))
    if own is None:
        return found
    outside = outside_terms(shape, settings, layout, device, own)
    return found.with_libraries(outside, sum(memory_limit.cublas_workspaces_bytes))
