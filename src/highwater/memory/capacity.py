"""Capacity: the records of a prediction, of one cell and of a whole question."""

from typing import Literal

import msgspec

from highwater.memory.formula.constants import Footprint, MachineConstants, workspaces_bytes
from highwater.memory.interval.calibration import Calibration, Interval
from highwater.memory.interval.residuals import PredictionMethod
from highwater.memory.trace.replay import Replayed
from highwater.nouns.capacities import Capacity, kind_with_memory
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.objective import OPTIMIZERS, Rollout
from highwater.nouns.study import Cell, Risk, default_headroom_bytes
from highwater.nouns.trainer import TrainerName
from highwater.speed import Cost, PredictedStep

Binding = Literal["device", "host", "rollout", "ceiling"]
"""The reason why no longer length fits: a GPU's memory, the host's, a rollout engine's cache, or
the end of the question."""

TRACED_ACCURACY = (
    "the engine's own steps, traced, in a simulated allocator: whether it fits was told right of "
    "161 of 162 trials on H200s, 121 "
    "of them held out; the other ran out with 9 MiB to spare by its replay (docs/results/predict)"
)
PREDICTION_SCHEMA_VERSION = 1
"""Version of the document that ``highwater predict --json`` prints, as it is written and read."""
NOT_MODELLED = (
    "tensor, pipeline and expert parallelism",
    "a rollout engine on the same GPU, unless `--rollout vllm` adds one, on paper",
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
    rollout: Rollout | None = None
    """The engine that generates beside the training, or on GPUs of its own; None: none does."""

    @property
    def cublas_workspaces_bytes(self) -> tuple[int, ...]:
        """Bytes of each workspace that cuBLAS keeps in the allocator."""
        return workspaces_bytes(self.constants)


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
    """Bytes of a GPU that the shortest length lacks, by its upper end; None: a length fits."""
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
    """The time of a step there; None where nothing fits, for unknown rates and other trainers."""
    is_on_frontier: bool = True
    """Whether no other cell trains nearly as long in less time."""

    @property
    def likely_edge_tokens(self) -> int:
        """``likely_tokens``; the capacity in files from before they were written."""
        return self.capacity_tokens if self.likely_tokens is None else self.likely_tokens

    @property
    def reach_tokens(self) -> int:
        """The capacity; where no length leaves the headroom, the longest that may fit."""
        return self.capacity_tokens or self.likely_edge_tokens

    @property
    def device_used_bytes(self) -> int:
        """Bytes that the driver would report as used of the GPU, at that length."""
        if self.replayed is None:
            return self.footprint.device_used_bytes
        return self.replayed.peak_reserved_bytes + self.footprint.outside_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of a GPU that the step needs at its peak: what ``headroom_bytes`` leaves."""
        return self.footprint.needed_bytes if self.replayed is None else self.device_used_bytes

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
    native: CellPrediction | None = None
    """The simplest cell that trains the native length, there; None: none does, or one length was
    asked about, or steps were traced."""
    yarn_factor: float | None = None
    """Times that YaRN stretches positions at the longest length; None: it does not."""
    cost: Cost | None = None
    """What training at the length takes, where somebody asked and the answer's speed is known."""
    method: PredictionMethod = "formula"
    accuracy: str
    calibration: Calibration | None = None
    """The trials that taught the intervals; None: there are no intervals."""
    not_modelled: tuple[str, ...] = NOT_MODELLED
    notes: tuple[str, ...] = ()

    @property
    def has_default_headroom(self) -> bool:
        """Whether a length has to leave the default headroom, no more and no less."""
        return self.margin_bytes == default_headroom_bytes(self.device_bytes)

    @property
    def answer(self) -> CellPrediction | None:
        """The simplest cell that trains the length, or that of the longest capacity; else the
        roomiest that may fit without the default headroom; None where none does.
        """
        fitting = [cell for cell in self.cells if cell.capacity_tokens]
        if fitting and self.length_tokens:
            return min(fitting, key=lambda each: simplicity(each.cell))
        if fitting:
            return max(fitting, key=lambda cell: cell.capacity_tokens)
        if self.margin_bytes > default_headroom_bytes(self.device_bytes):
            return None  # more headroom was asked for than anything leaves
        may_fit = [cell for cell in self.cells if cell.risk is not None]
        return max(
            may_fit, key=lambda cell: (cell.likely_edge_tokens, cell.headroom_bytes), default=None
        )

    @property
    def simplest(self) -> CellPrediction:
        """The simplest cell at the native length, else at any; else the one to explain."""
        fitting = (cell for cell in self.cells if cell.capacity_tokens)
        shortest = min(fitting, key=lambda each: simplicity(each.cell), default=self.explained)
        at_native = (each for each in self.cells if self.native and each.cell == self.native.cell)
        return next(at_native, shortest)

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
