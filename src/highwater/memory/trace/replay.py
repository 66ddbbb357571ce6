"""Replay: an event log through the simulated caching allocator: peaks, what is alive there, whether
it fits; or as a snapshot that PyTorch's memory viewer opens (https://pytorch.org/memory_viz), with
operator, module and phase in the place of a stack, and numbers of events in that of microseconds.
"""

import pickle
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

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
    """Module whose pass allocated them; ``*`` for the number of a layer; empty for none."""
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
    """Tensors alive at the peak of allocated bytes, or when memory ran out; the largest first."""


def replay(
    log: EventLog,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    is_share: bool = False,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> Replayed:
    """Replay a log on an empty device with ``capacity_bytes`` for the allocator; None: without end.
    ``is_share``: a capacity that the process sets itself, as of a trial with a memory budget.
    ``workspaces_bytes`` are cuBLAS's, which no trace has.
    """
    found, peak_at = replay_to_peak(
        log,
        allocator=allocator,
        capacity_bytes=capacity_bytes,
        is_share=is_share,
        workspaces_bytes=workspaces_bytes,
    )
    return msgspec.structs.replace(found, alive=alive_at(log, peak_at))


def replay_to_peak(
    log: EventLog,
    *,
    allocator: Allocator,
    capacity_bytes: int | None,
    workspaces_bytes: Sequence[int],
    is_share: bool = False,
) -> tuple[Replayed, int]:
    """What ``replay`` finds, but for what is alive at the peak; and the number of events before."""
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
    replayed = Replayed(
        fits=fits,
        phase=peak_phase,
        peak_allocated_bytes=device.peak_allocated_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        retries=device.retries,
        allocated_by_phase=by_phase,
        alive=(),
    )
    return replayed, peak_at


def ran_out(least_bytes: int) -> Replayed:
    """What is known without a replay of a step that has more alive at once than there is room."""
    return Replayed(
        fits=False,
        phase="",
        peak_allocated_bytes=least_bytes,
        peak_reserved_bytes=least_bytes,
        retries=0,
        allocated_by_phase={},
        alive=(),
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
        module = _NUMBER.sub("*", log.modules[allocation.module])
        kind = log.operators[allocation.operator], born, module
        sizes[kind] += allocation.bytes
        counts[kind] += 1
    return tuple(
        Alive(operator=kind[0], phase=kind[1], module=kind[2], bytes=size, count=counts[kind])
        for kind, size in sizes.most_common(_LARGEST)
    )


def timeline(
    log: EventLog,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> bytes:
    """The pickle, up to the last event, or to the one that does not fit."""
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes
    )
    living: dict[int, tuple[int, dict[str, Any]]] = {}
    entries: list[dict[str, Any]] = []
    phase = "setup"

    def begin(handle: int, stream: int, number: int, operator: str, module: str) -> None:
        address, size = device.place_of(handle)
        frames = [
            {"name": operator, "filename": module or "no module", "line": 0},
            {"name": phase, "filename": "phase", "line": 0},
        ]
        entry = {"action": "alloc", "addr": address, "size": size, "stream": stream}
        entries.append({**entry, "time_us": number, "frames": frames})

    try:
        for number, size in enumerate(workspaces_bytes, start=-len(workspaces_bytes)):
            begin(device.allocate(size), 0, number, "cuBLAS workspace", "")
        for number, event in enumerate(log.events):
            match event:
                case Allocate() if event.bytes:
                    retries = device.retries
                    handle = device.allocate(event.bytes, stream=event.stream)
                    if device.retries != retries:
                        entries += _let_go(device, living, number)
                    names = (log.operators[event.operator], log.modules[event.module])
                    begin(handle, event.stream, number, *names)
                    living[event.id] = handle, entries[-1]
                case Free() if event.id in living:
                    handle, born = living.pop(event.id)
                    device.free(handle)
                    entries += _freed(born, number)
                case Enter():
                    phase = event.phase
                case GiveBack() if event.id in living:
                    device.give_back(living[event.id][0])
                case Allocate() | Free() | GiveBack():
                    pass
                case _:
                    device.release_cached()
                    entries += _let_go(device, living, number)
    except CapacityError as error:
        free = max(0, (capacity_bytes or 0) - device.reserved_bytes)
        entry = {"action": "oom", "size": error.requested_bytes, "device_free": free, "stream": 0}
        entries.append({**entry, "time_us": len(log.events), "frames": []})
    return pickle.dumps({"segments": [], "device_traces": [entries], "allocator_settings": {}})


def _let_go(
    device: CachingAllocator, living: dict[int, tuple[int, dict[str, Any]]], number: int
) -> list[dict[str, Any]]:
    """Entries that end what had been given back, and what the allocator has just waited for."""
    early = [name for name, (handle, _) in living.items() if not device.is_held(handle)]
    return [entry for name in early for entry in _freed(living.pop(name)[1], number)]


def _freed(born: dict[str, Any], number: int) -> list[dict[str, Any]]:
    actions = ("free_requested", "free_completed")
    return [{**born, "action": action, "time_us": number} for action in actions]
