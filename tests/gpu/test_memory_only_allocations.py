"""Memory-only trials on a GPU: pieces make every allocation that whole documents make."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from real_trials import kernels, tried

from highwater.engine.attention.dense import Kernel, attend
from highwater.nouns.corpus import pieces
from highwater.nouns.settings import Allocator, Loss
from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import MIB
from trial_specs import trial_of

TRIAL_TOLERANCE = 0.002
"""Of the peak reserved: what a memory-only trial is trusted for."""
ORDER_TOLERANCE = 0.0005
"""Of the peak allocated: the same allocations, of which the gradient of a short document may end
one operator sooner."""
SEGMENT = 20 * MIB
"""What the allocator takes at once for anything between 1 and 10 MiB."""
SIZE = 128
HEADS = [(16, 8), (32, 8), (16, 16), (4, 2), (2, 1), (1, 1)]
"""Of whole models, and of one rank: 16 / 8 at Ulysses degrees 4, 8 and 16, where key/value heads
are repeated."""
PACKINGS = [(32_768,), (40_960,), (20_480, 20_480), (24_576, 1, 100), (131_000,)]


def step(
    lengths: tuple[int, ...], heads: tuple[int, int], kernel: Kernel, *, in_pieces: bool
) -> Callable[[], None]:
    """Forward and backward of one attention in bf16, laid out as projections leave it."""
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(1, tokens, count, SIZE, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    upstream = torch.randn(1, tokens, heads[0], SIZE, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        out = attend(
            q,
            k,
            v,
            document_lengths=lengths,
            scaling=SIZE**-0.5,
            kernel=kernel,
            in_pieces=in_pieces,
        )
        assert out.isfinite().all()
        out.backward(upstream)
        q.grad = k.grad = v.grad = None

    return run


def memory_of(make_step: Callable[[], Callable[[], None]]) -> tuple[list[int], int, int]:
    torch.cuda.empty_cache()
    run = make_step()
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
    try:
        run()
        torch.cuda.synchronize()
        (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [event["size"] for event in trace if event["action"] == "alloc"]
    stats = torch.cuda.memory_stats()
    return sizes, stats["allocated_bytes.all.peak"] - before, stats["reserved_bytes.all.peak"]


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", PACKINGS)
def test_pieces_allocate_what_whole_documents_do(kernel, heads, lengths):
    assert (pieces(lengths[0], "cuda") or 1) > 1
    whole_sizes, whole_allocated, whole_reserved = memory_of(
        partial(step, lengths, heads, kernel, in_pieces=False)
    )
    sizes, allocated, reserved = memory_of(partial(step, lengths, heads, kernel, in_pieces=True))
    # no multiple of a kernel's block: its rounded buffers may differ by the pieces' padding
    if lengths == (131_000,):
        assert allocated == pytest.approx(whole_allocated, rel=0.005)
        return
    assert sizes == whole_sizes
    assert allocated == pytest.approx(whole_allocated, rel=ORDER_TOLERANCE)
    assert reserved == pytest.approx(whole_reserved, rel=TRIAL_TOLERANCE, abs=SEGMENT)


def trial(
    tmp_path: Path, length: int, loss: Loss, allocator: Allocator, depth: int | None
) -> TrialResult:
    spec = trial_of(
        "Qwen3-0.6B", loss=loss, allocator=allocator, length_tokens=length, attention_depth=depth
    )
    return tried(spec, tmp_path)


@pytest.mark.parametrize(("loss", "allocator"), [("full", "native"), ("chunked", "expandable")])
def test_a_memory_only_trial_has_the_peak_of_a_full_one(tmp_path, loss, allocator):
    full, memory_only = (trial(tmp_path, 32_768, loss, allocator, depth) for depth in (None, 1))
    assert full.outcome is Outcome.FIT, full.reason
    assert memory_only.outcome is Outcome.MEMORY_ONLY_FIT, memory_only.reason
    assert memory_only.peak_reserved_bytes == pytest.approx(
        full.peak_reserved_bytes, rel=TRIAL_TOLERANCE
    )
    assert memory_only.ranks[0].memory.peak_allocated_bytes == pytest.approx(
        full.ranks[0].memory.peak_allocated_bytes, rel=TRIAL_TOLERANCE
    )
    assert memory_only.tokens_per_s is None
    assert memory_only.mfu is None
    assert memory_only.ranks[0].losses == ()
