"""The routers' auxiliary loss against transformers' own, and what it follows."""

import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from closeness import assert_near
from engine_models import forward, on_meta
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.data.batches import Document, pack, shard
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.router import follow_routers
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import ModelError
from tiny_models import SIZES

ROUNDING = 5e-6
"""Norm-relative, float32: transformers sums layer by layer."""
LENGTHS = (7, 1, 5, 11, 3, 9)
_SIZES = SIZES | {"num_hidden_layers": 3, "num_experts_per_tok": 2, "output_router_logits": True}
CONFIGS = {
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(
        **_SIZES | more, moe_intermediate_size=24, num_experts=5
    ),
    "mixtral": lambda **more: transformers.MixtralConfig(**_SIZES | more, num_local_experts=5),
}


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("recomputed", [False, True])
def test_of_each_document_it_is_transformers_own_and_so_are_its_gradients(family, recomputed):
    model = built(CONFIGS[family](router_aux_loss_coef=0.5))
    documents = [document(length) for length in LENGTHS]
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    logits: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        for router in routers
    ]
    wanted = torch.zeros(())
    for each in documents:
        logits.clear()
        forward(model, pack([each]))
        wanted = wanted + len(each.ids_L) * 0.5 * load_balancing_loss_func(tuple(logits), 5, 2)
    gradients = torch.autograd.grad(wanted, [r.weight for r in routers])
    for hook in hooks:
        hook.remove()
    if recomputed:
        recompute_layers(model.layers)
    ours = forward(model, pack(documents)).router_loss
    assert ours.item() == pytest.approx(wanted.item(), rel=ROUNDING)
    assert_near(torch.autograd.grad(ours, [r.weight for r in routers]), gradients, ROUNDING)


def test_padding_is_no_token_of_the_micro_batch():
    model = built(CONFIGS["qwen3_moe"]())
    whole = pack([document(7)])
    assert shard(whole, SequenceLayout(whole.document_lengths), rank=0).padding_tokens == 0
    last = shard(whole, SequenceLayout(whole.document_lengths, 4), rank=3)
    assert (len(last.input_ids_T), last.padding_tokens) == (2, 1)
    assert shard(pack([document(5)]), SequenceLayout((5,), 4), rank=3).padding_tokens == 2
    routers = model.routers
    padded = pack([document(7), document(3)])
    routers.begin(torch.tensor([0] * 7 + [1] * 3), documents=1, is_padded=True)
    model.hidden_states(padded.input_ids_T, padded.position_ids_T, padded.document_lengths)
    lost = routers.loss(None)
    assert lost.item() == pytest.approx(forward(model, whole).router_loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["qwen3_moe"](router_aux_loss_coef=0.0),
        CONFIGS["qwen3_moe"](output_router_logits=False),
        transformers.Qwen3Config(**_SIZES),
    ],
    ids=["coefficient 0", "output_router_logits false", "no experts"],
)
def test_a_model_that_asks_for_no_auxiliary_loss_has_none(config):
    assert forward(built(config), pack([document(4)])).router_loss is None


def test_passes_that_record_no_gradient_have_none():
    model = built(CONFIGS["qwen3_moe"]())
    with torch.no_grad():
        assert forward(model, pack([document(4)])).router_loss is None


def test_a_family_follows_its_config_as_transformers_does_or_is_refused():
    sizes = {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "output_router_logits": True,
    }
    with torch.device("meta"):
        other = transformers.AutoModelForCausalLM.from_config(
            transformers.DeepseekV3Config(**sizes, first_k_dense_replace=0)
        )
        doge = transformers.AutoModelForCausalLM.from_config(
            transformers.DogeConfig(**sizes, is_moe=True)
        )
    assert follow_routers(other) is None, "transformers has the flag for it, and no loss"
    with pytest.raises(ModelError, match=r"doge .* auxiliary loss") as refused:
        follow_routers(doge)
    assert '"output_router_logits": false' in refused.value.hint
    doge.config.output_router_logits = False
    assert follow_routers(doge) is None


def document(length: int) -> Document:
    ids = torch.arange(length) * 3 % 64
    return Document(ids, ids, reward=length % 3 - 1.0)


def built(config: transformers.PreTrainedConfig) -> Decoder:
    model = on_meta(config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.backbone.rotary_emb.inv_freq.fill_(0.1)
    return model
