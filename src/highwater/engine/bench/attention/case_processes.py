"""The processes that measure: forked for a case, ended when they fail or when their time is up.

This process has imported PyTorch and never touches a device, so that whoever is forked of it begins
like a fresh process, in milliseconds. On the CPU each case has processes of its own. On GPUs, where
the allocator can forget its peaks, they live as long as cases of one attention fit, for its
compilation's sake.
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
"""Ordered: what tells most of a whole job's end comes first."""
_FORK = multiprocessing.get_context("fork")
_OTHERS_S = 2.0
"""Seconds that the other ranks have to report once one of them has failed."""


class PartEnded(NamedTuple):
    """How one process's part of a job ended."""

    ending: PartEnding
    result: Any
    """What the job gives; else why it has not."""


Work = Callable[[Any, Conditions, int], Any]
"""What a process does with a job, under its conditions and as its rank."""


class CaseProcesses:
    """The processes of one mode: one for each GPU, or one for all where threads share them."""

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
        """Start none yet; ``name``: the implementation; ``folder``: where they meet, and what they
        say is kept; ``machine``: what is known of it, None before it is.
        """
        self._order, self._name, self._work, self._machine = order, name, work, machine
        self._mode: Mode = mode
        is_alone = mode == "single" or (mode == "data parallel" and order.device == "cuda")
        self._count = 1 if is_alone else order.gpus
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = folder
        self._said: list[Path] = []
        """What each process has written to stderr."""

    def __call__(self, job: object, *, limit_s: float) -> list[PartEnded]:
        """Run a job in every process, under the order's memory; how it ended in each, in the order
        of ranks. On GPUs the processes stay for the next job where all of them are done.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(OSError):  # who is gone is told by its end
                pipe.send(job)
        ends = self._ends(limit_s)
        if self._order.device == "cpu" or any(each.ending != "done" for each in ends):
            self.__exit__()
        return ends

    def __enter__(self) -> Self:
        """Itself: whatever happens within, no process is left."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of them, and what they have started: a compiler's workers."""
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
            with suppress(OSError):  # it does so itself, and may have, or be gone
                os.setpgid(process.pid, process.pid)
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _ends(self, limit_s: float) -> list[PartEnded]:
        """Wait for all, or some time after one of them failed; who has not told then is late."""
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
        """What the last words of a process tell that ended without a report."""
        process = self._processes[rank]
        process.join()
        said = self._said[rank].read_text(encoding="utf-8", errors="replace")
        if memory_aborted(said, device=self._order.device) == "device_memory":
            return PartEnded("ran out of memory", "the process aborted for want of memory")
        last = " / ".join(said.strip().splitlines()[-2:])
        return PartEnded("crashed", kept(f"the process ended with {process.exitcode}: {last}"))

    def _serve(self, pipe: Connection, rank: int, folder: Path) -> None:
        """Be one process: do what comes through the pipe until it is closed."""
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
            with suppress(EOFError):  # who went now would look like the fault to the other ranks
                pipe.recv()
        finally:
            os._exit(0)  # gloo's threads may let go of a tensor yet

    def _set_up(self, rank: int, folder: Path) -> Conditions:
        """Device, group and memory limit of a process."""
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
        # kernels are loaded later, as the process that described the machine has them
        known = 0 if self._machine is None else self._machine.outside_bytes
        budget -= max(0, known - outside)
        every = range(self._order.gpus) if self._mode == "data parallel" else (device.index,)
        for index in every:
            each = torch.device("cuda", index)
            nccl = outside_allocator_bytes(each) - outside if self._count > 1 else 0
            divide_budget(each, budget_bytes=budget, nccl_bytes=nccl)


def _ended(error: BaseException, order: BenchOrder) -> PartEnded:
    """How a job ended that raised."""
    said = kept(f"{type(error).__name__}: {error}")
    if isinstance(error, PassTooLong):
        return PartEnded("took too long", f"a pass took longer than {order.timeout_s:g} s")
    if isinstance(error, HighwaterError):
        return PartEnded("refused", (error.problem, error.hint))
    if exhausted_memory(error, device=order.device) == "device_memory":
        return PartEnded("ran out of memory", said.splitlines()[0])
    return PartEnded("crashed", said)


def worst(ends: Sequence[PartEnded]) -> PartEnded:
    """How a job ended as a whole: what went wrong first of all, else the first rank's."""
    order = get_args(PartEnding)
    return min(ends, key=lambda each: order.index(each.ending))
