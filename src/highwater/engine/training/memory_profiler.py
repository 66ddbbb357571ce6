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
"""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch

from highwater.errors import MachineError
from highwater.nouns.environment import SnapshotOrder, coordinates, snapshot_name
from highwater.nouns.trial import TrialSpec

_MEMORY = cast(Any, torch.cuda.memory)
"""Module with PyTorch's functions for memory histories, which have no public names."""


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

        ``max_entries``: number of latest events that are kept. ``coordinates``: the rank's place in
        its mesh for the file's name, like ``d0r0u1``.
        """
        _refuse_without_gpu()
        self.path = Path(directory) / snapshot_name(int(os.environ.get("RANK", "0")), coordinates)
        self.max_entries = max_entries

    def start(self) -> Self:
        """Forget earlier events and record from here; what is alive keeps the stack that it has."""
        _record("all", max_entries=self.max_entries, clear=True)
        return self

    def enter(self, phase: str) -> None:
        """Name the phase of all allocations from here on."""
        _name_phase(phase)

    def stop(self) -> Path:
        """Write the snapshot, whole or not at all, stop recording, and return its path."""
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
    """Profiler of one rank of a trial. From the beginning it records the stacks of live
    allocations, and in the steps that were asked for every event.

    Whoever runs a step that fails calls ``write_failed``, which writes a snapshot.
    """

    def __init__(self, order: SnapshotOrder, *, rank: int, place: str) -> None:
        """Start recording stacks of allocations. Raises MachineError without a GPU."""
        _refuse_without_gpu()
        self._order, self._name, self._part = order, snapshot_name(rank, place), "setup"
        self._written: set[Path] = set()
        _record("state")

    def enter(self, where: str) -> None:
        """Name the phase of all allocations from here on."""
        _name_phase(where)

    @contextmanager
    def step(self, number: int, *, trains: bool = True) -> Generator[None]:
        """Record a step (the first is 0) if it was asked for, and if it ``trains``."""
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
    """Return the profiler of a rank of a trial; None if its memory is not to be recorded."""
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
    """Write PyTorch's current snapshot, whole or not at all; its folder is made."""
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
    """Set what is recorded: nothing (None), stacks of live allocations, or every event too."""
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
