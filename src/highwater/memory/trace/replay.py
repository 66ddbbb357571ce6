"""Replay: an event log through the simulated caching allocator: peaks, by phase too, what is alive
there, whether it fits.
"""

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.allocator import CachingAllocator, CapacityError
from highwater.nouns.codec import Record
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack
from highwater.nouns.settings import Allocator

_NUMBER = re.compile(r"\b\d+\b")
_LARGEST = 20
"""Kinds of living tensors that are named."""


class Alive(Record, frozen=True, kw_only=True):
    """Tensors of one kind at the peak."""

    operator: str
    """Operator that allocated them."""
    phase: str
    """Phase in which they were allocated."""
    module: str
    """Module whose forward pass, or recomputation, allocated them; ``*`` for the number of a layer;
    empty for none."""
    bytes: int
    """Bytes of all of them together."""
    count: int


class Replayed(Record, frozen=True, kw_only=True):
    """What the allocator would report of this rank."""

    fits: bool
    phase: str
    """Phase of the peak of allocated bytes; where it does not fit, the phase that ran out."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    allocated_by_phase: dict[str, int]
    """Peak of allocated bytes within each phase."""
    alive: tuple[Alive, ...]
    """Tensors that are alive at the peak of allocated bytes, or when memory ran out; the largest
    first."""


def replay(
    log: EventLog,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    is_share: bool = False,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> Replayed:
    """Replay a log on an empty device with ``capacity_bytes`` for the allocator; None is a device
    without end.

    ``is_share``: the capacity is one that the process sets itself, as a trial with a memory budget
    does. ``workspaces_bytes`` are cuBLAS's, of which a trace knows nothing.
    """
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes, is_share=is_share
    )
    handles: dict[int, int] = {}
    phase, fits, number, peak_at = "setup", True, 0, 0
    by_phase: dict[str, int] = {}
    peak_phase = phase
    try:
        for size in workspaces_bytes if log.source == "traced" else ():
            device.allocate(size)
        for number, event in enumerate(log.events):
            match event:
                case Allocate():
                    if event.bytes:
                        handles[event.id] = device.allocate(event.bytes, stream=event.stream)
                    if device.allocated_bytes > by_phase.get(phase, 0):
                        by_phase[phase] = device.allocated_bytes
                        if device.allocated_bytes == device.peak_allocated_bytes:
                            peak_at, peak_phase = number + 1, phase
                case Free():
                    handle = handles.pop(event.id, None)
                    if handle is not None and device.is_held(handle):
                        device.free(handle)
                case GiveBack() if event.id in handles:
                    device.give_back(handles[event.id])
                case GiveBack():
                    pass
                case Enter():
                    phase = event.phase
                case _:
                    device.release_cached()
    except CapacityError:
        fits, peak_phase, peak_at = False, phase, number
    return Replayed(
        fits=fits,
        phase=peak_phase,
        peak_allocated_bytes=device.peak_allocated_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        retries=device.retries,
        allocated_by_phase=by_phase,
        alive=alive_at(log, peak_at),
    )


def needed(
    log: EventLog,
    *,
    allocator: Allocator,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> Replayed:
    """What a log that does not fit would need: its replay without end."""
    return msgspec.structs.replace(
        replay(log, allocator=allocator, workspaces_bytes=workspaces_bytes), fits=False
    )


def alive_at(log: EventLog, number: int) -> tuple[Alive, ...]:
    """What the first ``number`` events have allocated and not freed."""
    phase = "setup"
    living: dict[int, tuple[Allocate, str]] = {}
    for event in log.events[:number]:
        match event:
            case Allocate():
                living[event.id] = (event, phase)
            case Free() | GiveBack():
                living.pop(event.id, None)
            case Enter():
                phase = event.phase
            case _:
                pass
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for allocation, born in living.values():
        kind = (
            log.operators[allocation.operator],
            born,
            _NUMBER.sub("*", log.modules[allocation.module]),
        )
        sizes[kind] += allocation.bytes
        counts[kind] += 1
    return tuple(
        Alive(
            operator=operator,
            phase=born,
            module=module,
            bytes=size,
            count=counts[operator, born, module],
        )
        for (operator, born, module), size in sizes.most_common(_LARGEST)
    )
