"""Capacity: the longest length whose predicted footprint fits, cell by cell, and how it compares with a table of known ones."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec

from highwater.prediction import formula, trinity
from highwater.prediction.calibration import Calibration, Factors, Interval, interval
from highwater.prediction.constants import CUBLAS_WORKSPACES_BYTES, MachineConstants
from highwater.prediction.formula import Formula, outside_terms
from highwater.prediction.replay import Replayed
from highwater.prediction.residuals import Method
from highwater.prediction.terms import Footprint
from highwater.spec.capacities import Capacity, kind_with_memory
from highwater.spec.codec import Noun
from highwater.spec.events import Trainer
from highwater.spec.hardware import gpu_catalog
from highwater.spec.model import STATE_BYTES_PER_PARAMETER
from highwater.spec.study import Cell, Question

Binding = Literal["device", "host", "ceiling"]
"""What ends the lengths that fit: the GPU's memory, the host's, or the longest length asked about."""

FORMULAS: Mapping[Trainer, Formula] = {"highwater": formula.likely_footprint, "trinity": trinity.footprint}
ACCURACY: Mapping[Trainer, str] = {
    "highwater": "its constants were fitted to some of the trials that come with its interval, which may be too narrow for others; "
    "of 84 trials that were held out (SFT and GRPO with FSDP2, one to four H200s) 4 took more than the upper end; `--calibrate` "
    "learns from trials of your own (docs/results/predict)",
    "trinity": "by the closed form, fitted to the published A100 table, of which it has 69 of 80 cells with expandable segments "
    "and 30 of 40 without, the others within one step of the grid; nobody recorded its trials: a prediction without an interval",
}
"""What is known of the errors of a formula besides the intervals."""
_REPLAYED_ACCURACY = (
    "by replay of a trace, which has of the published A100 table 39 of 40 cells with expandable segments and 34 of 40 without, and "
    "all but two of the others within one step of the grid"
)
TRACED_ACCURACY = (
    "the engine's own steps, traced, in a simulated allocator: whether it fits was told right of 161 of 162 trials on H200s, 121 "
    "of them held out; the other ran out with 9 MiB to spare by its replay (docs/results/predict)"
)
NOT_TRACED = (
    "LoRA",
    "tensor, pipeline and expert parallelism",
    "a rollout engine on the same GPU (`--reserved 20GiB` leaves room for one)",
    "optimizers other than AdamW in float32",
)
NOT_MODELLED = (*NOT_TRACED[:-1], f"{NOT_TRACED[-1]} (`--state-bytes-per-param 8` stands for one)")


def accuracy(trainer: Trainer, *, replayed: int, cells: int) -> str:
    """What is known of the errors of what answered so many cells: a replay, the closed form, or both."""
    if not replayed:
        return ACCURACY[trainer]
    alone = ACCURACY[trainer].rpartition("; ")[2]
    return f"{_REPLAYED_ACCURACY}; {alone if replayed == cells else f'the others {ACCURACY[trainer]}'}"


class Room(Noun, frozen=True, kw_only=True):
    """The memory that a prediction is about."""

    device_bytes: int
    """Of one GPU, as its driver reports it, less what is reserved for others."""
    host_bytes: int | None = None
    """Of the machine; None: nobody said."""
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER
    constants: MachineConstants | None = None
    """Measured on the user's own GPUs; None: those that come along, which were read on H200s."""

    @property
    def cublas_workspaces_bytes(self) -> tuple[int, ...]:
        """What cuBLAS keeps in the allocator, each."""
        return CUBLAS_WORKSPACES_BYTES if self.constants is None else self.constants.cublas_workspaces_bytes


