"""Replay: run a trace through the simulated allocator, for its peaks, the tensors live at them, and
whether it fits; or write it as a snapshot for PyTorch's viewer (https://pytorch.org/memory_viz):
the stack is operator, module and phase, and event numbers are its microseconds.
"""

import pickle
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

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
"""Most kinds of live tensors that are listed."""


class Alive(Record, frozen=True, kw_only=True):
    """Tensors of one kind that are live at the peak: how many, their bytes, who made them."""

    operator: str
    """Operator that allocated them."""
    phase: str
    """Phase in which they were allocated."""
    module: str
    """Module whose pass allocated them, with ``*`` for layer numbers; empty for none."""
    bytes: int
    """Bytes of all these tensors together."""
    count: int


class Replayed(Record, frozen=True, kw_only=True):
    """What the allocator of one rank would report of a step, by replay of its trace."""

    fits: bool
    phase: str
    """Phase of the peak of allocated bytes; if the step does not fit, the phase that ran out."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    """Number of times that all cached blocks were released to serve an allocation."""
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
    """Replay a log on an empty device with ``capacity_bytes`` for the allocator; None: unlimited.
    ``is_share``: the process limits its own allocator, as in a trial with a memory budget.
    ``workspaces_bytes``: sizes of cuBLAS's workspaces, which no trace contains.
    """
    trace = coded(log)
    found, peak_at = replay_trace(
        *(trace, 0),
        allocator=allocator,
        capacity_bytes=capacity_bytes,
        is_share=is_share,
        workspaces_bytes=workspaces_bytes if log.source == "traced" else (),
    )
    return found.replace(alive=alive_at(trace, 0, peak_at))


class Kind(Record, frozen=True, kw_only=True):
    """A kind of allocation, of ``fixed_bytes + bytes_per_tokens[0] x tokens /
    bytes_per_tokens[1]`` bytes, rounded down, and at most ``most_bytes``.
    """

    fixed_bytes: int
    bytes_per_tokens: tuple[int, int]
    most_bytes: int | None
    """Most bytes of such an allocation; None: unlimited."""
    stream: int
    operator: int
    module: int


class ScaledTrace(Record, frozen=True, kw_only=True):
    """Events of one rank, coded as integers, for any number of tokens in its micro-batch: without
    tiles and chunks, a step makes the same kinds of allocations in the same order.
    """

    schema_version: int = 1
    versions: dict[str, str]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[Kind, ...]
    phases: tuple[str, ...]
    events: tuple[int, ...]
    """Codes: n allocates kind n; -2d frees the allocation made d allocations ago, and 1 - 2d gives
    it back while another stream uses it; ``len(kinds) + p`` enters phase p, and the code after the
    last phase releases cached blocks."""

    def least_bytes(self, tokens: int) -> int:
        """Bytes of live blocks at the peak: no allocator can do with less."""
        blocks = self.blocks(tokens)
        changes = (*blocks, *(-block for block in reversed(blocks)))
        alive = accumulate(map(changes.__getitem__, _changes(self.events, len(blocks))))
        return max(alive, default=0)

    def blocks(self, tokens: int) -> list[int]:
        """Bytes of the allocator's block for one allocation of each kind: ``sizes`` rounded up."""
        return [round_size(size) if size else 0 for size in self.sizes(tokens)]

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of one allocation of each kind if a GPU has this many tokens."""
        lines = (
            kind.fixed_bytes + kind.bytes_per_tokens[0] * tokens // kind.bytes_per_tokens[1]
            for kind in self.kinds
        )
        return [
            line if kind.most_bytes is None else min(line, kind.most_bytes)
            for line, kind in zip(lines, self.kinds, strict=True)
        ]


@lru_cache(maxsize=64)
def _changes(events: tuple[int, ...], kinds: int) -> list[int]:
    """Codes of the events that allocate or free: n allocates a block of kind n, -1 - n frees it."""
    allocated: list[int | None] = []
    found = []
    for code in events:
        if code < 0:
            kind = allocated[code >> 1]
            allocated[code >> 1] = None
            if kind is not None:
                found.append(-1 - kind)
        elif code < kinds:
            allocated.append(code)
            found.append(code)
    return found


def coded(log: EventLog) -> ScaledTrace:
    """Code a log as a trace whose sizes do not depend on tokens; it replays in half the time. Frees
    of memory that the log did not allocate are ignored.
    """
    kinds: dict[tuple[int, ...], int] = {}
    phases: dict[str, int] = {"setup": 0}
    numbers: dict[int, int] = {}
    codes: list[int | str] = []
    phase = "setup"
    for event in log.events:
        match event:
            case Allocate():
                numbers[event.id] = len(numbers)
                kind = event.bytes, event.stream, event.operator, event.module
                codes.append(kinds.setdefault(kind, len(kinds)))
            case Free() | GiveBack():
                number = numbers.get(event.id)
                ended = 2 * ((number or 0) - len(numbers)) + isinstance(event, GiveBack)
                codes.append(phase if number is None else ended)
            case Enter():
                phase = event.phase
                phases.setdefault(phase, len(phases))
                codes.append(phase)
            case _:
                codes.append("")
    after = {name: len(kinds) + number for name, number in phases.items()}
    after[""] = len(kinds) + len(phases)
    return ScaledTrace(
        versions=log.versions,
        operators=log.operators,
        modules=log.modules,
        kinds=tuple(
            Kind(
                fixed_bytes=size,
                bytes_per_tokens=(0, 1),
                most_bytes=None,
                stream=stream,
                operator=operator,
                module=module,
            )
            for size, stream, operator, module in kinds
        ),
        phases=tuple(phases),
        events=tuple(after[code] if isinstance(code, str) else code for code in codes),
    )


def replay_trace(
    trace: ScaledTrace,
    tokens: int,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    is_share: bool = False,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> tuple[Replayed, int]:
    """Replay a trace at ``tokens`` tokens: the result, and the number of events before its peak."""
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes, is_share=is_share
    )
    take, put, first_phase = device.take, device.put, len(trace.kinds)
    sizes = trace.blocks(tokens)
    pools = [
        device.pool(kind.stream, is_small=size <= SMALL_BYTES)
        for kind, size in zip(trace.kinds, sizes, strict=True)
    ]
    live: list[MemoryBlock | int | None] = []
    """By allocation: its block; its handle, once given back; None, once free."""
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
    """Result for a trace that needs ``least_bytes``, more than the GPU has; nothing is replayed."""
    return Replayed(
        fits=False,
        phase="",
        peak_allocated_bytes=least_bytes,
        peak_reserved_bytes=least_bytes,
        retries=0,
        allocated_by_phase={},
        alive=(),
    )


def alive_at(trace: ScaledTrace, tokens: int, number: int) -> tuple[Alive, ...]:
    """Tensors that are live after the first ``number`` events, by kind, the largest first."""
    phase = "setup"
    living: dict[int, tuple[int, str]] = {}
    count = 0
    for code in trace.events[:number]:
        if code < 0:
            living.pop(count + (code >> 1), None)
        elif code < len(trace.kinds):
            living[count] = code, phase
            count += 1
        elif code < len(trace.kinds) + len(trace.phases):
            phase = trace.phases[code - len(trace.kinds)]
    bytes_of = trace.sizes(tokens)
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for code, born in living.values():
        kind = trace.kinds[code]
        module = _NUMBER.sub("*", trace.modules[kind.module])
        name = trace.operators[kind.operator], born, module
        sizes[name] += bytes_of[code]
        counts[name] += 1
    return tuple(
        Alive(operator=name[0], phase=name[1], module=name[2], bytes=size, count=counts[name])
        for name, size in sizes.most_common(_LARGEST)
    )


def timeline(
    log: EventLog,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
    workspaces_bytes: Sequence[int] = CUBLAS_WORKSPACES_BYTES,
) -> bytes:
    """A replay as a snapshot file for PyTorch's memory viewer, to its end or first failure."""
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
    """Entries of the viewer for frees of given-back allocations that the allocator just made."""
    early = [name for name, (handle, _) in living.items() if not device.is_held(handle)]
    return [entry for name in early for entry in _freed(living.pop(name)[1], number)]


def _freed(born: dict[str, Any], number: int) -> list[dict[str, Any]]:
    actions = ("free_requested", "free_completed")
    return [{**born, "action": action, "time_us": number} for action in actions]
