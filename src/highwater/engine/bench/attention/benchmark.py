"""Benchmark of attentions: which are correct, how long a sequence each holds, and its cost there.

``python -m highwater.engine.bench.attention.benchmark ORDER`` measures what the file asks for and
prints one line of JSON for each result (``nouns/attention_bench.BenchLine``); ``highwater bench
attention`` writes the file and makes the report. An attention is measured only after its output
and gradients equal the textbook formula's in float64.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from msgspec.structs import replace

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
from highwater.engine.bench.attention.measurement import environment, measure
from highwater.engine.training.statistics_log import MemoryWatch, outside_allocator_bytes
from highwater.nouns.attention_bench import (
    BATCH_TOKENS,
    BATCHES,
    IMPLEMENTATIONS,
    BenchCheck,
    BenchLine,
    BenchMachine,
    BenchOrder,
    BenchRow,
    Mode,
    NotRun,
)
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.trial import Refused
from highwater.units import MIB, format_bytes

_REFERENCE_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Longest length measured with the textbook formula, by device."""
_SET_UP_S = {"cpu": 60.0, "cuda": 240.0}
"""Seconds that a process may take to start and compile, besides its passes."""
_PASSES_WITHIN_LIMIT = 3
"""Passes that a case has time for: a first one, one for memory, and a timed one."""
_ROOM_BYTES = 64 * MIB
"""Memory that tensors need beside the runtime for anything to be measured."""
_NO_MACHINE = "`highwater doctor` says what this machine lacks"


def main() -> None:
    """Measure, and write a line for each result to the original stdout, which nothing else uses."""
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
    """Measure what an order asks for, and yield each result as it is known.

    ``folder``: for the processes' files; the caller makes and removes it.
    """
    start = partial(CaseProcesses, work=partial(_work, contenders), folder=folder)
    unbounded = replace(order, memory_bytes=None)
    with start(unbounded, "dense", "single") as first:
        found = worst(first("machine", limit_s=_SET_UP_S[order.device]))
    if found.ending == "done":
        told = _refusal(order, found.result)
    else:
        told = found.result if found.ending == "refused" else (str(found.result), _NO_MACHINE)
    if told is not None:
        yield BenchLine(refusal=Refused(problem=told[0], hint=told[1]))
        return
    machine: BenchMachine = found.result
    yield BenchLine(machine=machine)
    device = torch.device(order.device)  # only named, not used here
    for name, mode in _entries(order):
        reason: str | None = "it takes two GPUs or more: `--gpus 2`"
        if mode not in ("ring", "ulysses") or order.gpus > 1:
            conditions = Conditions.of(order, name, mode, device, machine.kernel)
            reason = contenders[name].obstacle(conditions)
        if reason is not None:
            yield BenchLine(not_run=NotRun(implementation=name, mode=mode, reason=reason))
            continue
        reason = ""
        if mode != "data parallel":  # there the check on one GPU is enough
            with start(unbounded, name, mode, machine=machine) as processes:
                check = _check(order, name, mode, processes)
            yield BenchLine(check=check)
            reason = check.reason
        with start(order, name, mode, machine=machine) as processes:
            for case in _cases(order, name, mode):
                if reason:
                    yield BenchLine(row=replace(case, result="red", reason=reason))
                else:
                    yield from (BenchLine(row=row) for row in _searched(order, case, processes))


def _entries(order: BenchOrder) -> Iterator[tuple[str, Mode]]:
    """Yield implementations and modes in the order in which they are measured."""
    modes = {name: IMPLEMENTATIONS[name].modes for name in order.implementations}
    single = [name for name in modes if "single" in modes[name]]
    for name in single:
        yield name, "single"
    for name in single if order.gpus > 1 else ():
        if name != "reference":
            yield name, "data parallel"
    for name, of in modes.items():
        for mode in of:
            if mode != "single" and (order.gpus > 1 or name not in single):
                yield name, mode


def _check(order: BenchOrder, name: str, mode: Mode, processes: CaseProcesses) -> BenchCheck:
    ends = processes("check", limit_s=2 * _SET_UP_S[order.device])
    ended, reason = worst(ends), ""
    found: dict[str, float | None] = {}
    tolerance = OFF_AT_THE_MOST[DTYPES[order.dtype]]
    if ended.ending == "done":
        for what in ended.result:
            values = [end.result[what] for end in ends]
            found[what] = max(values) if all(map(math.isfinite, values)) else None
        off = [
            f"{what.replace('_', ' ')} {'is no number' if value is None else f'{value:.1e} off'}"
            for what, value in found.items()
            if value is None or value > tolerance
        ]
        if off:
            reason = f"not equal to the reference, to {tolerance:.0e}: {', '.join(off)}"
    else:
        reason = f"its check did not end: {_said(ended)}"
    return BenchCheck(
        implementation=name,
        mode=mode,
        length_tokens=CHECKED_TOKENS,
        differences=found,
        tolerance=tolerance,
        reason=reason,
    )


