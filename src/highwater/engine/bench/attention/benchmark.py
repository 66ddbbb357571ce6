"""Process of ``highwater bench attention`` that checks an attention and measures its cases.

``python -m highwater.engine.bench.attention.benchmark SHARE FOLDER`` is one rank of a group. It
measures the cases of its share (``nouns/attention_bench.BenchShare``) one by one, and writes each
result as a line of JSON to its own file (``BenchPart``), until one fails. An attention is measured
only after its output and gradients equal the textbook formula's in float64; then its memory is
bounded.
"""

import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from highwater.engine.bench.attention.contenders import CONTENDERS, Conditions, fused_kernel
from highwater.engine.bench.attention.measurement import data_segment, differences, measure
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.memory_profiler import divide_budget, outside_allocator_bytes
from highwater.errors import HighwaterError
from highwater.nouns.attention_bench import BenchMachine, BenchOrder, BenchPart, BenchShare, NotRun
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.oom import exhausted_memory
from highwater.nouns.secrets import kept


def main() -> None:
    """Measure the cases of a share as one of its ranks, and write each result at once."""
    share, folder = from_json(Path(sys.argv[1]).read_bytes(), BenchShare), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    with (folder / f"parts-{rank}").open("ab", buffering=0) as told:
        try:
            for part in _parts(share, rank):
                told.write(f"{to_json(part)}\n".encode())
        except BaseException as error:  # noqa: BLE001 -- the process edge: all of it is written
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            told.write(f"{to_json(_failed(error, share.order))}\n".encode())
            signal.pause()  # an exit now would make other ranks fail
    os._exit(0)  # gloo's threads may still release a tensor


def _parts(share: BenchShare, rank: int) -> Iterator[BenchPart]:
    device, outside = torch.device("cpu"), 0
    if share.order.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        outside = outside_allocator_bytes(device)
    if share.processes > 1:
        process_mesh.join(device)
        dist.barrier()
    if share.machine is None:
        yield _described(share, device)
        return
    conditions = Conditions.of(share, device, share.machine.kernel)
    build = CONTENDERS[share.implementation].build
    on_gpus = share.processes > 1 and device.type == "cuda"
    nccl_bytes = outside_allocator_bytes(device) - outside if on_gpus else 0
    if not share.is_checked:
        yield BenchPart(differences={**differences(build, conditions, rank)})
    if share.order.memory_bytes is not None:
        _bound(share.order.memory_bytes, share.machine, conditions, nccl_bytes)
    while (case := share.next_case()) is not None:
        row = measure(case, build, conditions)
        yield BenchPart(row=row)  # this process is ended if it took too long
        share = share.replace(rows=(*share.rows, row))


def _bound(budget: int, machine: BenchMachine, conditions: Conditions, nccl_bytes: int) -> None:
    if conditions.device.type == "cpu":
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (budget, most))
        return
    torch.cuda.empty_cache()
    # leave room for kernels loaded later: the process that described the machine had them
    own = outside_allocator_bytes(conditions.device) - nccl_bytes
    budget -= max(0, machine.outside_bytes - own)
    for each in conditions.devices:
        divide_budget(each, budget_bytes=budget, nccl_bytes=nccl_bytes)


def _failed(error: BaseException, order: BenchOrder) -> BenchPart:
    said = kept(f"{type(error).__name__}: {error}")
    if isinstance(error, HighwaterError):
        return BenchPart(result="crashed", reason=error.problem, hint=error.hint)
    if exhausted_memory(error, device=order.device) == "device_memory":
        return BenchPart(result="ran out of memory", reason=said.splitlines()[0])
    return BenchPart(result="crashed", reason=said)


def _described(share: BenchShare, device: torch.device) -> BenchPart:
    """Describe the machine, and the cases of an order that cannot run on it."""
    # first, because its code stays in memory and counts as outside the allocator
    kernel = fused_kernel(Conditions.of(share, device, None))
    if device.type == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
        outside = outside_allocator_bytes(device)
    else:
        name = f"CPU, {len(os.sched_getaffinity(0))} cores"
        total = psutil.virtual_memory().total
        data_segment().read()
        outside = data_segment().peak_bytes
    not_run: list[NotRun] = []
    for implementation, mode in share.order.entries():
        reason: str | None = "it takes two GPUs or more: `--gpus 2`"
        if mode not in ("ring", "ulysses") or share.order.gpus > 1:
            one = share.replace(implementation=implementation, mode=mode)
            reason = CONTENDERS[implementation].obstacle(Conditions.of(one, device, kernel))
        if reason is not None:
            not_run.append(NotRun(implementation=implementation, mode=mode, reason=reason))
    machine = BenchMachine(
        device_name=name,
        memory_total_bytes=total,
        outside_bytes=outside,
        versions={"python": platform.python_version()} | process_mesh.versions(),
        kernel=kernel,
    )
    return BenchPart(machine=machine, not_run=tuple(not_run))


if __name__ == "__main__":
    main()
