"""The ring on a GPU: its blocks against float64 by either kernel, what they take for themselves
against what a trace says, and whole rings of processes that share one GPU.

Their keys and values go by way of the host there: NCCL takes one process a GPU.
"""

import pytest
import torch
from real_trials import kernels, reports_of

from closeness import deviation
from highwater.engine.attention.block_attention import Block
from highwater.engine.tracer.allocation_recorder import WORKSPACES
from highwater.nouns.hardware import Kernel

SCALING = 0.11
TOLERANCE = 1e-2
ROUNDED_BYTES = 512
"""The allocator's: every request is rounded up to a multiple."""


def block(
    kernel: Kernel, heads: tuple[int, int], size: int, queries: int, keys: int, documents: int = 2
) -> Block:
    torch.manual_seed(0)

    def tensor(count: int, tokens: int) -> "torch.Tensor":
        shape = (documents, tokens, count, size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    tensors = (tensor(heads[0], queries), tensor(heads[1], keys), tensor(heads[1], keys))
    return Block(*tensors, queries == keys, SCALING, kernel)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((4, 4), 64), ((4, 1), 40)])
@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (130, 65), (65, 130), (2, 1), (1, 2)])
def test_a_block_equals_float64(kernel, heads, size, queries, keys):
    ours = block(kernel, heads, size, queries, keys)
    exact = [tensor.double().requires_grad_() for tensor in ours[:3]]
    repeats = heads[0] // heads[1]
    query, key, value = (
        t.repeat_interleave(repeats, dim=1) if i else t for i, t in enumerate(exact)
    )
    scores = query @ key.transpose(-1, -2) * SCALING
    if ours.is_causal:
        ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    expected = scores.softmax(dim=-1) @ value
    output, log_sums = ours.forward()
    assert deviation(output, expected) < TOLERANCE
    assert deviation(log_sums, scores.logsumexp(dim=-1)) < TOLERANCE
    upstream = torch.randn_like(output)
    found = ours.backward(upstream, output, log_sums)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for name, mine, theirs in zip(("query", "key", "value"), found, wanted, strict=True):
        assert deviation(mine, theirs) < TOLERANCE or theirs.norm() < TOLERANCE, name


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("heads", [(32, 8), (8, 8)])
@pytest.mark.parametrize(("queries", "keys"), [(16384, 16384), (16384, 8192), (8192, 16384)])
def test_a_block_takes_what_a_trace_has_for_it(kernel, heads, queries, keys):
    ours = block(kernel, heads, 128, queries, keys, documents=1)
    output, log_sums = ours.forward()
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    workspaces = WORKSPACES[operator]([output, *ours[:3]])
    results = sum(rounded(tensor.nbytes) for tensor in ours[:3])
    expected = results + sum(map(rounded, workspaces))
    ours.backward(output, output, log_sums)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours.backward(output, output, log_sums)
    assert torch.cuda.max_memory_allocated() - before == expected


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("processes", [2, 3])
def test_a_ring_of_processes_equals_float64_and_is_as_exact_as_one_kernel(
    kernel, processes, tmp_path
):
    for found in reports_of(processes, "ring_on_one_gpu.py", tmp_path, kernel):
        for case, deviations in found.items():
            for name, (ring, alone) in deviations.items():
                assert ring < TOLERANCE, (case, name)
                assert ring < 1.3 * alone, (case, name)


def rounded(size: int) -> int:
    return -(-size // ROUNDED_BYTES) * ROUNDED_BYTES