def _cases(order: BenchOrder, name: str, mode: Mode) -> Iterator[BenchRow]:
    """Yield a case without length for each direction; DataParallel has a sequence for each GPU."""
    gpus = 1 if mode == "single" else order.gpus
    for direction in order.directions:
        yield BenchRow(
            implementation=name,
            mode=mode,
            direction=direction,
            length_tokens=None,
            batch=gpus if mode == "data parallel" else 1,
            gpus=gpus,
            result="fits",
        )


def _searched(order: BenchOrder, case: BenchRow, processes: CaseProcesses) -> Iterator[BenchRow]:
    """Yield a row for each length that is tried, and for batches at the lengths that have any."""
    most = order.most_tokens
    if case.implementation == "reference":
        most = min(most, _REFERENCE_TOKENS[order.device])
    limit_s = _SET_UP_S[order.device] + _PASSES_WITHIN_LIMIT * order.timeout_s
    tried: dict[int, bool] = {}
    while (length := order.next_length(tried, most=most)) is not None:
        row = _measured(replace(case, length_tokens=length), processes, limit_s)
        tried[length] = row.fits
        yield row
        if row.fits and row.mode == "single" and length in BATCH_TOKENS:
            for batch in BATCHES:
                batched = replace(case, length_tokens=length, batch=batch)
                yield _measured(batched, processes, limit_s)


def _measured(case: BenchRow, processes: CaseProcesses, limit_s: float) -> BenchRow:
    """Run a case and fill in its results: time of the slowest GPU, memory of each."""
    ends = processes(case, limit_s=limit_s)
    ended = worst(ends)
    if ended.ending != "done":
        result = "crashed" if ended.ending == "refused" else ended.ending
        return replace(case, result=result, reason=_said(ended))
    each: list[BenchRow] = [end.result for end in ends]
    names = [name for name in BenchRow.__struct_fields__ if name.endswith("_bytes")]
    sizes = {name: tuple(size for row in each for size in getattr(row, name)) for name in names}
    return replace(max(each, key=lambda row: row.time_s or 0.0), **sizes)


def _said(ended: PartEnded) -> str:
    """Say on one line why a job has no result."""
    return ended.result[0] if ended.ending == "refused" else " ".join(str(ended.result).split())


def _work(
    contenders: Mapping[str, AttentionContender],
    job: str | BenchRow,
    conditions: Conditions,
    rank: int,
) -> Any:
    """Do a job, in its own process."""
    if job == "machine":
        return _machine(conditions)
    build = contenders[conditions.name].build
    if isinstance(job, str):
        return differences(build, conditions, rank)
    return measure(job, build, conditions)


def _machine(conditions: Conditions) -> BenchMachine:
    found, device = environment(), conditions.device
    names = ("highwater", "python", "torch", "transformers", "cuda", "cudnn", "nccl")
    kernel = fused_kernel(conditions)  # first, because its code stays in memory
    if device.type == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
        outside = outside_allocator_bytes(device)
    else:
        name = f"CPU, {len(os.sched_getaffinity(0))} cores"
        total = psutil.virtual_memory().total
        outside = MemoryWatch(device).peaks().peak_data_segment_bytes or 0
    return BenchMachine(
        device_name=name,
        memory_total_bytes=total,
        outside_bytes=outside,
        versions={name: str(found[name]) for name in names if found.get(name) is not None},
        kernel=kernel,
    )


def _refusal(order: BenchOrder, machine: BenchMachine) -> tuple[str, str] | None:
    """Say why an order's memory cannot be used here, and what to do; None if it can."""
    asked, has, takes = order.memory_bytes, machine.memory_total_bytes, machine.outside_bytes
    if asked is None:
        return None
    if order.device == "cuda" and asked > has:
        problem = f"{format_bytes(asked)} on a GPU of {format_bytes(has)}"
        return problem, f"use `--memory {has >> 20}MiB` or less"
    least = takes + _ROOM_BYTES
    if asked >= least:
        return None
    what = "PyTorch itself" if order.device == "cpu" else "the GPU's context"
    problem = f"{format_bytes(asked)} leave nothing for tensors: {what} takes {format_bytes(takes)}"
    return problem, f"use `--memory {-(-2 * least // MIB)}MiB`"


if __name__ == "__main__":
    main()
