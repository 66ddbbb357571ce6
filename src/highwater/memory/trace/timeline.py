"""Timeline: a replayed event log as a snapshot that PyTorch's memory viewer opens
(https://pytorch.org/memory_viz).

The form is that of ``torch.cuda.memory._snapshot()``, a pickle of plain lists, dicts, strings and
numbers. In the place of the stack of a real allocation stand its operator, its module and its
phase; in the place of microseconds the number of the event.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.allocator import CachingAllocator, CapacityError
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack
from highwater.nouns.settings import Allocator


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
    try:
        for number, size in enumerate(workspaces_bytes, start=-len(workspaces_bytes)):
            entries.append(
                _entry(device, device.allocate(size), 0, number, "cuBLAS workspace", "", phase)
            )
        for number, event in enumerate(log.events):
            match event:
                case Allocate() if event.bytes:
                    retries = device.retries
                    handle = device.allocate(event.bytes, stream=event.stream)
                    if device.retries != retries:
                        entries += _let_go(device, living, number)
                    names = (log.operators[event.operator], log.modules[event.module], phase)
                    entries.append(_entry(device, handle, event.stream, number, *names))
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
        size = error.requested_bytes
        entries.append(
            {
                "action": "oom",
                "size": size,
                "device_free": free,
                "stream": 0,
                "time_us": len(log.events),
                "frames": [],
            }
        )
    return pickle.dumps({"segments": [], "device_traces": [entries], "allocator_settings": {}})


def _let_go(
    device: CachingAllocator, living: dict[int, tuple[int, dict[str, Any]]], number: int
) -> list[dict[str, Any]]:
    """Entries that end what had been given back, and what the allocator has just waited for."""
    early = [name for name, (handle, _) in living.items() if not device.is_held(handle)]
    return [entry for name in early for entry in _freed(living.pop(name)[1], number)]


def _freed(born: dict[str, Any], number: int) -> list[dict[str, Any]]:
    return [
        {**born, "action": action, "time_us": number}
        for action in ("free_requested", "free_completed")
    ]


def _entry(
    device: CachingAllocator,
    handle: int,
    stream: int,
    number: int,
    operator: str,
    module: str,
    phase: str,
) -> dict[str, Any]:
    """The entry of an allocation that is alive."""
    frames = [
        {"name": operator, "filename": module or "no module", "line": 0},
        {"name": phase, "filename": "phase", "line": 0},
    ]
    address, size = device.place_of(handle)
    return {
        "action": "alloc",
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": number,
        "frames": frames,
    }
