"""Events: what one rank's step allocates and frees on its device, in order; written by the tracer,
replayed by the prediction.
"""

from typing import Literal

import msgspec

from highwater.model.column_sums import RESIDENT_THREADS
from highwater.nouns.codec import Record
from highwater.nouns.hardware import Kernel
from highwater.nouns.trainer import OURS, TrainerName
from highwater.nouns.trial import TrialSpec


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Bytes are asked for."""

    id: int
    bytes: int
    stream: int
    operator: int
    """Index into ``EventLog.operators``."""
    module: int = 0
    """Index into ``EventLog.modules``."""


class Free(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The bytes of an allocation are given back."""

    id: int


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The bytes of an allocation are given back while another stream still uses them
    (``record_stream``). A ``Free`` follows when the GPU is done.
    """

    id: int


class Enter(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A phase of the trial begins."""

    phase: str


class ReleaseCached(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The allocator is told to give back what is cached, as ``torch.cuda.empty_cache`` does."""


TraceEvent = Allocate | Free | GiveBack | Enter | ReleaseCached


class TraceOrder(Record, frozen=True, kw_only=True):
    """What the tracer is asked for."""

    spec: TrialSpec
    rank: int = 0
    """The rank whose events are traced."""
    kernel: Kernel = "cudnn"
    """The attention of the GPUs that are meant."""
    trainer: TrainerName = OURS
    """The trainer whose step is traced."""
    resident_threads: int = RESIDENT_THREADS
    """Threads that a GPU of the kind that is meant runs at once: multiprocessors x threads of each.
    An H200's, whatever GPU our own step is traced for; an A100 has 108 x 2,048, and sums over
    tokens take so much less."""


class EventLog(Record, frozen=True, kw_only=True):
    """One rank's events from its first allocation to the end of its last step."""

    schema_version: int = 1
    source: Literal["traced", "recorded"]
    versions: dict[str, str]
    operators: tuple[str, ...]
    """Names of the operators that allocate, by the index that events name."""
    modules: tuple[str, ...] = ("",)
    """Names of modules of the model, by the index that events name: the innermost one whose forward
    pass, or recomputation, was running; empty for none."""
    events: tuple[TraceEvent, ...]
