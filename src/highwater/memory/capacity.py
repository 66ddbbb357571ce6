"""Records of a prediction: of one cell (``CellPrediction``), of a question (``Prediction``) and of
an allocation that failed (``FailedAllocation``), with the tensors that it may have been for.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import msgspec

from highwater.memory.formula.constants import Footprint, MachineConstants, workspaces_bytes
from highwater.memory.formula.layers import Step
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
from highwater.units import GIB, MIB, last_digit_bytes, parse_memory

Binding = Literal["device", "host", "rollout", "ceiling"]
"""The reason why no longer length fits: a GPU's memory, the host's, a rollout engine's KV cache, or
that the grid ends (``ceiling``)."""

TRACED_ACCURACY = (
    "the engine's own steps, traced, in a simulated allocator: whether it fits was told right of "
    "161 of 162 trials on H200s, 121 "
    "of them held out; the other ran out with 9 MiB to spare by its replay (docs/results/predict)"
)
PREDICTION_SCHEMA_VERSION = 1
"""Version of the document that ``highwater predict --json`` prints."""
NOT_MODELLED = (
    "tensor, pipeline and expert parallelism",
    "a rollout engine on the same GPU, unless `--rollout vllm` adds one, on paper",
    f"optimizers other than {', '.join(each.words for each in OPTIMIZERS.values())}",
)


class MemoryLimit(Record, frozen=True, kw_only=True):
    """Memory that a training may use: of each GPU, of the host, and beside a rollout."""

    device_bytes: int
    """Bytes of one GPU, as its driver reports it, less what is reserved for other programs."""
    host_bytes: int | None = None
    """Bytes of the host's memory; None: unknown, taken as unlimited."""
    usual_host: str | None = None
    """Name of the machine whose memory ``host_bytes`` is, if the user named none: one that usually
    has such GPUs, or ``this machine``. None: the user gave ``host_bytes``, or it is unknown."""
    constants: MachineConstants | None = None
    """Constants measured on the user's own GPUs; None: the package's, read on H200s."""
    rollout: Rollout | None = None
    """The rollout engine, on the training's GPUs or on its own; None: without one."""

    @property
    def cublas_workspaces_bytes(self) -> tuple[int, ...]:
        """Bytes of each workspace that cuBLAS takes from PyTorch's allocator."""
        return workspaces_bytes(self.constants)


class CellPrediction(Record, frozen=True, kw_only=True):
    """Prediction for one cell (settings on a layout): its longest length, and a step's memory."""

    cell: Cell
    capacity_tokens: int
    """Longest length that leaves the headroom asked for by the prediction itself and, if there is
    an interval, fits by its upper end. 0: no length on the grid does."""
    does_not_fit_tokens: int | None
    """The next length of the grid, which does not fit; None if the grid ends before."""
    binding: Binding
    footprint: Footprint
    """The footprint by formula at the shown length: the capacity, else the likely, or shortest."""
    headroom_bytes: int
    """Bytes of a GPU that the prediction itself leaves at the shown length, below 0 if they lack.
    Blocks that the allocator would only keep count as left: it gives them back before it fails."""
    lacks_bytes: int | None = None
    """Bytes of a GPU that the shortest length lacks, by its upper end; None: a length fits."""
    risk: Risk | None = None
    """How sure it is that the shown length fits; None: by the prediction itself it does not."""
    replayed: Replayed | None = None
    """The traced step, replayed in the allocator at the shown length; None: answered by formula."""
    likely_tokens: int | None = None
    """Longest length that fits by the prediction itself, without headroom: as likely too long as
    too short, where a search begins. None in older files without intervals: see the property."""
    interval: Interval | None = None
    """Interval of the GPU's memory at the shown length; None without recorded trials."""
    step: PredictedStep | None = None
    """Time of a step at that length; None if nothing fits, or the time cannot be predicted."""
    is_on_frontier: bool = True
    """True if no other cell trains nearly as long in less time."""
    is_lowered: bool = False
    """True if its micro-batches have fewer sequences than the trainer's default."""

    @property
    def likely_edge_tokens(self) -> int:
        """Longest length that is likely to fit; the capacity where an older file has none."""
        return self.capacity_tokens if self.likely_tokens is None else self.likely_tokens

    @property
    def reach_tokens(self) -> int:
        """The capacity in tokens; if no length leaves the headroom, the longest that may fit."""
        return self.capacity_tokens or self.likely_edge_tokens

    @property
    def device_used_bytes(self) -> int:
        """Bytes of a GPU in use at the peak as ``nvidia-smi`` would show them."""
        if self.replayed is None:
            return self.footprint.device_used_bytes
        return self.replayed.peak_reserved_bytes + self.footprint.outside_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of a GPU that the step needs at its peak: without what is only cached."""
        return self.footprint.needed_bytes if self.replayed is None else self.device_used_bytes

    @property
    def peak_phase(self) -> str:
        """Name of the phase of the step in which memory peaks."""
        return self.footprint.peak.name if self.replayed is None else self.replayed.phase


class Tensor(Record, frozen=True):
    """A tensor that a training step may allocate: its name, sizes, and what makes it smaller."""

    name: str
    shrunk_by: Literal["loss", "attention", "tokens", "sharding"]
    """What makes it smaller, or does without it."""
    sizes: tuple[int, ...]
    """Numbers in each dimension, and last the bytes of one number."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.sizes)


