"""Which parameters decay, how AdamW is set, and how far a gradient is clipped."""

from typing import Any, cast

import pytest
import torch
from transformers import (
    LlamaConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Starcoder2Config,
    Trainer,
)

from highwater.engine.attention.registry import register
from highwater.engine.models.build import build_on_meta
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import clip
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
FAMILIES = [
    LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    Qwen2Config(**_SIZES, tie_word_embeddings=True),
    Qwen3MoeConfig(**_SIZES, head_dim=8, moe_intermediate_size=24, num_experts=4),
    Starcoder2Config(**_SIZES, use_bias=True),
    OlmoConfig(**_SIZES),
]


@pytest.mark.parametrize("config", FAMILIES, ids=[config.model_type for config in FAMILIES])
def test_what_decays_is_what_transformers_trainer_lets_decay(config):
    model = build_on_meta(
        config, attention=register("flash"), loss="full", master_dtype=torch.float32
    ).to_empty(device="cpu")
    decays = set(Trainer.get_decay_parameter_names(cast(Trainer, None), model))
    optimizer = make_optimizer(model, Hyperparameters(weight_decay=0.3))
    found = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    wanted = {name: 0.3 if name in decays else 0.0 for name, _ in model.named_parameters()}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == wanted
    assert len(found) == sum(len(group["params"]) for group in optimizer.param_groups)


def test_adamw_is_set_as_it_is_asked_for():
    asked = Hyperparameters(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    for group in make_optimizer(torch.nn.Linear(2, 2), asked).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-6)


@pytest.mark.parametrize(("most", "factor"), [(10.0, 1.0), (1.0, 0.2), (0.25, 0.05), (0.0, 1.0)])
def test_a_gradient_is_clipped_to_the_norm_that_is_asked_for(most, factor, alone):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = clip(model, mesh=process_mesh.shard_mesh(Layout(), torch.device("cpu")), max_norm=most)
    assert norm.item() == 5
    assert model.weight.grad.tolist()[0] == pytest.approx([3 * factor, 4 * factor], rel=1e-6)


def test_the_norm_of_gradients_in_bf16_is_in_float32(alone):
    """In bfloat16, of 8 bits, it would be 64."""
    model = torch.nn.Linear(64, 65, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))
    assert clip(model, mesh=mesh, max_norm=0).item() == pytest.approx(4160**0.5, rel=1e-6)
