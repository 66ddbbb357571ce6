"""Attention with heads wider than fused kernels take."""

import pytest
import torch

from highwater.engine.attention import wide_block
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.plain_block import PlainBlock, reference_attention
from highwater.engine.attention.wide_block import WideBlock

SIZE, HEADS, KEYS = 320, 4, 2
TOLERANCE = 1e-2


def heads_of(tokens: int, dtype: torch.dtype) -> list["torch.Tensor"]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(1, count, tokens, SIZE, generator=generator) / SIZE**0.25).to(dtype)
        for count in (HEADS, KEYS, KEYS)
    ]


@pytest.mark.parametrize("scores", [2**26, 700, 1])
@pytest.mark.parametrize("scaling", [1.0, 0.25])
@pytest.mark.parametrize("lengths", [(37,), (11, 11, 1, 29)])
def test_packed_documents_equal_the_formula_in_any_rows(lengths, scaling, scores, monkeypatch):
    monkeypatch.setattr(wide_block, "SCORES_AT_HAND", scores)
    own = [t.requires_grad_() for t in heads_of(sum(lengths), torch.float64)]
    row = Documents(lengths=lengths, pattern=Pattern(scaling=scaling, is_wide=True), kernel="flash")
    output = attend_in_pattern(*own, documents=row).output_BSHD[0]
    rows = [tensor[0].transpose(0, 1) for tensor in own]
    expected = reference_attention(*rows, document_lengths=lengths, scaling=scaling)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(output, expected, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad(each, own, upstream) for each in (output, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 9])
def test_in_bfloat16_rounding_alone_is_between_it_and_the_plain_path(window):
    own = heads_of(150, torch.bfloat16)
    upstream = torch.randn(own[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = PlainBlock(*(t.double() for t in own), 1.0, window)
    wanted = exact.forward()
    wanted = (*wanted, *exact.backward(upstream.double(), *wanted))
    block = WideBlock(*own, 1.0, window)
    found = block.forward()
    assert found[1].dtype == torch.float32
    found = (*found, *block.backward(upstream, *found))
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).norm()) < TOLERANCE * float(theirs.norm())


def test_a_memory_only_trial_computes_the_rows_that_take_the_most(monkeypatch):
    monkeypatch.setattr(wide_block, "SCORES_AT_HAND", 4 * 64 * HEADS)
    own = heads_of(64, torch.float64)
    whole, part = (WideBlock(*own, 1.0, None, None, short).forward()[0] for short in (False, True))
    assert torch.equal(part[:, :, -3:], whole[:, :, -3:])
    assert not part[:, :, :-3].any()
