"""Measurements in jobs: constants of GPUs, and benchmarks of attentions, one line for each result.

An attention benchmark starts a group of processes, one rank for each GPU, for each attention and
mode. A group runs case after case while all fit, so that an attention is compiled only once. A case
that fails ends its group, and the next case starts new processes.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from highwater.errors import MachineError
from highwater.nouns.attention_bench import (
    CHECKED_TOKENS,
    OFF_AT_THE_MOST,
    BenchCheck,
    BenchLine,
    BenchOrder,
    BenchPart,
    BenchResult,
    BenchRow,
    BenchShare,
)
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.hardware import Constants
from highwater.nouns.oom import memory_aborted
from highwater.nouns.secrets import kept
from highwater.nouns.trial import Device
from highwater.trials.job import Job, end_reaper, start
from highwater.trials.probe import (
    probe,
    refuse_busy_gpus,
    refuse_package_obstacles,
    torch_without_gpu,
)
from highwater.trials.ranks import RankExit, RankShare, read_left
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import ON_THE_CPU, clean_environment, private_folder
from highwater.units import MIB, format_bytes

_MEASURES = "highwater.engine.bench.attention.benchmark"
_HINT = "`highwater doctor` says what this machine lacks"
_SET_UP_S = {"cpu": 60.0, "cuda": 240.0}
"""Seconds that a process may take to start and compile, in addition to its passes."""
_PASSES_WITHIN_LIMIT = 3
"""Passes that a case has time for: a warm-up, one for memory, and a timed one."""
_WORST_FIRST: tuple[BenchResult, ...] = ("ran out of memory", "crashed", "took too long", "fits")
"""Results of a case's processes: the worst of them decides for all."""
_OTHERS_S = 2.0
"""Seconds that the other ranks have to report a case after one of them has failed."""
_ASKED_S = 0.02
_ROOM_BYTES = 64 * MIB
"""Least memory for tensors, besides the runtime's, for anything to be measured."""


def read_constants(gpus: int) -> Constants:
    """Measure constants of ``gpus`` GPUs in half a minute; MachineError if nothing is measured."""
    machine = probe()
    refuse_package_obstacles(machine)
    if (error := torch_without_gpu(machine)) is not None:
        raise error
    refuse_busy_gpus(machine, count=gpus)
    job = Job(
        module="highwater.engine.training.machine_readings",
        report=Constants,
        ranks=gpus,
        environment=clean_environment("expandable"),
        timeout_s=300.0,
        failure=f"nothing was read on {gpus} GPUs",
        late=f"reading {gpus} GPUs",
        hint="`highwater try tiny --length 1k` says whether trials run",
    )
    with private_folder() as folder:
        return job.run(folder)


@contextmanager
def bench_lines(order: BenchOrder, *, measures: str = _MEASURES) -> Generator[Iterator[BenchLine]]:
    """Context manager: yield each result of a benchmark once it is known; its processes are ended
    after the block. ``measures``: the measuring module. Raises MachineError if it cannot measure.
    """
    refuse_package_obstacles(probe())
    with private_folder() as folder, closing(_lines(order, folder, measures)) as lines:
        yield lines


def _lines(order: BenchOrder, folder: Path, measures: str) -> Generator[BenchLine]:
    begin = partial(_BenchRanks, folder=folder, measures=measures)
    with closing(begin(BenchShare(order=order))) as group:
        (told,) = group.parts(_SET_UP_S[order.device])
    if told.machine is None:
        raise MachineError(told.reason, hint=told.hint or _HINT)
    asked, takes = order.memory_bytes, told.machine.outside_bytes
    least = takes + _ROOM_BYTES
    if asked is not None and asked < least:
        what = "PyTorch itself" if order.device == "cpu" else "the GPU's context"
        raise MachineError(
            f"{format_bytes(asked)} leave nothing for tensors: {what} takes {format_bytes(takes)}",
            hint=f"use `--memory {-(-2 * least // MIB)}MiB`",
        )
    yield BenchLine(machine=told.machine)
    not_run = {(each.implementation, each.mode): each for each in told.not_run}
    for name, mode in order.entries():
        if (name, mode) in not_run:
            yield BenchLine(not_run=not_run[name, mode])
            continue
        share = BenchShare(
            order=order,
            implementation=name,
            mode=mode,
            machine=told.machine,
            is_checked=mode == "data parallel",  # the check on one GPU is enough
        )
        yield from _share_lines(share, begin)


def _share_lines(
    share: BenchShare, begin: Callable[[BenchShare], "_BenchRanks"]
) -> Iterator[BenchLine]:
    """Yield the check and the cases of one implementation and mode; after a failure, start anew."""
    order = share.order
    set_up_s = _SET_UP_S[order.device]
    while not share.is_checked or share.next_case() is not None:
        with closing(begin(share)) as group:
            if not share.is_checked:
                check = _check(share, group.parts(2 * set_up_s))
                yield BenchLine(check=check)
                if check.reason:
                    for case in map(share.case, order.directions):
                        yield BenchLine(row=case.replace(result="red", reason=check.reason))
                    return
                share = share.replace(is_checked=True)
            while (case := share.next_case()) is not None:
                parts = group.parts(set_up_s + _PASSES_WITHIN_LIMIT * order.timeout_s)
                row = _measured(case, parts)
                yield BenchLine(row=row)
                share = share.replace(rows=(*share.rows, row))
                if not row.fits:
                    break


