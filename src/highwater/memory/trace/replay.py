"""Replay: an event log through the simulated caching allocator: peaks, what is alive there, whether
it fits; or as a snapshot that PyTorch's memory viewer opens (https://pytorch.org/memory_viz), with
operator, module and phase in the place of a stack, and numbers of events in that of microseconds.
"""

import pickle
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.allocator import (
    SMALL_BYTES,
    CachingAllocator,
    CapacityError,
    MemoryBlock,
    round_size,
)
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
    found, peak_at = replay_codes(
        codes(log),
        allocator=allocator,
        capacity_bytes=capacity_bytes,
        is_share=is_share,
        workspaces_bytes=workspaces_bytes if log.source == "traced" else (),
    )
    return msgspec.structs.replace(found, alive=alive_at(log, peak_at))


class Codes(NamedTuple):
    """The events of a log in numbers, by kinds of allocations; a replay takes half the time."""

    sizes: Sequence[int]
    """Bytes of an allocation of each kind."""
    streams: Sequence[int]
    phases: Sequence[str]
    events: Sequence[int]
    """Allocate kind n: n. Free what was allocated d allocations ago: -2d; give it back before
    another stream has done with it: 1 - 2d. Enter phase p: ``len(sizes) + p``; after the last
    phase, release what is cached."""


def codes(log: EventLog) -> Codes:
    """The codes of a log; what it frees that it did not allocate is nothing."""
    allocations = (event for event in log.events if isinstance(event, Allocate))
    kinds = dict.fromkeys((event.bytes, event.stream) for event in allocations)
    entered = (event.phase for event in log.events if isinstance(event, Enter))
    phases = tuple(dict.fromkeys(("setup", *entered)))
    kind_codes = {kind: code for code, kind in enumerate(kinds)}
    phase_codes = {phase: code for code, phase in enumerate(phases, start=len(kinds))}
    numbers: dict[int, int] = {}
    events: list[int] = []
    phase, count = len(kinds), 0
    for event in log.events:
        match event:
            case Allocate():
                numbers[event.id] = count
                count += 1
                events.append(kind_codes[event.bytes, event.stream])
            case Free() | GiveBack():
                number = numbers.get(event.id)
                is_early = isinstance(event, GiveBack)
                events.append(phase if number is None else 2 * (number - count) + is_early)
            case Enter():
                phase = phase_codes[event.phase]
                events.append(phase)
            case _:
                events.append(len(kinds) + len(phases))
    return Codes([size for size, _ in kinds], [stream for _, stream in kinds], phases, events)


def replay_codes(
    trace: Codes,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    is_share: bool = False,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> tuple[Replayed, int]:
    """What ``replay`` finds, but for what is alive at the peak; and the number of events before."""
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes, is_share=is_share
    )
    take, put, first_phase = device.take, device.put, len(trace.sizes)
    sizes = [round_size(size) if size else 0 for size in trace.sizes]
    pools = [
        device.pool(stream, is_small=size <= SMALL_BYTES)
        for stream, size in zip(trace.streams, sizes, strict=True)
    ]
    live: list[MemoryBlock | int | None] = []
    """Blocks; handles, of what was given back; None once free."""
    phase, phase_bytes, by_phase = "setup", 0, dict[str, int]()
    peak_phase, peak_at, number = phase, 0, 0
    fits = all(
        take(device.pool(0, is_small=size <= SMALL_BYTES), round_size(size)) is not None
        for size in workspaces_bytes
    )
    for number, code in enumerate(trace.events if fits else ()):
        if 0 <= code < first_phase:
            size = sizes[code]
            block = take(pools[code], size) if size else None
            if size and block is None:
                fits, peak_phase, peak_at = False, phase, number
                break
            live.append(block)
            allocated_bytes = device.allocated_bytes
            if allocated_bytes > phase_bytes:
                by_phase[phase] = phase_bytes = allocated_bytes
                if allocated_bytes == device.peak_allocated_bytes:
                    peak_phase, peak_at = phase, number + 1
        elif code < 0:
            block = live[code >> 1]
            if isinstance(block, int):
                if not code & 1 and device.is_held(block):
                    device.free(block)
            elif block is not None and code & 1:
                live[code >> 1] = handle = device.handle(block)
                device.give_back(handle)
            elif block is not None:
                live[code >> 1] = None
                put(block)
        elif code < first_phase + len(trace.phases):
            phase = trace.phases[code - first_phase]
            phase_bytes = by_phase.get(phase, 0)
        else:
            device.release_cached()
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
