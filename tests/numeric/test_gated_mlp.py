"""The gated MLP in tiles against the families' own."""

import copy

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, GemmaConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from closeness import assert_near, deviation, with_gradients
from engine_models import on_meta
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import norm as norm_kernels
from highwater.engine.models.build import tile_mlps
from highwater.engine.models.fused import gated_mlp
from highwater.engine.models.fused.fused import RmsNorm, fuse_mlps
from highwater.engine.models.fused.gated_mlp import GatedMlp
from highwater.errors import ModelError
from tiny_models import SIZES

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Norm-relative against the family's own in float64; in bfloat16 each product of matrices is
rounded to 8 bits."""

_SIZES = {"hidden_size": 24, "intermediate_size": 40}
FAMILIES = {
    "qwen3": lambda: Qwen3MLP(Qwen3Config(**_SIZES)),
    "llama with biases": lambda: LlamaMLP(
        LlamaConfig(**_SIZES, num_attention_heads=4, mlp_bias=True)
    ),
    "phi3, gate and up in one": lambda: Phi3MLP(Phi3Config(**_SIZES, pad_token_id=0)),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "tiles"),
    [(1, None), (37, None), (37, 1), (37, 2), (37, 5), (37, 37), (37, 50), (301, None)],
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_tiles_equal_the_familys_own(family, tokens, tiles, dtype, monkeypatch):
    monkeypatch.setitem(gated_mlp.TILE_BYTES, "cpu", 1)  # the smallest tile: 301 tokens make three
    torch.manual_seed(0)
    holder = nn.ModuleDict({"mlp": FAMILIES[family]()}).to(dtype)
    exact = copy.deepcopy(holder).double()
    assert fuse_mlps(holder, tiles=tiles) == 1
    assert [name for name, _ in holder.named_parameters()] == [
        name for name, _ in exact.named_parameters()
    ]
    x = torch.randn(1, tokens, 24, dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found = with_gradients([holder["mlp"](x)], [x, *holder.parameters()])
    wanted = with_gradients([exact["mlp"](wide)], [wide, *exact.parameters()], rounded=dtype)
    assert {each.dtype for each in found} == {dtype}
    assert_near(found, wanted, TOLERANCE[dtype])


def test_many_tiles_lose_nothing_that_one_would_keep():
    torch.manual_seed(0)
    whole = nn.ModuleDict({"mlp": FAMILIES["qwen3"]()}).bfloat16()
    tiled, exact = copy.deepcopy(whole), copy.deepcopy(whole).double()
    assert fuse_mlps(whole, tiles=1) == fuse_mlps(tiled, tiles=128) == 1
    x = torch.randn(4096, 24).bfloat16()
    for model in (whole, tiled, exact):
        model["mlp"](x.to(next(model.parameters()).dtype)).sum().backward()
    for one, many, true in zip(
        whole.parameters(), tiled.parameters(), exact.parameters(), strict=True
    ):
        assert deviation(many.grad, true.grad) < 1.05 * deviation(one.grad, true.grad)


def test_an_mlp_of_another_activation_or_form_is_left_alone():
    gelu = Gemma2MLP(Gemma2Config(**_SIZES))
    other = FAMILIES["qwen3"]()
    other.forward = lambda x: other.down_proj(other.act_fn(other.up_proj(x)) * other.gate_proj(x))

    class Scaled(Qwen3MLP):
        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return 2 * super().forward(x)

    model = nn.ModuleDict(
        {"gelu": gelu, "scaled": Scaled(Qwen3Config(**_SIZES)), "linear": nn.Linear(3, 3)}
    )
    assert fuse_mlps(model, tiles=None) == 0
    assert model["gelu"] is gelu


def test_tiles_that_are_asked_for_and_cannot_be_had_are_refused():
    model = on_meta(GemmaConfig(**SIZES))
    tile_mlps(model, None)
    with pytest.raises(ModelError, match="gemma has no MLP"):
        tile_mlps(model, 4)


def test_nothing_but_the_input_is_kept_and_a_recomputation_ends_before_the_products(monkeypatch):
    products: list[int] = []
    plain = gate_kernels.product_
    monkeypatch.setattr(
        gate_kernels, "product_", lambda gate, up: (products.append(len(gate)), plain(gate, up))[1]
    )
    layers = nn.ModuleList([nn.ModuleDict({"mlp": FAMILIES["qwen3"]()})])
    fuse_mlps(layers, tiles=2)
    layers[0].forward = lambda x: x + layers[0].get_submodule("mlp")(x)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        layers[0].forward(torch.randn(9, 24, requires_grad=True)).sum()
    assert [shape for shape in kept if 9 in shape] == [(9, 24)]
    wrapped = nn.ModuleList([_Block()])
    recompute_layers(wrapped)
    products.clear()
    wrapped[0](torch.randn(9, 24, requires_grad=True)).sum().backward()
    assert products == [5, 4], "forward, in two tiles; backward, no product of the recomputation"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = FAMILIES["qwen3"]()
        fuse_mlps(self, tiles=2)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return x + self.mlp(x)


def test_no_token_gives_zero_gradients():
    mlp = FAMILIES["qwen3"]()
    tiled = GatedMlp(
        {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}, tiles=None
    )
    tiled(torch.randn(0, 24, requires_grad=True)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in tiled.parameters())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 37, 24), (1, 5, 4, 24)])
@pytest.mark.parametrize("added", [0.0, 1.0])
def test_the_norm_of_a_cpu_equals_the_formula_in_blocks(added, shape, dtype, monkeypatch):
    monkeypatch.setattr(norm_kernels, "BLOCK_BYTES", 8 * 4 * 24)
    torch.manual_seed(0)
    norm = RmsNorm(24, added=added, eps=1e-6, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + added)
    # A gradient whose dimensions lie in another order, as attention's do.
    upstream = torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    ours = norm(x)
    mine = torch.autograd.grad(ours, (x, norm.weight), upstream)
    wanted = torch.autograd.grad(expected, (wide, weight), upstream.double())
    for a, b in zip((ours, *mine), (expected, *wanted), strict=True):
        assert deviation(a, b) < TOLERANCE[dtype]
