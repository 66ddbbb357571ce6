"""The memory profiler: PyTorch's history of a GPU's memory, recorded around steps, and a snapshot
of it written when they end, however they end.

```python
profiler = highwater.MemoryProfiler("snapshots/step_0")
with profiler:                       # or profiler.start() ... profiler.stop()
    profiler.enter("forward")        # optional: names the phase of what is allocated from here on
    loss = model(batch).loss
    profiler.enter("backward")
    loss.backward()
# highwater profile snapshots/step_0/snapshot_rank00.pickle
```

Stacks are Python's: those of C++ would take minutes to be named. The backward pass runs in threads
that have none, so that the phase is recorded with each allocation, where PyTorch can.
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
from highwater.nouns.profiling import SnapshotOrder, coordinates, snapshot_name
from highwater.nouns.trial import TrialSpec

_MEMORY = cast(Any, torch.cuda.memory)
"""What records a history has no public name."""


class MemoryProfiler:
    """Records a GPU's memory between ``start`` and ``stop``, or as a context manager.

    What ends with an exception, out of memory too, writes its snapshot as well; where that fails
    it is said on stderr, and the exception stays what it was. Ranks are told by the variable RANK.
    Raises MachineError where there is no GPU: PyTorch keeps no history of the CPU's memory.
    """

    def __init__(
        self, directory: str | Path, *, max_entries: int = 100_000, coordinates: str = ""
    ) -> None:
        """Name the folder of the snapshot, which is made.

        ``max_entries``: events that are kept, the last ones. ``coordinates``: the rank's place in
        its mesh, a part of the file's name: ``d0r0u1``.
        """
        _refuse_without_gpu()
        self.path = Path(directory) / snapshot_name(int(os.environ.get("RANK", "0")), coordinates)
        self.max_entries = max_entries

    def start(self) -> Self:
        """Forget earlier events, and record from here on. Allocations that are there already keep
        the stacks that they were recorded with, if any.
        """
        _record("all", max_entries=self.max_entries, clear=True)
        return self

    def enter(self, phase: str) -> None:
        """Name the phase of what is allocated from here on."""
        _name_phase(phase)

    def stop(self) -> Path:
        """Write the snapshot, record no more, and return its path; the file is there whole or not
        at all.
        """
        try:
            write_snapshot(self.path)
        finally:
            _end()
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
    """The profiler of one rank of a trial: what lives from step to step is recorded with its stack
    from the beginning, and every event of the steps that were asked for.

    What fails leaves a snapshot whatever step it is in, where whoever runs the steps then calls
    ``write_failed``.
    """

    def __init__(self, order: SnapshotOrder, *, rank: int, place: str) -> None:
        """Begin to record the stacks of what is allocated. Raises MachineError without a GPU."""
        _refuse_without_gpu()
        self._order, self._name, self._part = order, snapshot_name(rank, place), "setup"
        self._written: set[Path] = set()
        _record("state")

    def enter(self, where: str) -> None:
        """Record where the step is with what is allocated from here on."""
        _name_phase(where)

    @contextmanager
    def step(self, number: int, *, trains: bool = True) -> Generator[None]:
        """Record a step, the first is 0, if it was asked for; of what comes before it, and trains
        nothing, no event is recorded.
        """
        self._part = f"step_{number}"
        profiling = self._order.profiling
        if not trains or number not in profiling.profile_steps:
            yield
            return
        _record("all", max_entries=profiling.max_entries, clear=True)
        yield  # of a step that fails, whoever hears of it writes the snapshot, after its report
        self.write()
        _record("state")

    def write(self) -> None:
        """Write the snapshot of the step that the trial is in, unless it is there."""
        if self._path not in self._written:
            self._written.add(self._path)
            write_snapshot(self._path)

    def write_failed(self) -> None:
        """Write what a step that failed recorded; where that fails it is said on stderr, and the
        failure stays what it was.
        """
        _try(self.write, self._path)
        _record("state")

    def end(self) -> None:
        """Record no more."""
        _end()

    @property
    def _path(self) -> Path:
        return Path(self._order.directory) / self._part / self._name


def profiler_of(spec: TrialSpec, rank: int) -> TrialProfiler | None:
    """The profiler of a rank of a trial, where it is to record its memory."""
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
    """Write PyTorch's snapshot of now, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    _MEMORY._dump_snapshot(str(partial))
    partial.replace(path)


def _try(write: Callable[[], object], path: Path) -> None:
    """Write a snapshot after a failure, which whoever hears of it is to hear of all the same."""
    try:
        write()
    except Exception as problem:  # noqa: BLE001 -- the failure is what is raised
        told = f"{type(problem).__name__}: {problem}"
        sys.stderr.write(f"no memory snapshot was written to {path}: {told}\n")


def _end() -> None:
    _record(None)
    _name_phase("")


def _record(
    what: Literal["state", "all"] | None, *, max_entries: int = 1, clear: bool = False
) -> None:
    """Record nothing (None), the stacks of what is alive, or every event besides."""
    if what is None:
        _MEMORY._record_memory_history(None)
        return
    _MEMORY._record_memory_history(
        what, context="all", stacks="python", max_entries=max_entries, clear_history=clear
    )


def _name_phase(phase: str) -> None:
    """Where PyTorch records such a thing: from 2.11 on."""
    name = getattr(_MEMORY, "_set_memory_metadata", None)
    if name is not None:
        name(phase)