class CellPrediction(Noun, frozen=True, kw_only=True):
    """Predicted: what fits in one cell."""

    cell: Cell
    capacity_tokens: int
    """Longest length whose upper end fits: where there is no interval, the prediction itself. 0: nothing on the grid fits."""
    does_not_fit_tokens: int | None
    """The next length, whose upper end does not."""
    binding: Binding
    footprint: Footprint
    """By formula, at the capacity; at the shortest length where nothing fits."""
    headroom_bytes: int
    """What the upper end leaves of a GPU's memory, at that length; below 0 where nothing fits."""
    replayed: Replayed | None = None
    """The traced steps in the allocator, at that length."""
    likely_tokens: int | None = None
    """Longest length where the prediction itself fits: as likely too long as too short, where a search is to begin. None in files
    from before there were intervals, where it is the capacity."""
    interval: Interval | None = None
    """Of the GPU's memory, at that length; None where nobody has recorded trials to learn it from."""

    @property
    def likely_edge_tokens(self) -> int:
        """``likely_tokens``, wherever they are written."""
        return self.capacity_tokens if self.likely_tokens is None else self.likely_tokens

    @property
    def device_used_bytes(self) -> int:
        """What the driver would report of the GPU, at that length."""
        if self.replayed is None:
            return self.footprint.device_used_bytes
        return self.replayed.peak_reserved_bytes + self.footprint.outside_bytes

    @property
    def peak_phase(self) -> str:
        """Where the peak is."""
        return self.footprint.peak.name if self.replayed is None else self.replayed.phase


class Prediction(Noun, frozen=True, kw_only=True):
    """Predicted: a whole question, or all its cells at one length."""

    schema_version: int = 1
    model_name: str
    config_digest: str | None = None
    """Digest of the model's ``config.json``; None in files from before it was written."""
    native_length_tokens: int
    trainer: Trainer
    gpus: int
    device_name: str
    device_bytes: int
    """Of one GPU, as its driver reports it."""
    room: Room
    margin_bytes: int = 0
    """What a length has to leave of a GPU to count as one that fits."""
    length_tokens: int | None
    """None: the longest length that fits was asked."""
    cells: tuple[CellPrediction, ...]
    method: Method = "formula"
    accuracy: str
    calibration: Calibration | None = None
    """What the intervals were learned from; None: there are none."""
    not_modelled: tuple[str, ...] = NOT_MODELLED
    notes: tuple[str, ...] = ()

    @property
    def explained(self) -> CellPrediction:
        """The cell to explain: the first that fits a length, or the one of the longest capacity; where nothing fits, the first."""
        fitting = [cell for cell in self.cells if cell.capacity_tokens] or list(self.cells[:1])
        return fitting[0] if self.length_tokens else max(fitting, key=lambda cell: cell.capacity_tokens)


def predicted_capacities(prediction: Prediction, found_in: str) -> tuple[Capacity, ...]:
    """What a prediction says of each cell: what fits by the upper end of its interval, where it has one."""
    kinds = {kind.name: kind.usable_bytes for kind in gpu_catalog()}
    is_whole = kinds.get(prediction.device_name, prediction.device_bytes) == prediction.room.device_bytes
    return tuple(
        Capacity(
            model_name=prediction.model_name,
            config_digest=prediction.config_digest,
            native_length_tokens=prediction.native_length_tokens,
            device_name=kind_with_memory(prediction.device_name, None if is_whole else prediction.room.device_bytes),
            cell=predicted.cell,
            capacity_tokens=predicted.capacity_tokens,
            does_not_fit_tokens=predicted.does_not_fit_tokens,
            margin_bytes=prediction.margin_bytes,
            source="predicted",
            trainer=prediction.trainer,
            found_in=found_in,
        )
        for predicted in prediction.cells
    )


