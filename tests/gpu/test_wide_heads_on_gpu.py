"""Attention of Gemma 4's layers on a GPU, in bfloat16."""

import sys
from collections.abc import Callable
from statistics import median

import pytest
import torch

from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.plain_block import PlainBlock
from highwater.engine.attention.wide_block import SCORES_AT_HAND, WideBlock

HEADS, KEYS, SIZE = 8, 2, 512
TOLERANCE = 1e-2
NAMES = ("output", "log-sum-exp", "query", "key", "value")
WINDOW_LAYER_MS = 3.0
"""Most that a window layer of Gemma 4 E4B may take for 8,192 tokens, forward and backward."""


def tensors(tokens: int, size: int = SIZE) -> list["torch.Tensor"]:
    """Heads that were normed, as Gemma 4's are: their products have no scale."""
    torch.manual_seed(0)
    return [
        torch.randn(1, tokens, count, size, device="cuda").mul_(scale).bfloat16().transpose(1, 2)
        for count, scale in ((HEADS, size**-0.25), (KEYS, size**-0.25), (KEYS, 1.0))
    ]


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call on the GPU, after one to warm up."""
    call()
    found: list[float] = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return median(found)


def both_passes(block: PlainBlock, upstream: torch.Tensor) -> tuple["torch.Tensor", ...]:
    found = block.forward()
    return (*found, *block.backward(upstream.to(found[0].dtype), *found))


@pytest.mark.parametrize("tokens", [130, 4097, 65_537])
def test_wide_heads_equal_float32_in_output_and_gradients(tokens, capsys):
    own = tensors(tokens)
    upstream = torch.randn_like(own[0])
    found = both_passes(WideBlock(*own, 1.0), upstream)
    wanted = both_passes(PlainBlock(*(t.float() for t in own), 1.0), upstream)
    for name, mine, theirs in zip(NAMES, found, wanted, strict=True):
        # by parts: what is wrong past 65,536 tokens alone must not drown in the rest
        for part in (slice(0, 65_536), slice(max(0, tokens - 128), tokens)):
            off = float((mine[:, :, part].float() - theirs[:, :, part]).norm())
            assert off < TOLERANCE * float(theirs[:, :, part].norm()), (name, part)
    del found, wanted
    took_ms = milliseconds(lambda: both_passes(WideBlock(*own, 1.0), upstream), times=3)
    with capsys.disabled():
        sys.stdout.write(f"\n{HEADS} heads of {SIZE}, {tokens} tokens: {took_ms:.2f} ms\n")


@pytest.mark.parametrize("lengths", [(700, 700, 1, 90), (40_000, 25_000, 5, 70_001)])
def test_packed_documents_attend_each_to_itself(lengths):
    own = [t.requires_grad_() for t in tensors(sum(lengths))]
    pattern = Pattern(scaling=1.0, is_wide=True)
    documents = Documents(lengths=lengths, pattern=pattern, kernel="flash")
    output = attend_in_pattern(*own, documents=documents).output_BSHD
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, own, upstream)
    start = 0
    for length in lengths:
        place = slice(start, start + length)
        block = WideBlock(*(t[:, :, place].detach() for t in own), 1.0)
        alone = both_passes(block, upstream.transpose(1, 2)[:, :, place])
        found = (output.transpose(1, 2), *gradients)
        for mine, theirs in zip(found, (alone[0], *alone[2:]), strict=True):
            off = float((mine[:, :, place] - theirs).float().norm())
            assert off <= 1e-3 * float(theirs.float().norm())
        start += length


def test_memory_is_linear_in_the_length():
    taken: list[int] = []
    for tokens in (32_768, 65_536):
        own = tensors(tokens)
        upstream = torch.randn_like(own[0])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both_passes(WideBlock(*own, 1.0), upstream)
        taken.append(torch.cuda.max_memory_allocated() - before)
    scratch = 16 * SCORES_AT_HAND
    assert max(taken) - scratch < 2.2 * taken[0], "twice the tokens take no more than twice as much"


def test_a_window_layer_of_e4b_is_fast(capsys):
    tokens = 8192
    own = [t.requires_grad_() for t in tensors(tokens, size=256)]
    pattern = Pattern(scaling=1.0, window_tokens=512)
    documents = Documents(lengths=(tokens,), pattern=pattern, kernel="flash")
    upstream = torch.randn(1, tokens, HEADS, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> object:
        output = attend_in_pattern(*own, documents=documents).output_BSHD
        return torch.autograd.grad(output, own, upstream)

    took_ms = milliseconds(step, times=20)
    with capsys.disabled():
        sys.stdout.write(f"\na window layer of E4B, {tokens} tokens: {took_ms:.2f} ms\n")
    assert took_ms <= WINDOW_LAYER_MS
