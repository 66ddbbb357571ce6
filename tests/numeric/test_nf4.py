"""Weights in NF4: bitsandbytes' own numbers, whole, by halves and for products."""

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="a model in NF4 needs the qlora extra")

from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn

from highwater.engine.models.fused.nf4 import Nf4Linear, Nf4Weight, halves, packed, scale_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 256), (96, 40), (43, 45), (2, 3), (1, 64)])
def test_a_packed_weight_is_bitsandbytes(shape, dtype):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    ours = packed(weight, scale_table(CPU))
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.whole(), dequantize_4bit(codes, state))
    assert ours.whole().dtype is dtype


@pytest.mark.parametrize("shape", [(512, 256), (256, 128), (96, 40), (6, 5)])
def test_halves_are_those_of_the_whole_and_as_small_where_blocks_allow(shape):
    ours = packed(torch.randn(*shape), scale_table(CPU))
    for half, rows in zip(halves(ours), ours.whole().chunk(2), strict=True):
        assert isinstance(half, Nf4Weight)
        assert torch.equal(half.whole(), rows)
        is_cut = shape[0] * shape[1] // 2 % (64 * 256) == 0
        assert half.codes.numel() == ours.codes.numel() // (2 if is_cut else 1)


def test_a_packed_layer_has_the_gradient_of_its_input_and_keeps_nothing_whole():
    plain = nn.Linear(48, 32).requires_grad_(requires_grad=False)
    layer = Nf4Linear(plain)
    x = torch.randn(2, 5, 48, requires_grad=True)
    assert torch.equal(layer(x), plain(x)), "until it is packed it is what it was"
    layer.pack(scale_table(CPU))
    assert not [name for name, _ in layer.named_parameters() if name == "weight"]
    assert layer.nf4 is not None
    whole = layer.nf4.whole()
    out = layer(x)
    torch.testing.assert_close(out, nn.functional.linear(x, whole, plain.bias))
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * out.detach() @ whole)
