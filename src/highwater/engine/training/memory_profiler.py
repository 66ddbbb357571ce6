"""Memory profiler: record PyTorch's history of a GPU's memory around steps, and write a snapshot of
it when they end, with or without an error.

```python
profiler = highwater.MemoryProfiler("snapshots/step_0")
with profiler:                       # or profiler.start() ... profiler.stop()
    profiler.enter("forward")        # optional: names the phase of what is allocated from here on
    loss = model(batch).loss
    profiler.enter("backward")
    loss.backward()
# highwater profile snapshots/step_0/snapshot_rank00.pickle
```

Stacks are Python's, because naming those of C++ takes minutes. The backward pass runs in threads
without Python stacks, so the phase is recorded with each allocation if PyTorch can.

Also: readings of a rank's memory. On a GPU three matter: the driver's (device used), the caching
allocator's (reserved, active, allocated), and their difference: the context, the libraries' own
workspaces and NCCL, which no allocator cap can bound. On the CPU it is the data segment, which
RLIMIT_DATA bounds.
"""

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch

from highwater.engine.activations.host import HostActivations
from highwater.errors import MachineError
from highwater.nouns.environment import SnapshotOrder, coordinates, snapshot_name
from highwater.nouns.trial import MemoryBudget, RankMemory, TrialSpec
from highwater.units import GIB, format_bytes

_MEMORY = cast(Any, torch.cuda.memory)
"""Module with PyTorch's functions for memory histories, which have no public names."""

_SAMPLE_S = 0.001


class MemoryProfiler:
    """Records a GPU's memory between ``start`` and ``stop``, or as a context manager.

    If the block raises, running out of memory included, the snapshot is written too; if that fails,
    stderr says so, and the original exception is raised. The rank is read from the variable RANK.
    Raises MachineError without a GPU: PyTorch keeps no history of the CPU's memory.
    """

    def __init__(
        self, directory: str | Path, *, max_entries: int = 100_000, coordinates: str = ""
    ) -> None:
        """Choose the folder of the snapshot; it is made if need be.

        ``max_entries``: number of latest events that are kept. ``coordinates``: the rank's
        coordinates in its mesh for the file's name, like ``d0r0u1``.
        """
        _refuse_without_gpu()
        self.path = Path(directory) / snapshot_name(int(os.environ.get("RANK", "0")), coordinates)
        self.max_entries = max_entries

    def start(self) -> Self:
        """Drop earlier events and record from now on; live allocations keep their stacks."""
        _record("all", max_entries=self.max_entries, clear=True)
        return self

    def enter(self, phase: str) -> None:
        """Name the phase of all allocations from now on."""
        _name_phase(phase)

    def stop(self) -> Path:
        """Write the snapshot atomically, stop recording, and return its path."""
        try:
            write_snapshot(self.path)
        finally:
            _record(None)
            _name_phase("")
        return self.path

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            _try(self.stop, self.path)


class TrialProfiler:
    """Profiler of one rank of a trial: it records the stacks of live allocations from the start,
    and every event of the steps that ``order`` names.

    If a step fails, its caller must call ``write_failed``, which writes a snapshot.
    """

    def __init__(self, order: SnapshotOrder, *, rank: int, place: str) -> None:
        """Start recording stacks of allocations. Raises MachineError without a GPU."""
        _refuse_without_gpu()
        self._order, self._name, self._part = order, snapshot_name(rank, place), "setup"
        self._written: set[Path] = set()
        _record("state")

    def enter(self, where: str) -> None:
        """Name the phase of all allocations from now on."""
        _name_phase(where)

    @contextmanager
    def step(self, number: int, *, trains: bool = True) -> Generator[None]:
        """Record the memory of step ``number`` (from 0) if the order names it and it ``trains``."""
        self._part = f"step_{number}"
        profiling = self._order.profiling
        if not trains or number not in profiling.profile_steps:
            yield
            return
        _record("all", max_entries=profiling.max_entries, clear=True)
        yield  # if the step fails, its caller writes the snapshot, after the report
        self.write()
        _record("state")

    def write(self) -> None:
        """Write the snapshot of the current step, unless it exists already."""
        if self._path not in self._written:
            self._written.add(self._path)
            write_snapshot(self._path)

    def write_failed(self) -> None:
        """Write the snapshot of a failed step; if that fails too, say so on stderr."""
        _try(self.write, self._path)
        _record("state")

    def end(self) -> None:
        """Stop recording."""
        _record(None)
        _name_phase("")

    @property
    def _path(self) -> Path:
        return Path(self._order.directory) / self._part / self._name


def profiler_of(spec: TrialSpec, rank: int) -> TrialProfiler | None:
    """Return the profiler of a trial's rank; None if its memory is not to be recorded."""
    order = spec.memory_snapshots
    if order is None or not order.profiling.records(rank):
        return None
    return TrialProfiler(order, rank=rank, place=coordinates(spec.layout, rank))


def _refuse_without_gpu() -> None:
    if not torch.cuda.is_available():
        raise MachineError(
            "PyTorch records no history of memory without a GPU",
            hint="run it where `nvidia-smi` shows one",
        )


