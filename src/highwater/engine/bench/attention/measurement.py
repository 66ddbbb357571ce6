"""One case in its own process: bytes, peaks and time of an attention at one length.

On the CPU every allocation of PyTorch's is recorded in one pass, and time is taken in others; on a
GPU the allocator keeps its peaks itself.

Shapes:  B sequences of this rank  H query heads  K key/value heads  S tokens  s tokens of this rank
         D head size
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile

from highwater.engine.bench.attention.contenders import AttentionContender, Compute, Conditions
from highwater.engine.training.memory_log import MemoryWatch
from highwater.nouns.attention_bench import Direction, Mode
from highwater.nouns.codec import Record

_MOST_PASSES, _ENOUGH_S = 5, 0.2
"""Timed passes: so many at the most, and no more once they took so long together."""
_MEMORY_EVENT = "[memory]"
T = TypeVar("T")


class BenchCase(Record, frozen=True, kw_only=True):
    """What a process is asked to measure."""

    implementation: str
    mode: Mode
    direction: Direction
    length_tokens: int
    batch: int = 1


class CaseReading(Record, frozen=True, kw_only=True):
    """What one process measured, a figure for each of its GPUs."""

    time_s: float
    passes: int
    kept_share: float
    after_qkv_bytes: tuple[int, ...]
    kept_for_backward_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]


class PassTooLong(Exception):  # noqa: N818 -- it is an answer
    """A pass took longer than it may."""


class _Inputs(NamedTuple):
    query_BHsD: Tensor
    key_BKsD: Tensor
    value_BKsD: Tensor


class _MeasuredPass(NamedTuple):
    """A case, made."""

    compute: Compute
    inputs: _Inputs
    direction: Direction

    def forward(self) -> tuple[Tensor, float]:
        with torch.set_grad_enabled(self.direction == "forward+backward"):
            return self.compute(*self.inputs)

    def backward(self, output: Tensor) -> None:
        if self.direction == "forward+backward":
            # one tensor may be all three, and has one gradient then
            leaves = list({id(each): each for each in self.inputs}.values())
            torch.autograd.grad(output, leaves, torch.ones_like(output))

    def once(self) -> float:
        output, share = self.forward()
        self.backward(output)
        return share


def measure(
    case: BenchCase,
    contender: AttentionContender,
    conditions: Conditions,
    *,
    same_qkv: bool,
    timeout_s: float,
) -> CaseReading:
    """Run a case and read what it took. Raises PassTooLong, and what PyTorch raises."""
    compute = contender.build(conditions, case.length_tokens)
    devices = [conditions.device]
    if case.mode == "data parallel" and conditions.device.type == "cuda":
        devices = [torch.device("cuda", index) for index in range(conditions.ranks)]
        compute = _in_data_parallel(compute, len(devices))

    def made() -> _MeasuredPass:
        inputs = _inputs(case, conditions, len(devices), same_qkv=same_qkv)
        return _MeasuredPass(compute, inputs, case.direction)

    if conditions.device.type == "cpu":
        run, share, memory = _peaks_on_cpu(made, conditions.device)
        times_s: list[float] = []
    else:
        run, share, memory, took_s = _peaks_on_gpus(made, conditions, devices)
        if took_s > timeout_s:
            raise PassTooLong
        times_s = [took_s] if took_s > _ENOUGH_S else []
    while not times_s or (len(times_s) < _MOST_PASSES and sum(times_s) < _ENOUGH_S):
        times_s.append(_time_s(run.once, conditions, devices))
    time_s = statistics.median(times_s)
    if time_s > timeout_s:
        raise PassTooLong
    return CaseReading(time_s=time_s, passes=len(times_s), kept_share=share, **memory)


def _inputs(case: BenchCase, conditions: Conditions, devices: int, *, same_qkv: bool) -> _Inputs:
    """Queries, keys and values of this process."""
    tokens = conditions.layout(case.length_tokens).tokens_per_rank
    is_split = case.mode == "data parallel" and devices == 1
    batch = case.batch // conditions.ranks if is_split else case.batch
    heads = (conditions.heads, conditions.kv_heads, conditions.kv_heads)
    made = [
        torch.randn(
            (batch, count, tokens, conditions.head_dim),
            device=conditions.device,
            dtype=conditions.dtype,
            requires_grad=case.direction == "forward+backward",
        )
        for count in heads[: 1 if same_qkv else 3]
    ]
    return _Inputs(*(made * 3 if same_qkv else made))


def _peaks_on_cpu(
    made: Callable[[], _MeasuredPass], device: torch.device
) -> tuple[_MeasuredPass, float, dict[str, Any]]:
    """Bytes of PyTorch's allocator, from every allocation; and the data segment's peak."""
    watch = MemoryWatch(device)
    before = watch.peaks().peak_data_segment_bytes or 0
    run, _, after_qkv = _recorded(made)
    (output, share), forward_peak, kept = _recorded(run.forward)
    _, backward_peak, _ = _recorded(lambda: run.backward(output))
    peak = after_qkv + max(forward_peak, kept + backward_peak)
    # between two readings of the kernel's figure a short pass has come and gone
    segment = max(watch.peaks().peak_data_segment_bytes or 0, before + peak)
    return run, share, _bytes(run, [after_qkv], [kept], [peak], [segment])


def _recorded(step: Callable[[], T]) -> tuple[T, int, int]:
    """What a step gives, and of what it allocated the peak and what is left."""
    recorder: Any = profile(profile_memory=True)
    with recorder:
        result = step()
    found = recorder.kineto_results
    events = [each for each in found.events() if each.name() == _MEMORY_EVENT]
    peak = now = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        now += each.nbytes()
        peak = max(peak, now)
    return result, peak, now


def _peaks_on_gpus(
    made: Callable[[], _MeasuredPass], conditions: Conditions, devices: list[torch.device]
) -> tuple[_MeasuredPass, float, dict[str, Any], float]:
    """Peaks of each GPU's allocator, in the second pass, and the seconds it took: the first one
    compiles, and makes what libraries keep.
    """
    # a mask is there before them, and counts in the peak alone
    before = [torch.cuda.memory_allocated(device) for device in devices]
    run = made()
    with_qkv = [torch.cuda.memory_allocated(device) for device in devices]
    share = run.once()
    _synchronise(devices)
    _free_workspaces()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    kept: list[int] = []

    def watched() -> None:
        output, _ = run.forward()
        kept.extend(torch.cuda.memory_allocated(device) for device in devices)
        run.backward(output)

    took_s = _time_s(watched, conditions, devices)
    figures = _bytes(
        run,
        [one - other for one, other in zip(with_qkv, before, strict=True)],
        [one - other for one, other in zip(kept, with_qkv, strict=True)],
        [torch.cuda.max_memory_allocated(device) for device in devices],
        [torch.cuda.max_memory_reserved(device) for device in devices],
    )
    return run, share, figures, took_s


def _free_workspaces() -> None:
    """What cuBLAS keeps, for what the first pass proved: whoever multiplies takes its own again."""
    bindings: Any = vars(torch)["_C"]
    bindings._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _bytes(
    run: _MeasuredPass, after_qkv: list[int], kept: list[int], peak: list[int], reserved: list[int]
) -> dict[str, Any]:
    return {
        "after_qkv_bytes": tuple(after_qkv),
        "kept_for_backward_bytes": tuple(kept) if run.direction == "forward+backward" else (),
        "peak_allocated_bytes": tuple(peak),
        "peak_reserved_bytes": tuple(reserved),
    }


def _time_s(
    run_once: Callable[[], object], conditions: Conditions, devices: list[torch.device]
) -> float:
    """Seconds of a pass, all ranks beginning together, of the slowest of them: all go on alike."""
    is_shared = conditions.ranks > 1 and dist.is_initialized()
    if is_shared:
        dist.barrier()
    _synchronise(devices)
    began = time.perf_counter()
    run_once()
    _synchronise(devices)
    took = torch.tensor(time.perf_counter() - began, device=conditions.device)
    if is_shared:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _synchronise(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _in_data_parallel(compute: Compute, gpus: int) -> Compute:
    """The same by PyTorch's DataParallel: the batch cut over GPUs, the output on the first."""
    shares: list[float] = []

    class Module(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output, share = compute(query, key, value)
            shares.append(share)
            return output

    parallel = nn.DataParallel(Module(), device_ids=list(range(gpus)))

    def computed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, float]:
        shares.clear()
        return parallel(query, key, value), shares[0]

    return computed
