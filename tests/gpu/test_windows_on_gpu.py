"""Attention within a window and beside sinks on a GPU, in bfloat16."""

import pytest
import torch

from highwater.engine.attention import kernel_proof as window_proof
from highwater.engine.attention import patterned
from highwater.engine.attention.block_attention import WindowedBlock
from highwater.engine.attention.kernel_proof import computes_windows
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.plain_block import PlainBlock
from highwater.engine.tracer.allocation_recorder import WORKSPACES

SCALING = 0.11
TOLERANCE = 1e-2
HEADS = [((8, 2), 128), ((4, 4), 64), ((4, 1), 40), ((4, 2), 256)]


def tensors(
    heads: tuple[int, int], size: int, tokens: int, documents: int = 1
) -> list["torch.Tensor"]:
    torch.manual_seed(0)
    return [
        torch.randn(documents, tokens, count, size, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for count in (heads[0], heads[1], heads[1])
    ]


def requested_bytes(which: str) -> int:
    """Bytes that tensors asked for, before the allocator hands out larger blocks that it kept."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize("size", sorted({size for _, size in HEADS}))
def test_the_window_is_proven_here(size):
    assert computes_windows(torch.device("cuda"), torch.bfloat16, size)
    assert not computes_windows(torch.device("cuda"), torch.float32, size)


@pytest.mark.parametrize(("heads", "size"), HEADS)
@pytest.mark.parametrize(("length", "window"), [(130, 1), (333, 100), (257, 256), (1025, 128)])
def test_flash_and_the_plain_path_equal_float64(heads, size, length, window):
    own = tensors(heads, size, length, documents=2)
    exact = PlainBlock(*(t.double() for t in own), SCALING, window)
    upstream = torch.randn_like(own[0])
    wanted = exact.forward()
    wanted = (*wanted, *exact.backward(upstream.double(), *wanted))
    for block in (WindowedBlock(*own, SCALING, window), PlainBlock(*own, SCALING, window)):
        found = block.forward()
        found = (*found, *block.backward(upstream, *found))
        names = ("output", "log-sum-exp", "query", "key", "value")
        for name, mine, theirs in zip(names, found, wanted, strict=True):
            beside = float(upstream.norm()) if name in ("query", "key") else 0.0
            floor = max(float(theirs.norm()), TOLERANCE * beside)
            assert float((mine.double() - theirs).norm()) < TOLERANCE * floor, (type(block), name)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("window", [77, None])
@pytest.mark.parametrize("lengths", [(700,), (300, 300, 90, 1, 5), (64, 2000)])
def test_packed_documents_and_sinks_equal_the_plain_path(lengths, window, kernel, monkeypatch):
    if kernel == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is for Hopper here")
    own = [t.requires_grad_() for t in tensors((8, 2), 128, sum(lengths))]
    sinks = torch.linspace(-2, 6, 8, device="cuda", dtype=torch.bfloat16).requires_grad_()
    pattern = Pattern(scaling=SCALING, window_tokens=window, sinks_H=sinks)
    documents = Documents(lengths=lengths, pattern=pattern, kernel=kernel)
    upstream = torch.randn(1, sum(lengths), 8, 128, device="cuda", dtype=torch.bfloat16)

    def attended() -> list["torch.Tensor"]:
        output = attend_in_pattern(*own, documents=documents).output_BSHD
        return [output, *torch.autograd.grad(output, [*own, sinks], upstream)]

    by_kernel = attended()
    monkeypatch.setattr(window_proof, "computes_windows", lambda *_: False)
    monkeypatch.setattr(
        patterned,
        "Block",
        lambda query, key, value, _, scaling, __: PlainBlock(query, key, value, scaling),
    )
    for mine, plain in zip(by_kernel, attended(), strict=True):
        assert float((mine - plain).float().norm()) < TOLERANCE * float(plain.float().norm())


@pytest.mark.parametrize(("heads", "size"), HEADS)
def test_the_kernel_takes_what_a_trace_says(heads, size):
    own = tensors(heads, size, 4096)
    block = WindowedBlock(*own, SCALING, 512)
    output, log_sums = block.forward()
    upstream = torch.randn_like(output)
    block.backward(upstream, output, log_sums)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes("current")
    kept = block.backward(upstream, output, log_sums)
    taken = requested_bytes("peak") - before
    by_tokens = [t.transpose(1, 2) for t in (upstream, *own)]
    said = WORKSPACES[torch.ops.aten._flash_attention_backward.default](by_tokens)
    results = sum(gradient.numel() * gradient.element_size() for gradient in kept)
    if size % 8 == 0:  # of others padded copies are taken too
        assert taken == results + sum(said)
