"""The attention with fused norm and rotation against the families' own: every gradient."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from closeness import assert_near, deviation, with_gradients
from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.models.fused.fused import RmsNorm, fuse_attentions, fuse_norms
from highwater.engine.models.fused.rotary_attention import RotaryAttention
from tiny_models import sized

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
"""Norm-relative against the family's own in float64."""
STORED_TOLERANCE = {**TOLERANCE, torch.bfloat16: 5e-3}
"""The same for one pass, whose result is rounded to its dtype once."""
_SIZES = sized(64, 24, 4, (6, 2), intermediate_size=40)
_SIZES |= dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 0)
FAMILIES = {
    "Qwen3": {"head_dim": 10},
    "Llama": {"attention_bias": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    "Mistral": {"sliding_window": 512},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 1]},
    "Glm4Moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
    },
    "Olmo": {"clip_qkv": 30.0},
}
FUSED = list(FAMILIES)[:5]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [3, 37])
@pytest.mark.parametrize("family", FUSED)
def test_fused_attention_equals_the_familys_own(family, tokens, dtype, monkeypatch):
    monkeypatch.setattr(rotary_kernels, "BLOCK_BYTES", 1024)  # 37 tokens make several blocks
    torch.manual_seed(0)
    model = small(family).to(dtype)
    fuse_norms(model)
    randomise_norms(model)
    exact = copy.deepcopy(model).double()
    layers = _SIZES["num_hidden_layers"] - (family == "SmolLM3")
    assert fuse_attentions(model) == layers
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in exact.named_parameters()
    ]
    attention, theirs = (m.model.layers[3].self_attn for m in (model, exact))
    assert isinstance(attention, RotaryAttention)
    assert not isinstance(theirs, RotaryAttention)
    x = torch.randn(1, tokens, 24, dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    cosines, sines = (torch.randn(1, tokens, attention.head_dim, dtype=dtype) for _ in range(2))
    ours, expected = (
        module(
            hidden_states=inputs,
            position_embeddings=(cosines.to(inputs), sines.to(inputs)),
            attention_mask=None,
        )[0]
        for module, inputs in ((attention, x), (theirs, wide))
    )
    found = with_gradients([ours], [x, *attention.parameters()])
    wanted = with_gradients([expected], [wide, *theirs.parameters()], rounded=dtype)
    assert {each.dtype for each in found} == {dtype}
    assert_near(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(STORED_TOLERANCE))
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (5, 3, 12), (300, 16, 128)])
def test_one_pass_equals_norm_and_rotation_in_float64(tokens, heads, size, has_norm, dtype):
    torch.manual_seed(0)
    x, upstream = (torch.randn(heads, tokens, size).transpose(0, 1).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype) if has_norm else None
    cosines, sines = torch.randn(2, tokens, size).to(dtype)
    out, scales = rotary_kernels.rotate(x, weight, 1e-6, cosines, sines)
    ours = (out, *rotary_kernels.backward(upstream, x, weight, scales, cosines, sines))
    exact = [None if t is None else t.double().requires_grad_() for t in (x, weight)]
    expected = norm_and_rotation(*exact, cosines.double(), sines.double())
    leaves = [t for t in exact if t is not None]
    wanted = (expected, *torch.autograd.grad(expected, leaves, upstream.double()))
    for mine, other in zip([t for t in ours if t is not None], wanted, strict=True):
        assert mine.dtype == dtype
        # A head of two numbers has next to no gradient along its length: what remains is rounding
        # of what cancelled.
        assert deviation(mine, other) < STORED_TOLERANCE[dtype] * (20 if size == 2 else 1)


def test_a_layer_without_positions_is_left_alone_and_its_neighbours_are_not():
    model = small("SmolLM3")
    fuse_attentions(model)
    kinds = [isinstance(layer.self_attn, RotaryAttention) for layer in model.model.layers]
    assert kinds == [True, False, True, True]


def test_every_layer_tells_the_attention_what_it_told_before():
    told: list[dict] = []

    def attend(
        module: nn.Module, query: "torch.Tensor", *_: object, **features: object
    ) -> tuple["torch.Tensor", None]:
        told.append(
            {"layer": module.layer_idx, **{name: str(value) for name, value in features.items()}}
        )
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recorded", attend)
    model = small("Qwen2")
    model.config._attn_implementation = "recorded"
    ids = torch.randint(64, (1, 9))
    model(input_ids=ids, use_cache=False)
    assert fuse_attentions(model) == 4
    model(input_ids=ids, use_cache=False)
    assert told[4:] == told[:4]
    assert {call["sliding_window"] for call in told} == {"None", "512"}


@pytest.mark.parametrize("family", ["Olmo2", "Glm", "Phi3", "Glm4Moe", "Nemotron", "Olmo"])
def test_other_attentions_are_left_alone(family):
    model = small(family)
    fuse_norms(model)
    assert fuse_attentions(model) == 0


def test_an_attention_that_does_something_of_its_own_is_left_alone():
    plain = small("Qwen3").model.layers[0].self_attn

    class Scaled(type(plain)):
        def forward(self, *args: object, **kwargs: object) -> tuple:
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    class Unscaled(type(plain)):
        def forward(self, *args: object, **kwargs: object) -> tuple:
            self.scaling = self.head_dim**-0.5
            return super().forward(*args, **kwargs)

    model = nn.ModuleDict(
        {kind.__name__: kind(plain.config, layer_idx=0) for kind in (Scaled, Unscaled, type(plain))}
    )
    fuse_norms(model)
    assert fuse_attentions(model) == 1
    assert isinstance(model[type(plain).__name__], RotaryAttention)


def test_of_a_normed_projection_its_input_and_a_number_per_head_are_kept():
    model = small("Qwen3").bfloat16()
    fuse_norms(model)
    fuse_attentions(model)
    attention = model.model.layers[0].self_attn
    kept: list[tuple[int, ...]] = []
    heads = attention.q_proj(torch.randn(1, 37, 24, dtype=torch.bfloat16))
    positions = torch.randn(2, 1, 37, 10, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        attention._rotated(heads, attention.q_norm, *positions)
    assert sorted(kept) == [(10,), (37, 6), (37, 6, 10), (37, 10), (37, 10)]


def norm_and_rotation(
    x: "torch.Tensor", weight: "torch.Tensor | None", cosines: "torch.Tensor", sines: "torch.Tensor"
) -> "torch.Tensor":
    normed = x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    first, second = normed.chunk(2, dim=-1)
    return normed * cosines[:, None] + torch.cat((-second, first), dim=-1) * sines[:, None]


def small(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**_SIZES, **FAMILIES.get(family, {}))
    return getattr(transformers, f"{family}ForCausalLM")(config)


def randomise_norms(model: nn.Module) -> None:
    """A weight of ones would hide where it goes."""
    for module in model.modules():
        if isinstance(module, RmsNorm):
            nn.init.normal_(module.weight)
