"""Measure an attention in its own process: bytes, peaks and time at one length. Before that, check
output and gradients against the textbook formula in float64, on a short sequence whose length no
block divides. The formula gets an attention's counts: how many times each token attends to each
key, 0 for a key that it does not see.

On the CPU every allocation of PyTorch is recorded in one pass, and time is measured in others; on a
GPU the allocator keeps its peaks itself.

Shapes:  B sequences of this rank, 1 in a check  H query heads  K key/value heads  S tokens
         s tokens of this rank  D head size
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile

from highwater.engine.bench.attention.contenders import Build, Compute, Conditions, counts
from highwater.engine.parallel.sequence_layout import PADDING
from highwater.engine.training.memory_profiler import DataSegment
from highwater.nouns.attention_bench import CHECKED_TOKENS, COMPARED, BenchRow

_MOST_PASSES, _ENOUGH_S = 5, 0.2
"""Timed passes: at most this many, and no further one after this many seconds in all."""
T = TypeVar("T")


class _Pass(NamedTuple):
    compute: Compute
    inputs: Sequence[Tensor]
    """Queries BHsD, keys and values BKsD; with a gradient if the case has a backward pass."""

    def forward(self) -> Tensor:
        with torch.set_grad_enabled(self.inputs[0].requires_grad):
            return self.compute(*self.inputs)

    def backward(self, output: Tensor) -> None:
        if output.requires_grad:
            # all three may be one tensor, which has one gradient
            leaves = list({id(each): each for each in self.inputs}.values())
            torch.autograd.grad(output, leaves, torch.ones_like(output))

    def both(self) -> None:
        self.backward(self.forward())


def measure(case: BenchRow, build: Build, conditions: Conditions) -> BenchRow:
    """Measure a case in this process. Raises PyTorch's errors."""
    assert case.length_tokens is not None, "it has one until it is red"
    compute = build(conditions, case.length_tokens)
    if len(conditions.devices) > 1:
        compute = _in_data_parallel(compute, conditions.devices)

    def made() -> _Pass:
        return _Pass(compute, _inputs(case, conditions))

    times_s: list[float] = []
    if conditions.device.type == "cpu":
        run, row = _peaks_on_cpu(case, made)
    else:
        run, row, took_s = _peaks_on_gpus(case, made, conditions)
        times_s += [took_s] if took_s > _ENOUGH_S else []
    while not times_s or (len(times_s) < _MOST_PASSES and sum(times_s) < _ENOUGH_S):
        times_s.append(_time_s(run.both, conditions))
    time_s, timeout_s = statistics.median(times_s), conditions.share.order.timeout_s
    if time_s > timeout_s:
        late = f"a pass took longer than {timeout_s:g} s"
        return case.replace(result="took too long", reason=late)
    kept_share = conditions.kept_share(case.length_tokens)
    return row.replace(time_s=time_s, passes=len(times_s), kept_share=kept_share)


