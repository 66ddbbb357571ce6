"""Case processes: forked to measure a case, ended when they fail or run out of time.

This process has imported PyTorch but never touches a device, so that a fork of it begins like a
fresh process, in milliseconds. On the CPU each case has processes of its own. On GPUs, where the
allocator can reset its peaks, processes live on while an attention's cases fit, to compile it only
once.
"""

import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.distributed as dist

from highwater.engine.bench.attention.contenders import Conditions
from highwater.engine.bench.attention.measurement import PassTooLong
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.statistics_log import divide_budget, outside_allocator_bytes
from highwater.errors import HighwaterError
from highwater.nouns.attention_bench import BenchMachine, BenchOrder, Mode
from highwater.nouns.environment import STORE_VARIABLE
from highwater.nouns.oom import exhausted_memory, memory_aborted
from highwater.nouns.secrets import kept

PartEnding = Literal["refused", "ran out of memory", "crashed", "took too long", "done"]
"""Endings in order: the first of several decides how the whole job ended."""
_FORK = multiprocessing.get_context("fork")
_OTHERS_S = 2.0
"""Seconds that the other ranks have to report once one of them has failed."""


class PartEnded(NamedTuple):
    """End of one process's part of a job."""

    ending: PartEnding
    result: Any
    """Result of the job; else why there is none."""


Work = Callable[[Any, Conditions, int], Any]
"""Does a job, under a process's conditions and as its rank."""


class CaseProcesses:
    """Processes of one mode: one for each GPU, or one for all if threads share them."""

    def __init__(
        self,
        order: BenchOrder,
        name: str,
        mode: Mode,
        work: Work,
        *,
        folder: Path,
        machine: BenchMachine | None = None,
    ) -> None:
        """Nothing is started yet. ``name``: the implementation. ``folder``: for the ranks' store,
        and their stderr. ``machine``: its description, None before it is known.
        """
        self._order, self._name, self._work, self._machine = order, name, work, machine
        self._mode: Mode = mode
        is_alone = mode == "single" or (mode == "data parallel" and order.device == "cuda")
        self._count = 1 if is_alone else order.gpus
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = folder
        self._said: list[Path] = []
        """Files to which the processes write their stderr."""

    def __call__(self, job: object, *, limit_s: float) -> list[PartEnded]:
        """Run a job in every process, under the order's memory; returns how it ended, in the order
        of ranks. On GPUs the processes stay for the next job if all of them have done this one.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(OSError):  # a process that is gone is reported by _ends
                pipe.send(job)
        ends = self._ends(limit_s)
        if self._order.device == "cpu" or any(each.ending != "done" for each in ends):
            self.__exit__()
        return ends

    def __enter__(self) -> Self:
        """Return itself; whatever happens in the block, no process is left."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes with their process groups, which include a compiler's workers."""
        for process in self._processes:
            assert process.pid is not None, "it has started"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        self._said = [folder / f"stderr-{rank}" for rank in range(self._count)]
        for rank in range(self._count):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(target=self._serve, args=(theirs, rank, folder))
            process.start()
            assert process.pid is not None, "it has started"
            with suppress(OSError):  # the process does so itself too, or may be gone
                os.setpgid(process.pid, process.pid)
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _ends(self, limit_s: float) -> list[PartEnded]:
        """Wait for all, or only briefly after one has failed; those without a report are late."""
        ends: dict[int, PartEnded] = {}
        deadline_s = time.monotonic() + limit_s
        while waiting := [pipe for rank, pipe in enumerate(self._pipes) if rank not in ends]:
            told = wait(waiting, max(0.0, deadline_s - time.monotonic()))
            if not told:
                break
            for pipe in (each for each in waiting if each in told):
                rank = self._pipes.index(pipe)
                try:
                    ends[rank] = pipe.recv()
                except (EOFError, OSError):
                    ends[rank] = self._died(rank)
                if ends[rank].ending != "done":
                    deadline_s = min(deadline_s, time.monotonic() + _OTHERS_S)
        late = PartEnded("took too long", f"not done after {limit_s:.0f} s")
        return [ends.get(rank, late) for rank in range(self._count)]

    def _died(self, rank: int) -> PartEnded:
        """Classify the end of a process without a report, by its last words on stderr."""
        process = self._processes[rank]
        process.join()
        said = self._said[rank].read_text(encoding="utf-8", errors="replace")
        if memory_aborted(said, device=self._order.device) == "device_memory":
            return PartEnded("ran out of memory", "the process aborted for want of memory")
        last = " / ".join(said.strip().splitlines()[-2:])
        return PartEnded("crashed", kept(f"the process ended with {process.exitcode}: {last}"))

    def _serve(self, pipe: Connection, rank: int, folder: Path) -> None:
        """Run as one process: do jobs from the pipe until it is closed."""
        with suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(os.open(self._said[rank], os.O_WRONLY | os.O_CREAT), 2)
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        try:
            conditions = self._set_up(rank, folder)
            while True:
                pipe.send(PartEnded("done", self._work(pipe.recv(), conditions, rank)))
        except EOFError:
            pass
        except BaseException as error:  # noqa: BLE001 -- the process edge: it is told whole
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            pipe.send(_ended(error, self._order))
            with suppress(EOFError):  # if it exited now, other ranks would fail because of that
                pipe.recv()
        finally:
            os._exit(0)  # gloo's threads may still release a tensor

    def _set_up(self, rank: int, folder: Path) -> Conditions:
        """Set up device, group and memory limit of a process."""
        order, device, outside = self._order, torch.device("cpu"), 0
        torch.set_num_threads(order.threads)
        if order.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            outside = outside_allocator_bytes(device)
        if self._count > 1:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._count),
                STORE_VARIABLE: str(folder / "store"),
            }
            process_mesh.join(device)
            dist.barrier()
        if order.memory_bytes is not None:
            self._bound(device, outside, order.memory_bytes)
        kernel = None if self._machine is None else self._machine.kernel
        return Conditions.of(order, self._name, self._mode, device, kernel)

    def _bound(self, device: torch.device, outside: int, budget: int) -> None:
        if device.type == "cpu":
            most = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (budget, most))
            return
        # leave room for kernels loaded later: the process that described the machine had them
        known = 0 if self._machine is None else self._machine.outside_bytes
        budget -= max(0, known - outside)
        every = range(self._order.gpus) if self._mode == "data parallel" else (device.index,)
        for index in every:
            each = torch.device("cuda", index)
            nccl = outside_allocator_bytes(each) - outside if self._count > 1 else 0
            divide_budget(each, budget_bytes=budget, nccl_bytes=nccl)


def _ended(error: BaseException, order: BenchOrder) -> PartEnded:
    """Describe the end of a job that raised."""
    said = kept(f"{type(error).__name__}: {error}")
    if isinstance(error, PassTooLong):
        return PartEnded("took too long", f"a pass took longer than {order.timeout_s:g} s")
    if isinstance(error, HighwaterError):
        return PartEnded("refused", (error.problem, error.hint))
    if exhausted_memory(error, device=order.device) == "device_memory":
        return PartEnded("ran out of memory", said.splitlines()[0])
    return PartEnded("crashed", said)


def worst(ends: Sequence[PartEnded]) -> PartEnded:
    """Return how a job ended as a whole: its first ending in ``PartEnding``'s order."""
    order = get_args(PartEnding)
    return min(ends, key=lambda each: order.index(each.ending))
