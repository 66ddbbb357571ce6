"""Gated MLPs, and experts, in tiles of tokens against the families' own."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Gemma2Config, GemmaConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from closeness import assert_near, deviation, with_gradients
from engine_models import forward, on_meta, packed
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import norm as norm_kernels
from highwater.engine.models.build import tile_mlps
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fused import gated_mlp
from highwater.engine.models.fused.experts import IMPLEMENTATION
from highwater.engine.models.fused.fused import RmsNorm, fuse_mlps, tile_experts
from highwater.engine.models.fused.gated_mlp import GatedMlp
from highwater.errors import ModelError
from highwater.nouns import layout
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


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product of a gate and what goes up, as they are computed."""
    found: list[int] = []
    plain = gate_kernels.product_
    monkeypatch.setattr(
        gate_kernels, "product_", lambda gate, up: (found.append(len(gate)), plain(gate, up))[1]
    )
    return found


def kept_by(module: nn.Module, *inputs: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of a forward pass."""
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        module(*inputs)
    return kept


def test_nothing_but_the_input_is_kept_and_a_recomputation_ends_before_the_products(products):
    layers = nn.ModuleList([_Block()])
    kept = kept_by(layers[0], torch.randn(9, 24, requires_grad=True))
    assert [shape for shape in kept if 9 in shape] == [(9, 24)]
    recompute_layers(layers)
    products.clear()
    layers[0](torch.randn(9, 24, requires_grad=True)).sum().backward()
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


OF_TWO = SIZES | {"num_experts_per_tok": 2}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**OF_TWO, moe_intermediate_size=24, num_experts=5),
    "mixtral": transformers.MixtralConfig(**OF_TWO, num_local_experts=5),
}
OTHERS: dict[str, transformers.PreTrainedConfig] = {
    "biases": transformers.GptOssConfig(**OF_TWO, num_local_experts=5, pad_token_id=0),
    "float32 weights": transformers.PhimoeConfig(**OF_TWO, num_local_experts=5, pad_token_id=0),
}


def experts_of(model: nn.Module) -> Any:
    return next(each for name, each in model.named_modules() if name.endswith(".experts"))


def of_family(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        {**CONFIGS, **OTHERS}[name], experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "tiles"), [(1, None), (37, None), (37, 1), (37, 5), (37, 50), (301, 3)]
)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_tiles_of_experts_equal_the_familys_own(family, tokens, tiles, dtype):
    tiled = of_family(family).to(dtype)
    exact = copy.deepcopy(tiled).double()
    assert tile_experts(tiled, tiles=tiles) == SIZES["num_hidden_layers"]
    mine, theirs = experts_of(tiled), experts_of(exact)
    chosen = torch.rand(tokens, 5).topk(2).indices  # as a router, which chooses none twice
    given = [torch.randn(tokens, width, dtype=dtype) for width in (32, 2)]
    found, expected = (gradients_of(module, given, chosen) for module in (mine, theirs))
    assert {each.dtype for each in found} == {dtype}
    assert_near(found, expected, TOLERANCE[dtype])


def gradients_of(module: Any, given: list[torch.Tensor], chosen: torch.Tensor) -> Any:
    dtype = next(module.parameters()).dtype
    x, weights = (each.detach().to(dtype).requires_grad_() for each in given)
    leaves = [x, weights, *module.parameters()]
    return with_gradients([module(x, chosen, weights)], leaves, rounded=given[0].dtype)


def test_many_tiles_of_experts_lose_no_more_than_the_rounding_of_each_ones_share():
    """Those of independent shares add up to as much as the rounding of their sum."""
    own = of_family("qwen3_moe").bfloat16()
    whole, tiled, exact = own, copy.deepcopy(own), copy.deepcopy(own).double()
    assert tile_experts(whole, tiles=2) == tile_experts(tiled, tiles=128) == 2
    chosen = torch.rand(4096, 5).topk(2).indices
    given = [torch.randn(4096, width).bfloat16() for width in (32, 2)]
    one, many, true = (
        gradients_of(experts_of(model), given, chosen) for model in (whole, tiled, exact)
    )
    for a, b, c in zip(one, many, true, strict=True):
        assert deviation(b, c) < 2**0.5 * deviation(a, c)


@pytest.mark.parametrize("family", list(OTHERS))
def test_experts_of_other_families_are_left_alone(family):
    model = of_family(family)
    assert tile_experts(model, tiles=2) == 0
    assert model.config._experts_implementation != IMPLEMENTATION


def test_one_tile_is_the_familys_own_way(monkeypatch):
    model, called = of_family("mixtral"), list[int]()
    tile_experts(model, tiles=None)
    experts = experts_of(model)
    monkeypatch.setattr(layout, "EXPERT_TILE_TOKENS", 8)
    experts.untiled = lambda _, x, *__: (called.append(len(x)), x)[1]
    for tokens in (1, 8, 9):
        chosen, weights = torch.rand(tokens, 5).topk(2).indices, torch.rand(tokens, 2)
        experts(torch.randn(tokens, 32), chosen, weights)
    assert called == [1, 8]


def test_experts_that_compute_something_else_are_left_alone():
    class Scaled(type(experts_of(of_family("mixtral")))):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return 2 * super()._apply_gate(gate_up)

    model = of_family("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Scaled
    assert tile_experts(model, tiles=None) == 0, "its own forward has another gate"
    assert model.config._experts_implementation != IMPLEMENTATION


def test_only_what_experts_are_given_is_kept_and_products_are_not_recomputed(products):
    model = of_family("qwen3_moe")
    tile_experts(model, tiles=2)
    chosen, weights = torch.rand(9, 5).topk(2).indices, torch.rand(9, 2)
    x = torch.randn(9, 32, requires_grad=True)
    kept = kept_by(experts_of(model), x, chosen, weights)
    assert sorted(shape for shape in kept if len(shape) == 2) == [(9, 2), (9, 2), (9, 32)]
    layers = nn.ModuleList(model.model.layers[:1])
    layers[0].forward = lambda x: x + layers[0].mlp(x)
    recompute_layers(layers)
    products.clear()
    layers[0](torch.randn(1, 9, 32, requires_grad=True)).sum().backward()
    assert products == [10, 8], "forward, in two tiles; backward, no product of the recomputation"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_routers_loss_is_that_of_all_tokens_however_experts_go_in_tiles(family):
    found = []
    for tiles in (None, 1, 3):
        torch.manual_seed(1)
        config = copy.deepcopy(CONFIGS[family])
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        model = on_meta(config, dtype=torch.float64).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            assert "inv_freq" in name
            buffer.fill_(0.1)
        if tiles is not None:
            tile_mlps(model, tiles)
        found.append(step_of(model))
    for other in found[1:]:
        assert_near(other, found[0], TOLERANCE[torch.float64])


def step_of(model: Decoder) -> list[torch.Tensor]:
    ids = torch.randint(64, (23,), generator=torch.Generator().manual_seed(0))
    statistics = forward(model, packed(ids[:9], ids[9:]))
    loss = statistics.router_loss - statistics.logprobs_N.sum()
    return [loss, statistics.router_loss, *torch.autograd.grad(loss, list(model.parameters()))]