def write_snapshot(path: Path) -> None:
    """Write PyTorch's current snapshot atomically; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    _MEMORY._dump_snapshot(str(partial))
    partial.replace(path)


def _try(write: Callable[[], object], path: Path) -> None:
    """Write a snapshot after a failure; an error in writing goes to stderr, not to the caller."""
    try:
        write()
    except Exception as problem:  # noqa: BLE001 -- the failure is what is raised
        told = f"{type(problem).__name__}: {problem}"
        sys.stderr.write(f"no memory snapshot was written to {path}: {told}\n")


def _record(
    what: Literal["state", "all"] | None, *, max_entries: int = 1, clear: bool = False
) -> None:
    """Set what is recorded: nothing (None), stacks of live allocations, or all events too."""
    if what is None:
        _MEMORY._record_memory_history(None)
        return
    _MEMORY._record_memory_history(
        what, context="all", stacks="python", max_entries=max_entries, clear_history=clear
    )


def _name_phase(phase: str) -> None:
    """Name the phase in PyTorch's records, which torch 2.11 and later can do."""
    name = getattr(_MEMORY, "_set_memory_metadata", None)
    if name is not None:
        name(phase)


def device_used_bytes(device: torch.device) -> int:
    """Bytes that the driver reports as used on a GPU, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def outside_allocator_bytes(device: torch.device) -> int:
    """Bytes in use on the device that the caching allocator does not hold."""
    return device_used_bytes(device) - torch.cuda.memory_reserved(device)


def allocator_settings(device: torch.device) -> dict[str, str]:
    """Return the settings that the caching allocator reports; empty on the CPU."""
    if device.type != "cuda":
        return {}
    # there is no public function for this
    snapshot = torch.cuda.memory._snapshot(device)  # pyright: ignore[reportPrivateUsage]
    return {name: str(value) for name, value in snapshot.get("allocator_settings", {}).items()}


def divide_budget(
    device: torch.device,
    *,
    budget_bytes: int | None,
    nccl_bytes: int,
    host: HostActivations | None = None,
) -> MemoryBudget:
    """Limit the allocator so that device used stays within the budget (None: only the card limits
    it), and return how the budget is divided. The limit is updated whenever ``host`` maps memory,
    which takes page tables on the device.

    The bytes now outside the allocator, less ``nccl_bytes``, count as the context. Raises
    MachineError if the budget leaves the allocator nothing, or exceeds the card.
    """
    total = torch.cuda.mem_get_info(device)[1]
    context_bytes = outside_allocator_bytes(device) - nccl_bytes
    budget = total if budget_bytes is None else budget_bytes
    divided = MemoryBudget.split(budget, context_bytes=context_bytes, nccl_bytes=nccl_bytes)
    if budget > total:
        raise MachineError(
            f"a budget of {format_bytes(budget)} on a GPU of {format_bytes(total)}",
            hint=f"use `--memory {total >> 20}MiB` or less",
        )
    if not divided.allocator_cap_bytes:
        raise MachineError(
            f"a budget of {format_bytes(budget)} is spent on the context and NCCL "
            f"({format_bytes(context_bytes + nccl_bytes)})",
            hint=f"use `--memory {(context_bytes + nccl_bytes) // GIB + 2}GiB` or more",
        )

    def bound() -> None:
        left = max(0, budget - outside_allocator_bytes(device))
        torch.cuda.set_per_process_memory_fraction(left / total, device)

    if budget_bytes is not None:
        bound()
        if host is not None:
            host.memory.mapped = bound
    return divided


def past_budget(peaks: RankMemory, budget: MemoryBudget) -> str | None:
    """Reason why more than the budget was used on the device; None if not, or if use is unknown.

    The allocator compares its cap with the requested bytes, but expandable segments map 20 MiB at a
    time, so that it can exceed its cap by less than that.
    """
    used = peaks.device_used_bytes
    if used is None or used <= budget.budget_bytes:
        return None
    past_cap = (peaks.peak_reserved_bytes or 0) - budget.allocator_cap_bytes
    why = "what is outside the allocator grew after the first step began"
    if past_cap > 0:
        past = format_bytes(past_cap)
        why = f"the allocator maps whole pages, with which it passed its cap by {past}"
    allowed = format_bytes(budget.budget_bytes)
    return f"{format_bytes(used)} used on the device, {allowed} allowed: {why}"


class MemoryWatch:
    """Largest memory that this rank used since ``begin``; ``peaks`` works after a failure."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._segment = DataSegment() if device.type == "cpu" else None
        self._device_used = 0

    def begin(self) -> None:
        """Reset the peaks; not on the CPU, whose limit binds from the start of the process."""
        self._device_used = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def sample(self) -> None:
        """Read the driver or the data segment now; called at ends of phases, near memory peaks."""
        if self._segment is not None:
            self._segment.read()
        else:
            self._device_used = max(self._device_used, device_used_bytes(self.device))

    def peaks(self) -> RankMemory:
        """Return the peaks since the last ``begin``, or since the watch was made."""
        self.sample()
        if self._segment is not None:
            return RankMemory(peak_data_segment_bytes=self._segment.peak_bytes)
        stats = torch.cuda.memory_stats(self.device)
        reserved, outside = stats["reserved_bytes.all.peak"], outside_allocator_bytes(self.device)
        return RankMemory(
            peak_allocated_bytes=stats["allocated_bytes.all.peak"],
            peak_active_bytes=stats["active_bytes.all.peak"],
            peak_reserved_bytes=reserved,
            # the samples may have missed a peak after which the allocator freed memory
            device_used_bytes=max(self._device_used, reserved + outside),
            device_total_bytes=torch.cuda.mem_get_info(self.device)[1],
            allocator_retries=stats["num_alloc_retries"],
        )


class DataSegment:
    """Largest data segment of this process, read every millisecond by a thread."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = Path("/proc/self/statm")
        threading.Thread(target=self._follow, name="data-segment", daemon=True).start()

    def read(self) -> None:
        """Read the segment once. Field 6 of statm is data plus stack, in pages; source: proc(5)."""
        pages = int(self._statm.read_text().split()[5])
        self.peak_bytes = max(self.peak_bytes, pages * self._page_bytes)

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(_SAMPLE_S):
            self.read()