def _check(share: BenchShare, parts: Sequence[BenchPart]) -> BenchCheck:
    """Compare the differences that the ranks found with the tolerance of the dtype."""
    ended, tolerance = _worst(parts), OFF_AT_THE_MOST[share.order.dtype]
    found = {
        what: max(
            (part.differences[what] for part in parts),
            key=lambda value: math.inf if value is None else value,
        )
        for what in ended.differences
    }
    off = [
        f"{what.replace('_', ' ')} {'is no number' if value is None else f'{value:.1e} off'}"
        for what, value in found.items()
        if value is None or value > tolerance
    ]
    reason = f"not equal to the reference, to {tolerance:.0e}: {', '.join(off)}" if off else ""
    if ended.result != "fits":
        reason = f"its check did not end: {ended.reason}"
    return BenchCheck(
        implementation=share.implementation,
        mode=share.mode,
        length_tokens=CHECKED_TOKENS,
        differences=found,
        tolerance=tolerance,
        reason=reason,
    )


def _measured(case: BenchRow, parts: Sequence[BenchPart]) -> BenchRow:
    """Fill in the results of a case: the time of the slowest GPU, and the memory of each."""
    ended = _worst(parts)
    if ended.result != "fits":
        return case.replace(result=ended.result, reason=ended.reason)
    each = [part.row for part in parts if part.row is not None]
    names = [name for name in BenchRow.__struct_fields__ if name.endswith("_bytes")]
    sizes = {name: tuple(size for row in each for size in getattr(row, name)) for name in names}
    return max(each, key=lambda row: row.time_s or 0.0).replace(**sizes)


def _worst(parts: Sequence[BenchPart]) -> BenchPart:
    """The part that decides how a case ended."""
    return min(parts, key=lambda part: _WORST_FIRST.index(part.result))


class _BenchRanks:
    """The processes of one share of a benchmark, until they are closed."""

    def __init__(self, share: BenchShare, *, folder: Path, measures: str) -> None:
        self._device: Device = share.order.device
        self._count = share.processes
        self._folder = Path(mkdtemp(dir=folder))
        self._told = 0
        """Number of parts that have been read from every process."""
        order = self._folder / "share.json"
        order.write_text(to_json(share), encoding="utf-8")
        environment = clean_environment("expandable")
        environment["OMP_NUM_THREADS"] = str(share.order.threads)
        if self._device == "cpu":
            environment |= ON_THE_CPU
        command = under_reaper(
            module(measures, str(order), str(self._folder)),
            inherit=[folder],
            ranks=RankShare(count=self._count, folder=str(self._folder)),
        )
        with (self._folder / "log").open("wb") as log:
            self._process = start(command, environment, log)

    def close(self) -> None:
        """End all processes."""
        end_reaper(self._process)

    def parts(self, limit_s: float) -> list[BenchPart]:
        """Wait for the next part of each process, by rank; a late one "took too long"."""
        parts: dict[int, BenchPart] = {}
        deadline_s = time.monotonic() + limit_s
        while len(parts) < self._count and time.monotonic() < deadline_s:
            is_over = self._process.poll() is not None
            new = {rank: self._part(rank) for rank in range(self._count) if rank not in parts}
            parts |= {rank: part for rank, part in new.items() if part is not None}
            if is_over:
                for exit_ in read_left(self._folder).exits:
                    parts.setdefault(exit_.rank, self._ending_of(exit_))
                break
            if any(part is not None and part.result != "fits" for part in new.values()):
                deadline_s = min(deadline_s, time.monotonic() + _OTHERS_S)
            time.sleep(_ASKED_S)
        self._told += 1
        late = BenchPart(result="took too long", reason=f"not done after {limit_s:.0f} s")
        return [parts.get(rank, late) for rank in range(self._count)]

    def _part(self, rank: int) -> BenchPart | None:
        """The next part of a process; None if it has not reported one yet."""
        try:
            lines = (self._folder / f"parts-{rank}").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return from_json(lines[self._told], BenchPart) if len(lines) > self._told else None

    def _ending_of(self, ended: RankExit) -> BenchPart:
        """Classify the end of a process that left no report, by the end of its output."""
        if memory_aborted(ended.output, device=self._device) == "device_memory":
            aborted = "the process aborted for want of memory"
            return BenchPart(result="ran out of memory", reason=aborted)
        last = " / ".join(ended.output.strip().splitlines()[-2:])
        reason = kept(f"the process ended with {ended.status}: {last}")
        return BenchPart(result="crashed", reason=reason)