def _inputs(case: BenchRow, conditions: Conditions) -> Sequence[Tensor]:
    order = conditions.share.order
    tokens = conditions.layout(case.length_tokens or 0).tokens_per_rank
    batch = max(1, case.batch // conditions.share.processes)  # ranks of a ring share one sequence
    made = [
        torch.randn(
            (batch, heads, tokens, order.head_dim),
            device=conditions.device,
            dtype=conditions.dtype,
            requires_grad=case.direction == "forward+backward",
        )
        for heads in conditions.heads_of_qkv[: 1 if order.same_qkv else 3]
    ]
    return made * 3 if order.same_qkv else made


@cache
def data_segment() -> DataSegment:
    """Return this process's only watch of its data segment: the watch's thread counts in it too."""
    return DataSegment()


def _peaks_on_cpu(case: BenchRow, made: Callable[[], _Pass]) -> tuple[_Pass, BenchRow]:
    """Measure bytes of PyTorch's allocator, from every allocation, and the data segment's peak."""
    watch = data_segment()
    watch.peak_bytes = 0
    watch.read()
    before = watch.peak_bytes
    run, _, after_qkv = _recorded(made)
    output, forward_peak, left = _recorded(run.forward)
    _, backward_peak, _ = _recorded(lambda: run.backward(output))
    peak = after_qkv + max(forward_peak, left + backward_peak)
    # the readings of the data segment may have missed a short pass
    segment = max(watch.peak_bytes, before + peak)
    return run, case.replace(
        after_qkv_bytes=(after_qkv,), peak_allocated_bytes=(peak,), peak_reserved_bytes=(segment,)
    )


def _recorded(step: Callable[[], T]) -> tuple[T, int, int]:
    """Return a step's result, its peak of allocated bytes, and the bytes still allocated."""
    recorder: Any = profile(profile_memory=True)
    with recorder:
        result = step()
    found = recorder.kineto_results
    events = [each for each in found.events() if each.name() == "[memory]"]
    peak = now = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        now += each.nbytes()
        peak = max(peak, now)
    return result, peak, now


def _peaks_on_gpus(
    case: BenchRow, made: Callable[[], _Pass], conditions: Conditions
) -> tuple[_Pass, BenchRow, float]:
    """Peaks of each GPU's allocator in the second pass, and its seconds: the first one compiles."""
    devices = conditions.devices
    # a mask made earlier is left out of the inputs' bytes, but counts in the peak
    before = list(map(torch.cuda.memory_allocated, devices))
    run = made()
    after = list(map(torch.cuda.memory_allocated, devices))
    run.both()
    _synchronise(devices)
    # free cuBLAS's workspaces of the first pass's proofs; products allocate their own again
    bindings: Any = vars(torch)["_C"]
    bindings._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    took_s = _time_s(run.both, conditions)
    row = case.replace(
        after_qkv_bytes=tuple(one - other for one, other in zip(after, before, strict=True)),
        peak_allocated_bytes=tuple(map(torch.cuda.max_memory_allocated, devices)),
        peak_reserved_bytes=tuple(map(torch.cuda.max_memory_reserved, devices)),
    )
    return run, row, took_s


def _time_s(run_once: Callable[[], object], conditions: Conditions) -> float:
    """Seconds of a pass, on the slowest rank; all ranks begin together."""
    is_shared = conditions.share.processes > 1
    if is_shared:
        dist.barrier()
    _synchronise(conditions.devices)
    began = time.perf_counter()
    run_once()
    _synchronise(conditions.devices)
    took = torch.tensor(time.perf_counter() - began, device=conditions.device)
    if is_shared:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _synchronise(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _in_data_parallel(compute: Compute, devices: Sequence[torch.device]) -> Compute:
    """Wrap an attention in PyTorch's DataParallel: batch cut over GPUs, output on the first."""

    class Module(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return compute(query, key, value)

    return nn.DataParallel(Module(), device_ids=list(devices))


def differences(build: Build, conditions: Conditions, rank: int = 0) -> dict[str, float]:
    """Return norm-relative differences from float64, over this rank's tokens: the larger of two
    checks, one with the pattern's own sizes, one with sizes for a short sequence.
    """
    found = [_differences(build, conditions, rank)]
    if (short := conditions.short()) != conditions:
        found.append(_differences(build, short, rank))
    largest = (float(torch.stack(each).max()) for each in zip(*found, strict=True))
    return dict(zip(COMPARED, largest, strict=True))


def naive_attention(
    query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, counts: Tensor, scaling: float
) -> Tensor:
    """The textbook formula in float64, counting repeated keys; zeros for a token without keys."""
    groups = len(query_HSD) // len(key_KSD)
    key_HSD, value_HSD = (t.double().repeat_interleave(groups, 0) for t in (key_KSD, value_KSD))
    scores_HSS = query_HSD.double() @ key_HSD.transpose(1, 2) * scaling + counts.double().log()
    return scores_HSS.softmax(-1).nan_to_num(0.0) @ value_HSD


def _differences(build: Build, conditions: Conditions, rank: int) -> list[Tensor]:
    random, order = torch.Generator().manual_seed(0), conditions.share.order
    # queries, keys, values and output gradient, XSD: the same on every rank
    whole = [
        torch.randn(heads, CHECKED_TOKENS, order.head_dim, generator=random).to(
            conditions.device, conditions.dtype
        )
        for heads in (*conditions.heads_of_qkv, order.heads)
    ]
    expected = _expected(conditions, whole)
    share = conditions.layout(CHECKED_TOKENS).cut(rank)
    positions_s = torch.from_numpy(share.positions_T).to(conditions.device)
    is_token_s = positions_s != PADDING
    held = [
        each[:, positions_s.clamp(min=0)].masked_fill(~is_token_s[:, None], 0.0)[None]
        for each in whole
    ]
    inputs = [each.requires_grad_() for each in held[:3]]
    output = build(conditions, CHECKED_TOKENS)(*inputs)
    gradients = torch.autograd.grad(output, inputs, held[3])
    found: list[Tensor] = []
    for mine, its in zip((output, *gradients), expected, strict=True):
        theirs = its[:, positions_s[is_token_s]]
        difference = mine[0][:, is_token_s].detach().double() - theirs
        found.append(difference.norm() / theirs.norm())
    return found


def _expected(conditions: Conditions, whole: Sequence[Tensor]) -> list[Tensor]:
    query, key, value, upstream = (each.double() for each in whole)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    counts_HSS = counts(conditions, query.shape[1]).to(conditions.device)
    output = naive_attention(*inputs, counts_HSS, conditions.scaling)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