def predict_cells(
    question: Question, room: Room, trainer: Trainer, calibration: Calibration | None = None
) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; without a calibration the prediction itself tells what fits."""
    return tuple(
        predict_cell(question, cell, room, FORMULAS[trainer], calibration and calibration.of(cell.settings.allocator))
        for cell in question.cells
    )


def predict_cell(question: Question, cell: Cell, room: Room, trainer: Formula, factors: Factors | None = None) -> CellPrediction:
    """One cell: the longest length whose upper end fits, and the longest that fits if the prediction is right."""
    likely = _longest(question, cell, room, trainer, None)
    found = likely if factors is None else _longest(question, cell, room, trainer, factors)
    return msgspec.structs.replace(found, likely_tokens=likely.capacity_tokens)


def _longest(question: Question, cell: Cell, room: Room, trainer: Formula, factors: Factors | None) -> CellPrediction:
    """By bisection: a footprint never shrinks with the length, unless a token budget packs fewer sequences then."""
    if cell.settings.token_budget_tokens is not None:
        return _longest_from_the_top(question, cell, room, trainer, factors)
    grid = question.grid
    fits, fails = 0, question.size_of(cell) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if predict_at(question, cell, room, trainer, grid.length(middle), factors).capacity_tokens:
            fits = middle
        else:
            fails = middle
    found = predict_at(question, cell, room, trainer, grid.length(max(1, fits)), factors)
    if fails > question.size_of(cell):
        return msgspec.structs.replace(found, binding="ceiling")
    beyond = predict_at(question, cell, room, trainer, grid.length(fails), factors)
    return msgspec.structs.replace(found, binding=beyond.binding, does_not_fit_tokens=beyond.does_not_fit_tokens)


def _longest_from_the_top(question: Question, cell: Cell, room: Room, trainer: Formula, factors: Factors | None) -> CellPrediction:
    """The longest length that fits, whatever does not fit below it; where none does, the shortest.

    Of lengths that pack as many sequences a longer one needs no less: a run of them whose shortest does not fit has none that does,
    and in the first from the top that has one the longest is found by bisection.
    """
    at = partial(_at_index, question, cell, room, trainer, factors)
    last = size = max(1, question.size_of(cell))
    while last:
        first = _first_packed_alike(question, cell, last)
        if at(first).capacity_tokens:
            fits = bisect_left(range(first + 1, last + 1), True, key=lambda index: not at(index).capacity_tokens) + first
            found = at(fits)
            if fits == size:
                return msgspec.structs.replace(found, binding="ceiling")
            beyond = at(fits + 1)
            return msgspec.structs.replace(found, binding=beyond.binding, does_not_fit_tokens=beyond.does_not_fit_tokens)
        last = first - 1
    return at(1)


def _first_packed_alike(question: Question, cell: Cell, last: int) -> int:
    """The index of the shortest length of which a micro-batch has as many sequences as of that at ``last``; below are more."""

    def sequences(index: int) -> int:
        return cell.settings.sequences(question.grid.length(index), context_degree=cell.layout.context_degree)

    alike = sequences(last)
    return bisect_left(range(1, last + 1), True, key=lambda index: sequences(index) <= alike) + 1


def _at_index(question: Question, cell: Cell, room: Room, trainer: Formula, factors: Factors | None, index: int) -> CellPrediction:
    return predict_at(question, cell, room, trainer, question.grid.length(index), factors)


def predict_at(
    question: Question, cell: Cell, room: Room, trainer: Formula, length_tokens: int, factors: Factors | None = None
) -> CellPrediction:
    """Whether one length fits a cell: with factors, whether the upper end of what it needs does."""
    footprint = trainer(
        question.model.shape,
        cell.settings,
        cell.layout,
        length_tokens=length_tokens,
        device=question.device,
        state_bytes_per_parameter=room.state_bytes_per_parameter,
    )
    if room.constants is not None:
        outside = outside_terms(
            question.model.shape,
            cell.settings,
            cell.layout,
            question.device,
            room.constants,
            state_bytes_per_parameter=room.state_bytes_per_parameter,
        )
        footprint = footprint.with_libraries(outside=outside, workspaces_bytes=sum(room.cublas_workspaces_bytes))
    room_bytes = room.device_bytes - question.margin_bytes
    needed, used = footprint.needed_bytes, footprint.within(room_bytes)
    around = None
    if factors is not None:
        around, needed = interval(used.device_used_bytes, factors), interval(needed, factors).high_bytes
        around = msgspec.structs.replace(around, high_bytes=max(needed, min(around.high_bytes, room_bytes)))
    fits_host = room.host_bytes is None or footprint.host_bytes <= room.host_bytes
    fits = needed <= room_bytes and fits_host
    return CellPrediction(
        cell=cell,
        capacity_tokens=length_tokens if fits else 0,
        does_not_fit_tokens=None if fits else length_tokens,
        binding="device" if fits_host else "host",
        footprint=used,
        headroom_bytes=room.device_bytes - (max(needed, used.device_used_bytes) if around is None else around.high_bytes),
        interval=around,
    )