class FailedAllocation(Record, frozen=True, kw_only=True):
    """The size in PyTorch's ``Tried to allocate 18.55 GiB``, and the tensors that have it."""

    bytes: int
    is_known: bool
    """True if ``tensors`` are of so many bytes; False if they are only the nearest in size."""
    tensors: tuple[Tensor, ...]


_ROUNDED_BYTES = 2 * MIB
"""PyTorch rounds allocations of 10 MiB or more up to a multiple: its ``kRoundLarge``."""


def failed_allocation(asked: str, steps: Sequence[Step]) -> FailedAllocation:
    """Return these steps' tensors of the size ``asked``, in its digits or PyTorch's two, else the
    logits of a larger batch that has it (of 2 to 64 sequences, the fewest), else the two nearest.
    """
    asked_bytes = parse_memory(asked)

    def distance(tensor: Tensor) -> int:
        rounded = -(-tensor.bytes // _ROUNDED_BYTES) * _ROUNDED_BYTES
        return min(abs(asked_bytes - rounded), abs(asked_bytes - tensor.bytes))

    tensors = dict.fromkeys(each for step in steps for each in _tensors(step))
    printed = 0.0051 * (GIB if asked_bytes >= GIB else MIB)
    one = (steps[0].length_tokens, steps[0].shape.vocab_size)
    many = [
        Tensor(f"{each.name} of {rows} sequences", each.shrunk_by, (rows, *each.sizes))
        for rows, each in product(range(2, 65), tensors)
        if each.sizes[:2] == one
    ]
    found = list[Tensor]()
    for digit in (printed, last_digit_bytes(asked) / 2):
        found = found or [each for each in tensors if distance(each) <= digit]
        found = found or [each for each in many if distance(each) <= digit][:1]
    shown = found or sorted(tensors, key=distance)[:2]
    return FailedAllocation(bytes=asked_bytes, is_known=bool(found), tensors=tuple(shown))


def _tensors(step: Step) -> list[Tensor]:
    """Tensors that a step may allocate, with any loss or attention, in bfloat16 and float32."""
    shape, tokens, length = step.shape, step.tokens, step.length_tokens
    own = "weights or gradients of"
    found: list[Any] = [("logits", "loss", (tokens, shape.vocab_size))]
    for kind in dict.fromkeys(run.kind for run in shape.runs):
        attention, mlp, hidden = kind.attention, kind.mlp, kind.hidden_size
        heads = step.sequences * attention.query_heads // step.layout.ulysses_degree
        experts = (mlp.experts,) * mlp.is_routed
        within = "values inside experts" if experts else "values inside an MLP"
        found += [
            ("attention scores, length by length,", "attention", (heads, length, length)),
            (within, "tokens", (tokens * mlp.experts_per_token, mlp.width)),
            ("hidden states", "tokens", (tokens, hidden)),
            ("queries", "tokens", (tokens, attention.query_size)),
            (f"{own} one MLP matrix", "sharding", (*experts, mlp.width, hidden)),
            (f"{own} a layer", "sharding", (kind.parameters,)),
        ]
    part = -(-shape.parameters // step.layout.shard_degree)
    found += [
        ("numbers of a mask, length by length,", "attention", (length, length)),
        (f"{own} embedding or head", "sharding", (shape.vocab_size, shape.hidden_size)),
        (f"{own} the model on a GPU", "sharding", (part,)),
    ]
    return [
        Tensor(f"{name} in {dtype}", shrunk_by, (*sizes, size))
        for dtype, size in (("float32", 4), ("bfloat16", 2))
        for name, shrunk_by, sizes in found
    ]


class Prediction(Record, frozen=True, kw_only=True):
    """Prediction for all cells of a question: how far each trains, or one length in each."""

    schema_version: int = PREDICTION_SCHEMA_VERSION
    model_name: str
    config_digest: str | None = None
    """Digest of the model's ``config.json``; None in files written without it."""
    native_length_tokens: int
    trainer: TrainerName
    gpus: int
    device_name: str
    device_bytes: int
    """Bytes of one GPU, as its driver reports it."""
    memory_limit: MemoryLimit = msgspec.field(name="room")
    """The memory that training has; recorded predictions call it ``room``."""
    margin_bytes: int = 0
    """Headroom asked for: bytes of a GPU that a length has to leave to count as one that fits."""
    length_tokens: int | None
    """The length that was asked about; None: the longest that fits was asked for."""
    cells: tuple[CellPrediction, ...]
    native: CellPrediction | None = None
    """The simplest cell that trains the native length, predicted at that length; None: no cell
    does, or one length was asked about, or steps were traced."""
    yarn_factor: float | None = None
    """Factor by which YaRN stretches positions at the longest length; None: without YaRN."""
    cost: Cost | None = None
    """Time and price of a training at the length; None: not asked for, or the speed is unknown."""
    tried: FailedAllocation | None = None
    """An allocation that failed at the length, and the tensors of its size; None: not asked."""
    assumed: str = ""
    """Sentence on what is assumed of the trainer's attention; empty: what it does by itself."""
    method: PredictionMethod = "formula"
    accuracy: str
    calibration: Calibration | None = None
    """The trials from which the intervals were learned; None: there are no intervals."""
    not_modelled: tuple[str, ...] = NOT_MODELLED
    notes: tuple[str, ...] = ()

    @property
    def has_default_headroom(self) -> bool:
        """True if ``margin_bytes`` is what a prediction leaves free unless told otherwise."""
        return self.margin_bytes == default_headroom_bytes(self.device_bytes)

    @property
    def answer(self) -> CellPrediction | None:
        """The cell that answers the question: the simplest cell that trains the requested length,
        or the first of those with the longest capacity; else, if the default headroom is not left,
        the cell with the most free memory that may still fit. None if no cell may fit.
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
        """The simplest cell that trains the native length, else any length; else ``explained``."""
        fitting = (cell for cell in self.cells if cell.capacity_tokens)
        shortest = min(fitting, key=lambda each: simplicity(each.cell), default=self.explained)
        at_native = (each for each in self.cells if self.native and each.cell == self.native.cell)
        return next(at_native, shortest)

    @property
    def explained(self) -> CellPrediction:
        """The cell whose memory is shown by term: the answer, or the first cell without one."""
        return self.answer or self.cells[0]


def predicted_capacities(prediction: Prediction, found_in: str) -> tuple[Capacity, ...]:
    """Capacities of a prediction's cells, for a guide; ``found_in`` is the prediction's file."""
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
