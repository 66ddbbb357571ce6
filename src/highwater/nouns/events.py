"""Events: what one rank's step allocates and frees on its device, in order; written by the tracer,
replayed by the prediction. And the scratch bytes of PyTorch's sums over rows.
"""

from typing import Literal, NamedTuple

import msgspec

from highwater.nouns.codec import Record
from highwater.nouns.hardware import Kernel
from highwater.nouns.trainer import OURS, TrainerName
from highwater.nouns.trial import TrialSpec

RESIDENT_THREADS = 132 * 2048
"""Threads that an H200, or an H100, runs at once."""
_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread adds up: fewest where blocks share a column, and from how many they do."""


class ColumnSums(NamedTuple):
    """Bytes of scratch memory that PyTorch's kernel takes to sum a matrix over its rows."""

    partial_bytes: int = 0
    """Float32 numbers: for each column and block that shares it, as many as a block has columns."""
    semaphore_bytes: int = 0
    """Four for each group of blocks with the same columns."""


def column_sums(rows: int, columns: int, *, resident_threads: int) -> ColumnSums:
    """Scratch bytes of sums of this many columns; none where no column is shared by blocks.
    ``resident_threads``: how many the GPU runs at once. Source: ``setReduceConfig`` in
    ATen/native/cuda/Reduce.cuh; equal to what H200s recorded of 128 to 5,120 columns and 16,384 to
    655,360 rows (docs/results/lab/trinity_trials.json).
    """
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = _THREADS // vector
    width = min(_power_of_two(columns // vector), _WARP)
    height = min(_power_of_two(rows), most // width)
    width = min(_power_of_two(columns // vector), most // height)
    values, blocks = -(-rows // height), -(-columns // (vector * width))
    at_once = resident_threads // (width * height)
    if values < _MOST_VALUES or blocks > at_once:
        return ColumnSums()
    wanted = -(-at_once // blocks)
    sharing = max(min(wanted, -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if sharing == 1:
        return ColumnSums()
    return ColumnSums(4 * columns * sharing * width * vector, 4 * blocks)


def _power_of_two(number: int) -> int:
    """The largest power of two that is no more than a number."""
    return 1 << (number.bit_length() - 1)


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Event: bytes are allocated."""

    id: int
    bytes: int
    stream: int
    operator: int
    """Index into ``EventLog.operators``."""
    module: int = 0
    """Index into ``EventLog.modules``."""


class Free(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Event: the bytes of an allocation are freed."""

    id: int


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Event: bytes are given back that another stream still uses; a ``Free`` follows its end."""

    id: int


class Enter(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Event: a phase of the trial begins."""

    phase: str


class ReleaseCached(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Event: the allocator releases what is cached, as ``torch.cuda.empty_cache`` does."""


TraceEvent = Allocate | Free | GiveBack | Enter | ReleaseCached


class TraceOrder(Record, frozen=True, kw_only=True):
    """A training step that the tracer records on fake tensors, in a process of its own."""

    spec: TrialSpec
    rank: int = 0
    """The rank whose events are traced."""
    kernel: Kernel = "cudnn"
    """The fused attention of the GPUs that are meant."""
    trainer: TrainerName = OURS
    """The trainer whose step is traced."""
    resident_threads: int = RESIDENT_THREADS
    """Threads that a GPU of the kind that is meant runs at once: multiprocessors x threads of each.
    Our own step is traced with an H200's for any GPU; an A100 has 108 x 2,048, and its sums over
    tokens take so much less."""


class EventLog(Record, frozen=True, kw_only=True):
    """All allocator events of one rank, from the first allocation to the end of its last step."""

    schema_version: int = 1
    source: Literal["traced", "recorded"]
    versions: dict[str, str]
    operators: tuple[str, ...]
    """Names of the operators that allocate; events name their index."""
    modules: tuple[str, ...] = ("",)
    """Names of the model's modules; events name the index of the innermost one whose forward pass,
    or recomputation, was running; the empty name stands for none."""
    events: tuple[TraceEvent, ...]
    host_bytes: int = 0
    """Most bytes of activations in host memory at once."""
