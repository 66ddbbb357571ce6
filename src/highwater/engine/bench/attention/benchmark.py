"""Benchmark of attentions: which is right, how long a sequence each holds, and what it costs there.

``python -m highwater.engine.bench.attention.benchmark ORDER`` measures what the file asks for and
prints a line of JSON for each thing that is known (``nouns/attention_bench.BenchLine``);
``highwater bench attention`` writes the file and makes the report. Nothing is measured of an
attention before its output and gradients equal the textbook formula's in float64.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from highwater.engine.bench.attention.case_processes import CaseProcesses, PartEnded, worst
from highwater.engine.bench.attention.contenders import (
    CONTENDERS,
    DTYPES,
    AttentionContender,
    Conditions,
    fused_kernel,
)
from highwater.engine.bench.attention.correctness import (
    CHECKED_TOKENS,
    OFF_AT_THE_MOST,
    differences,
)
from highwater.engine.bench.attention.length_search import LengthSearch, NamedLengths
from highwater.engine.bench.attention.measurement import BenchCase, CaseReading, measure
from highwater.engine.bench.environment import environment
from highwater.engine.training.memory_log import MemoryWatch, outside_allocator_bytes
from highwater.nouns.attention_bench import (
    BATCH_TOKENS,
    BATCHES,
    IMPLEMENTATIONS,
    BenchCheck,
    BenchLine,
    BenchMachine,
    BenchOrder,
    BenchRefusal,
    BenchResult,
    BenchRow,
    BenchTrying,
    Direction,
    Mode,
    NotRun,
)
from highwater.nouns.codec import from_json, to_json
from highwater.units import MIB, format_bytes

START_TOKENS = {"cpu": 512, "cuda": 4096}
"""Length that doubling begins with, by device."""
_SET_UP_S = {"cpu": 60.0, "cuda": 240.0}
"""Seconds that a process has to begin, and to compile, besides its passes."""
_PASSES_WITHIN_LIMIT = 3
"""Passes that a case has time for: a first one, that of memory, and a timed one."""
_ROOM_BYTES = 64 * MIB
"""Memory that tensors need beside the runtime for anything to be measured."""
_RESULTS: Mapping[str, BenchResult] = {
    "out of memory": "ran out of memory",
    "late": "took too long",
    "failed": "crashed",
    "refused": "crashed",
}


def main() -> None:
    """Measure; a line for each thing on what was stdout, where nobody else writes."""
    path = Path(sys.argv[1])
    order = from_json(path.read_bytes(), BenchOrder)
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in benchmark(order, path.parent):
        lines.write(f"{to_json(line)}\n")
        lines.flush()


def benchmark(
    order: BenchOrder, folder: Path, contenders: Mapping[str, AttentionContender] = CONTENDERS
) -> Iterator[BenchLine]:
    """Measure what an order asks for, and tell each thing as it is known.

    ``folder``: whose the processes' files are, and who removes it, is the caller's.
    """
    work = partial(_work, contenders, order)
    with CaseProcesses(order, "single", work, folder=folder) as first:
        found = worst(first("machine", limit_s=_SET_UP_S[order.device], bounded=False))
    if found.ending != "done":
        problem, hint = (
            found.result
            if found.ending == "refused"
            else (str(found.result), "`highwater doctor` says what this machine lacks")
        )
        yield BenchLine(refusal=BenchRefusal(problem=problem, hint=hint))
        return
    machine: BenchMachine = found.result
    refusal = _refusal(order, machine)
    if refusal is not None:
        yield BenchLine(refusal=refusal)
        return
    yield BenchLine(machine=machine)
    for name, mode in _entries(order):
        with CaseProcesses(order, mode, work, folder=folder, machine=machine) as processes:
            entry = _BenchEntry(order, name, mode, contenders[name], machine, processes)
            yield from entry.lines()


def _entries(order: BenchOrder) -> Iterator[tuple[str, Mode]]:
    """Implementations and modes, in the order in which they are measured."""
    single = [name for name in order.implementations if IMPLEMENTATIONS[name].mode == "single"]
    for name in single:
        yield name, "single"
    for name in single if order.gpus > 1 else ():
        if name != "reference":
            yield name, "data parallel"
    for name in order.implementations:
        if name not in single:
            yield name, IMPLEMENTATIONS[name].mode
        elif IMPLEMENTATIONS[name].has_ring and order.gpus > 1:
            yield name, "ring"


class _BenchEntry:
    """An implementation in a mode."""

    def __init__(
        self,
        order: BenchOrder,
        name: str,
        mode: Mode,
        contender: AttentionContender,
        machine: BenchMachine,
        processes: CaseProcesses,
    ) -> None:
        self._order, self._name = order, name
        self._mode: Mode = mode
        self._contender, self._machine = contender, machine
        self._processes = processes
        self._gpus = 1 if mode == "single" else order.gpus
        self._sequences = self._gpus if mode == "data parallel" else 1
        """Sequences of a case: DataParallel has one for each GPU."""

    def lines(self) -> Iterator[BenchLine]:
        reason = self._obstacle()
        if reason is not None:
            found = NotRun(implementation=self._name, mode=self._mode, reason=reason)
            yield BenchLine(not_run=found)
            return
        if self._mode != "data parallel":  # who is right alone is right there
            check = self._check()
            yield BenchLine(check=check)
            if check.reason:
                for direction in self._order.directions:
                    yield BenchLine(row=self._row(direction, None, 1, "red", check.reason))
                return
        for direction in self._order.directions:
            yield from self._searched(direction)

    def _obstacle(self) -> str | None:
        if self._mode in ("ring", "ulysses") and self._order.gpus == 1:
            return "it takes two GPUs or more: `--gpus 2`"
        # what an obstacle needs to know of a device it is told here, where none is touched
        device = torch.device(self._order.device)
        conditions = Conditions.of(self._order, self._mode, device, self._machine.kernel)
        return self._contender.obstacle(conditions)

    def _check(self) -> BenchCheck:
        limit_s = 2 * _SET_UP_S[self._order.device]
        ends = self._processes("check " + self._name, limit_s=limit_s, bounded=False)
        self._processes.end()  # what is measured next is bounded
        ended, reason = worst(ends), ""
        found: dict[str, float | None] = {}
        tolerance = _tolerance(self._order)
        if ended.ending == "done":
            each = [end.result for end in ends]
            found = {name: _largest([rank[name] for rank in each]) for name in each[0]}
            off = [
                f"{name.replace('_', ' ')} "
                f"{'is no number' if value is None else f'{value:.1e} off'}"
                for name, value in found.items()
                if value is None or value > tolerance
            ]
            if off:
                reason = f"not equal to the reference, to {tolerance:.0e}: {', '.join(off)}"
        else:
            reason = f"its check did not end: {_said(ended)}"
        return BenchCheck(
            implementation=self._name,
            mode=self._mode,
            length_tokens=CHECKED_TOKENS,
            differences=found,
            tolerance=tolerance,
            reason=reason,
        )

    def _searched(self, direction: Direction) -> Iterator[BenchLine]:
        """A line for each length that is tried, and for batches at those that have them."""
        order = self._order
        own = self._contender.most_tokens.get(order.device, order.most_tokens)
        most = min(order.most_tokens, own)
        search = (
            NamedLengths([length for length in order.lengths if length <= most])
            if order.lengths
            else LengthSearch(start=START_TOKENS[order.device], most=most)
        )
        while (length := search.ask()) is not None:
            yield self._trying(direction, length, self._sequences)
            row = self._measured(direction, length, self._sequences)
            search.tell(length, fits=row.fits)
            yield BenchLine(row=row)
            if row.fits and self._mode == "single" and length in BATCH_TOKENS:
                for batch in BATCHES:
                    yield self._trying(direction, length, batch)
                    yield BenchLine(row=self._measured(direction, length, batch))

    def _trying(self, direction: Direction, length: int, batch: int) -> BenchLine:
        return BenchLine(
            trying=BenchTrying(
                implementation=self._name,
                mode=self._mode,
                direction=direction,
                length_tokens=length,
                batch=batch,
            )
        )

    def _measured(self, direction: Direction, length: int, batch: int) -> BenchRow:
        case = BenchCase(
            implementation=self._name,
            mode=self._mode,
            direction=direction,
            length_tokens=length,
            batch=batch,
        )
        passes_s = _PASSES_WITHIN_LIMIT * self._order.timeout_s
        ends = self._processes(case, limit_s=_SET_UP_S[self._order.device] + passes_s)
        ended = worst(ends)
        if ended.ending != "done":
            return self._row(direction, length, batch, _RESULTS[ended.ending], _said(ended))
        readings: list[CaseReading] = [end.result for end in ends]
        slowest = max(readings, key=lambda each: each.time_s)
        memory = {
            name: tuple(value for each in readings for value in getattr(each, name))
            for name in CaseReading.__struct_fields__
            if name.endswith("_bytes")
        }
        return self._row(
            *(direction, length, batch, "fits", ""),
            time_s=slowest.time_s,
            passes=slowest.passes,
            kept_share=slowest.kept_share,
            **memory,
        )

    def _row(
        self,
        direction: Direction,
        length: int | None,
        batch: int,
        result: BenchResult,
        reason: str,
        **figures: Any,
    ) -> BenchRow:
        return BenchRow(
            implementation=self._name,
            mode=self._mode,
            direction=direction,
            length_tokens=length,
            batch=batch,
            gpus=self._gpus,
            result=result,
            reason=reason,
            **figures,
        )


def _largest(values: Sequence[float]) -> float | None:
    """The largest; None where one is no number."""
    return max(values) if all(map(math.isfinite, values)) else None


def _said(ended: PartEnded) -> str:
    """Why a job has no result, on one line."""
    if ended.ending == "refused":
        return str(ended.result[0])
    return " ".join(str(ended.result).split())


def _work(
    contenders: Mapping[str, AttentionContender],
    order: BenchOrder,
    job: str | BenchCase,
    conditions: Conditions,
    rank: int,
) -> Any:
    """Do a job, in its own process."""
    if job == "machine":
        return _machine(conditions)
    if isinstance(job, str):
        return differences(contenders[job.removeprefix("check ")], conditions, rank)
    return measure(
        job,
        contenders[job.implementation],
        conditions,
        same_qkv=order.same_qkv,
        timeout_s=order.timeout_s,
    )


def _machine(conditions: Conditions) -> BenchMachine:
    found = environment()
    versions = {
        name: str(found[name])
        for name in ("highwater", "python", "torch", "transformers", "cuda", "cudnn", "nccl")
        if found.get(name) is not None
    }
    kernel = fused_kernel(conditions)
    if conditions.device.type == "cuda":
        return BenchMachine(
            device_name=torch.cuda.get_device_name(conditions.device),
            memory_total_bytes=torch.cuda.mem_get_info(conditions.device)[1],
            outside_bytes=outside_allocator_bytes(conditions.device),
            versions=versions,
            kernel=kernel,
        )
    return BenchMachine(
        device_name=f"CPU, {len(os.sched_getaffinity(0))} cores",
        memory_total_bytes=psutil.virtual_memory().total,
        outside_bytes=MemoryWatch(conditions.device).peaks().peak_data_segment_bytes or 0,
        versions=versions,
        kernel=kernel,
    )


def _refusal(order: BenchOrder, machine: BenchMachine) -> BenchRefusal | None:
    """Why an order's memory is of no use here; None where it is."""
    if order.memory_bytes is None:
        return None
    if order.device == "cuda" and order.memory_bytes > machine.memory_total_bytes:
        has = machine.memory_total_bytes
        return BenchRefusal(
            problem=f"{format_bytes(order.memory_bytes)} on a GPU of {format_bytes(has)}",
            hint=f"use `--memory {has >> 20}MiB` or less",
        )
    least = machine.outside_bytes + _ROOM_BYTES
    if order.memory_bytes >= least:
        return None
    what = "PyTorch itself" if order.device == "cpu" else "the GPU's context"
    return BenchRefusal(
        problem=f"{format_bytes(order.memory_bytes)} leave nothing for tensors: {what} takes "
        f"{format_bytes(machine.outside_bytes)}",
        hint=f"use `--memory {-(-2 * least // MIB)}MiB`",
    )


def _tolerance(order: BenchOrder) -> float:
    return OFF_AT_THE_MOST[DTYPES[order.dtype]]


if __name__ == "__main__":
    main()
