"""Experts in tiles of tokens on a GPU: output and gradients beside those of all tokens at once."""

import copy
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from closeness import deviation
from experts_in_tiles import LONG, kernel_bytes, rows
from highwater.engine.models.fused.experts import AdaptedExperts
from highwater.engine.models.fused.fused import tile_experts
from highwater.memory.formula.layers import Step, working_set_bytes
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from tiny_models import sized

CUDA = torch.device("cuda", 0)
MODEL = "Qwen3-30B-A3B"
MOST_BYTES = 60_000
"""Of a token in a layer, attention's kernel apart."""
SPREAD = 1.1
"""Times as far from exact as all tokens at once; both round each product to 8 bits."""
CLOSE = 2e-2
"""Norm-relative: a few roundings to 8 bits."""
SIZES = sized(64, 2048, 1, (16, 2))
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=768, num_experts=32, num_experts_per_tok=8
    ),
    "mixtral": MixtralConfig(
        **SIZES, intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2
    ),
}


def experts_of(config: PreTrainedConfig, experts_implementation: str) -> Any:
    with torch.device(CUDA):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), experts_implementation=experts_implementation
        )
    assert experts_implementation == "eager" or tile_experts(model, tiles=1) == 1
    return model.model.layers[0].mlp.experts


def found(experts: Any, given: list[torch.Tensor], chosen: torch.Tensor) -> list[torch.Tensor]:
    x, weights, upstream = given
    inputs = [x.requires_grad_(), weights.requires_grad_()]
    out = experts(x, chosen, weights)
    gradients = torch.autograd.grad(out, [*inputs, *experts.parameters()], upstream.to(out.dtype))
    return [out.detach(), *gradients]


def tell(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("tokens", [4099, 12_288])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_tiles_are_as_near_to_exact_as_all_tokens_at_once(family, tokens):
    torch.manual_seed(0)
    exact, ours = experts_of(CONFIGS[family], "eager"), experts_of(CONFIGS[family], "grouped_mm")
    with torch.no_grad():
        for mine, parameter in zip(ours.parameters(), exact.parameters(), strict=True):
            parameter.normal_(std=0.03).copy_(parameter.bfloat16())
            mine.data = parameter.bfloat16()
    chances = torch.rand(tokens, exact.num_experts, device=CUDA)
    chances[:, 0], chances[:, 1] = 2, -1  # one takes every token, one takes none
    chosen = chances.topk(CONFIGS[family].num_experts_per_tok).indices
    wide = [
        torch.randn(tokens, width, device=CUDA).bfloat16()
        for width in (SIZES["hidden_size"], chosen.shape[1], SIZES["hidden_size"])
    ]
    expected = found(exact, [each.float() for each in wide], chosen)
    off: dict[int, list[float]] = {}
    for tiles in (1, 3):
        ours.tiles = tiles
        off[tiles] = list(
            map(deviation, found(ours, [each.clone() for each in wide], chosen), expected)
        )
    tell({"case": f"{family} {tokens}", "apart": off})
    assert all(tiled < SPREAD * plain for tiled, plain in zip(off[3], off[1], strict=True))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_adapters_on_experts_are_as_near_to_exact_in_tiles(family):
    """Rank 8, as peft has them: gate and up share one of twice the rank."""
    torch.manual_seed(0)
    exact, ours = experts_of(CONFIGS[family], "eager"), experts_of(CONFIGS[family], "grouped_mm")
    tokens, count, scale = 4099, exact.num_experts, 2.0
    for mine, parameter in zip(ours.parameters(), exact.parameters(), strict=True):
        parameter.data = parameter.data.normal_(std=0.03).bfloat16().float()
        mine.data = parameter.data.bfloat16()
    frozen = {name: p.detach() for name, p in exact.named_parameters()}
    adapted, matrices = ours.requires_grad_(requires_grad=False), list[torch.Tensor]()
    for name, rank in (("gate_up_proj", 16), ("down_proj", 8)):
        _, outputs, inputs = frozen[name].shape
        sizes = ((rank * count, inputs), (outputs, rank * count))
        linear = [nn.Linear(*size[::-1], bias=False, device=CUDA).bfloat16() for size in sizes]
        for each in linear:
            nn.init.normal_(each.weight, std=0.05)
        matrices += [each.weight.detach().float().requires_grad_() for each in linear]
        a, b = (nn.ModuleDict({"default": each}) for each in linear)
        wrapper = SimpleNamespace(base_layer=adapted, lora_A=a, lora_B=b, parameter_name=name)
        adapted = AdaptedExperts(wrapper, scale=scale)
    of_each: dict[str, torch.Tensor] = {}
    for name, a, b in zip(frozen, matrices[::2], matrices[1::2], strict=True):
        a_XRI = a.view(count, -1, a.shape[1])
        b_ORX = b.view(len(b), -1, count)
        of_each[name] = frozen[name] + scale * torch.einsum("orx,xri->xoi", b_ORX, a_XRI)
    chosen = (
        torch.rand(tokens, count, device=CUDA).topk(CONFIGS[family].num_experts_per_tok).indices
    )
    widths = (SIZES["hidden_size"], chosen.shape[1], SIZES["hidden_size"])
    given = [torch.randn(tokens, width, device=CUDA).bfloat16() for width in widths]
    x, weights, upstream = (each.float().requires_grad_() for each in given)
    out = torch.func.functional_call(exact, of_each, (x, chosen, weights))
    expected = [out.detach(), *torch.autograd.grad(out, [x, weights, *matrices], upstream)]
    off: dict[int, dict[str, float]] = {}
    names = ["out", "x", "weights", "gate_up a", "gate_up b", "down a", "down b"]
    trained = [
        each.weight
        for level in (adapted.base_layer, adapted)
        for each in (level.lora_A["default"], level.lora_B["default"])
    ]
    for tiles in (1, 3):
        ours.tiles = tiles
        x, weights, upstream = (each.clone().requires_grad_() for each in given)
        out = adapted(x, chosen, weights)
        found_here = [
            out.detach(),
            *torch.autograd.grad(out, [x, weights, *trained], upstream.to(out.dtype)),
        ]
        off[tiles] = dict(zip(names, map(deviation, found_here, expected), strict=True))
    tell({"case": f"{family} adapters", "apart": off})
    assert max(off[1].values()) < CLOSE
    assert all(off[3][name] < SPREAD * off[1][name] for name in names)


@pytest.mark.timeout(120)
def test_a_token_takes_as_few_bytes_of_a_layer_as_predicted():
    *_, sizes, ratios = told = list(rows(MODEL, cases=LONG, repeats=1))
    for row in told:
        tell({"case": MODEL, **row})
    assert not [row for row in told if "error" in row]
    shape = load_model(MODEL).shape
    settings, kind = Settings(loss="chunked"), shape.runs[0].kind
    one, two = (
        working_set_bytes(Step(shape, settings, Layout(), length_tokens=tokens).layer(kind))
        for tokens, _ in LONG
    )
    config = CONFIGS["qwen3_moe"].__class__.from_pretrained(load_model(MODEL).directory)
    predicted = (two - one) / (LONG[1][0] - LONG[0][0]) - kernel_bytes(config)
    tell({"case": MODEL, "predicted": predicted})
    found_bytes = sizes["layer_bytes_per_token"]["tiled"]
    assert found_bytes < MOST_BYTES
    assert found_bytes == pytest.approx(predicted, rel=0.02)
    assert len(ratios["step_time_ratio"]) == len(LONG)
