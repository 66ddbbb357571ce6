"""The routers' auxiliary loss against transformers' own, and what it follows."""

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func  # noqa: E402

from highwater.attention.dense import register  # noqa: E402
from highwater.engine.data import Document, pack, shard  # noqa: E402
from highwater.engine.model import LanguageModel, build_on_meta  # noqa: E402
from highwater.engine.recompute import recompute_layers  # noqa: E402

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": lambda **more: Qwen3MoeConfig(**_SIZES, head_dim=8, moe_intermediate_size=24, num_experts=5, **more),
    "mixtral": lambda **more: MixtralConfig(**_SIZES, num_local_experts=5, **more),
}


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_loss_and_its_gradients_are_transformers_own(family: str, recomputed: bool) -> None:
    model = built(CONFIGS[family](router_aux_loss_coef=0.5))
    batch = pack([Document(ids := torch.arange(length) % 64, ids) for length in (7, 1, 5)])
    logits: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: logits.append(output[0])) for router in routers]
    expected = forward(model, batch)
    wanted = 0.5 * load_balancing_loss_func(tuple(logits), 5, 2)
    gradients = torch.autograd.grad(wanted, [r.weight for r in routers], retain_graph=True)
    for hook in hooks:
        hook.remove()
    del expected
    if recomputed:
        recompute_layers(model.layers)
    ours = forward(model, batch)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(ours, [r.weight for r in routers]), gradients, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 5e-6


def test_padding_is_no_token_of_the_micro_batch() -> None:
    model = built(CONFIGS["qwen3_moe"]())
    ids = torch.arange(7)
    whole = pack([Document(ids, ids)])
    padded = shard(pack([Document(ids, ids)]), degree=1, rank=0)
    assert padded.padding_tokens == 0
    last = shard(whole, degree=4, rank=3)
    assert (len(last.input_ids_T), last.padding_tokens) == (2, 1)
    assert shard(pack([Document(ids[:5], ids[:5])]), degree=4, rank=3).padding_tokens == 2
    with_padding = pack([Document(ids, ids), Document(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))])
    lost = model(*arguments(with_padding), 3).router_loss
    assert lost.item() == pytest.approx(forward(model, whole).item(), rel=1e-6)


@pytest.mark.parametrize("config", [CONFIGS["qwen3_moe"](router_aux_loss_coef=0.0), Qwen3Config(**_SIZES, head_dim=8)])
def test_a_model_that_asks_for_no_auxiliary_loss_has_none(config: object) -> None:
    model = built(config)
    assert forward(model, pack([Document(torch.arange(4), torch.arange(4))])) is None


def built(config: object) -> LanguageModel:
    model = build_on_meta(config, attention=register("flash"), loss="full", master_dtype=torch.float32).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.backbone.rotary_emb.inv_freq.fill_(0.1)
    return model


def arguments(batch: object) -> tuple:
    return (batch.input_ids_T, batch.position_ids_T, batch.trained_positions_N, batch.labels_N, batch.document_lengths)


def forward(model: LanguageModel, batch: object) -> "torch.Tensor | None":
    return model(*arguments(batch)).router_loss
