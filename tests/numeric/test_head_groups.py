"""Attention in head groups against all heads at once."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from closeness import deviation
from dispatched import Dispatched
from engine_models import forward, on_meta, packed, recomputed
from highwater.engine.activations.recompute import PREFIX
from highwater.engine.models.adapters import A, B, add_adapters
from highwater.engine.models.build import group_heads, tile_mlps
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fill import Fill
from highwater.engine.models.fused import rotary_attention
from highwater.engine.models.fused.nf4 import pack as pack_weights
from highwater.engine.models.fused.nf4 import scale_table
from highwater.engine.models.fused.rotary_attention import RotaryAttention
from highwater.errors import ModelError
from highwater.nouns.objective import Lora
from tiny_models import sized

EXACT = 1e-12
"""Norm-relative, in float64: the same products, some of fewer columns at a time."""
SPREAD = 1.1
"""How much further from float64 than all heads at once, in bfloat16: which of two roundings is the
nearer one is chance."""
_SHAPE = sized(64, 64, 2, (8, 4), intermediate_size=96, initializer_range=0.2, pad_token_id=0)
FAMILIES: dict[str, transformers.PreTrainedConfig] = {
    "norms of heads": transformers.Qwen3Config(**_SHAPE, head_dim=16),
    "biases": transformers.LlamaConfig(**_SHAPE, attention_bias=True),
    "biases, windows in a layer": transformers.Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "windows": transformers.MistralConfig(**_SHAPE, sliding_window=5),
    "a head of keys for each of queries": transformers.LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 8}
    ),
    "experts": transformers.Qwen3MoeConfig(
        **_SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
ROWS = {"one": (37,), "equal": (12, 12, 12), "mixed": (20, 1, 9, 9)}
CPU = torch.device("cpu")


def built(
    config: transformers.PreTrainedConfig,
    *,
    groups: int = 1,
    recompute: str = "layer",
    dtype: torch.dtype = torch.float64,
    lora: Lora | None = None,
) -> Decoder:
    model = on_meta(config, dtype=dtype)
    tile_mlps(model, None)
    group_heads(model, groups)
    if lora is not None:
        add_adapters(model.causal_lm, lora, dtype=dtype)
    recomputed(model.layers, recompute)
    Fill(model, None, device=CPU, seed=3).one_unit(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # zeros and ones, as biases, norms and the adapters' B begin, would hide where they go
            if parameter.ndim == 1 or name.endswith((A, B)):
                numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.5 * numbers)
    if lora is not None and lora.base == "nf4":
        pack_weights(model, scale_table(CPU), fill=lambda _: None)
    return model.train()


def trained(model: Decoder, lengths: tuple[int, ...]) -> dict[str, "torch.Tensor"]:
    ids = torch.arange(sum(lengths)) * 7 % 64
    loss = -forward(model, packed(*ids.split(lengths))).logprobs_N.mean()
    loss.backward()
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    gradients = {name.replace(PREFIX, ""): p.grad for name, p in trained}
    assert all(gradient is not None for gradient in gradients.values())
    return {"loss": loss.detach(), **gradients}


def assert_equal(ours: dict[str, "torch.Tensor"], wanted: dict[str, "torch.Tensor"]) -> None:
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert ours[name].dtype == gradient.dtype
        assert deviation(ours[name], gradient) < EXACT, name


@pytest.mark.parametrize(("rows", "groups"), [("one", 2), ("equal", 4), ("mixed", 2), ("mixed", 4)])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_every_gradient_are_those_of_all_heads_at_once(family, groups, rows):
    plain = trained(built(FAMILIES[family], recompute="none"), ROWS[rows])
    assert_equal(trained(built(FAMILIES[family], groups=groups), ROWS[rows]), plain)


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("family", list(FAMILIES)[:3])
def test_attention_that_is_kept_is_kept_by_groups_and_not_computed_again(family, rows):
    plain = trained(built(FAMILIES[family], recompute="none"), ROWS[rows])
    model = built(FAMILIES[family], groups=4, recompute="all-but-attention")
    assert_equal(trained(model, ROWS[rows]), plain)


@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=3, alpha=6, targets="all-linear", base="bf16"),
        Lora(rank=3, alpha=6, targets="all-linear", base="nf4"),
        Lora(rank=2, alpha=3, targets="k_proj,o_proj", base="bf16"),
        Lora(rank=2, alpha=3, targets="q_proj,down_proj", base="nf4"),
    ],
)
@pytest.mark.parametrize("family", ["norms of heads", "biases"])
def test_adapters_beside_plain_and_packed_weights_have_the_same_gradients(family, lora):
    pytest.importorskip("peft")
    plain = trained(built(FAMILIES[family], lora=lora), ROWS["mixed"])
    assert_equal(trained(built(FAMILIES[family], lora=lora, groups=2), ROWS["mixed"]), plain)


@pytest.mark.parametrize("family", list(FAMILIES)[:4])
def test_in_bfloat16_groups_round_no_more_than_all_heads_at_once(family):
    exact = trained(built(FAMILIES[family], recompute="none"), ROWS["mixed"])
    off = []
    for groups in (1, 4):
        found = trained(built(FAMILIES[family], groups=groups).bfloat16(), ROWS["mixed"])
        off.append({name: float(deviation(found[name], exact[name])) for name in exact})
    plain, ours = off
    mean = sum(ours.values()) / sum(plain.values())
    assert mean < SPREAD


def test_attention_is_alive_for_one_group_of_heads_at_a_time():
    """Forward and backward, but for what it returned: sizes of all tensors that come to be."""
    seen: list[tuple[int, ...]] = []

    def see(_func: object, _args: object, found: object) -> None:
        seen.extend(tuple(each.shape) for each in tree_leaves(found) if torch.is_tensor(each))

    model = built(FAMILIES["norms of heads"], groups=4)
    with Dispatched(see):
        trained(model, ROWS["one"])
    heads = {shape[1] for shape in seen if len(shape) == 4 and shape[2:] == (37, 16)}
    assert heads == {2, 1}, "two heads of queries, and one of keys, which the CPU repeats"


def test_queries_of_too_many_numbers_go_in_as_few_groups_as_kernels_take(monkeypatch):
    plain = trained(built(FAMILIES["windows"]), ROWS["one"])
    model = built(FAMILIES["windows"])
    attention = next(each for each in model.modules() if isinstance(each, RotaryAttention))
    numbers = 37 * 64
    for most, groups in ((numbers + 1, 1), (numbers, 2), (numbers // 2, 4), (1, 1)):
        monkeypatch.setattr(rotary_attention, "MOST_NUMBERS", most)
        assert attention._groups(37, None) == groups
    monkeypatch.setattr(rotary_attention, "MOST_NUMBERS", numbers)
    assert_equal(trained(model, ROWS["one"]), plain)


def test_layers_that_are_not_ours_do_not_go_in_groups():
    with pytest.raises(ModelError, match="smollm3 has an attention of its own in 1 of 4 layers"):
        built(transformers.SmolLM3Config(**{**_SHAPE, "num_hidden_layers": 4}), groups=2)
    built(transformers.SmolLM3Config(**{**_SHAPE, "num_hidden_layers": 4}))


@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
def test_the_kernel_goes_forward_no_more_often_than_without_groups(recompute):
    calls = {groups: Counter() for groups in (1, 4)}
    for groups, count in calls.items():
        model = built(FAMILIES["biases"], groups=groups, recompute=recompute)
        with Dispatched(lambda func, *_, count=count: count.update([str(func)])):
            trained(model, ROWS["one"])
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert calls[4][name] == 4 * calls[1][name] > 0
    assert calls[4][name.replace(".default", "_backward.default")] == 4 * 2
