"""Dropout: recomputed as it was drawn, a stream for each rank and step, and off where no gradient
is recorded.
"""

import pytest
import torch
from torch import nn
from transformers import Phi3Config, PreTrainedConfig, Qwen3Config, SeedOssConfig

from highwater.engine.activations.recompute import draws_in_training, recompute_layers, seeded
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Document, pack
from highwater.engine.models.build import build_on_meta
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fill import Fill
from highwater.engine.training.experience import forward_batch

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FUNCTIONAL = SeedOssConfig(
    **SHAPE, **HEADS, head_dim=8, attention_dropout=0.0, residual_dropout=0.3, initializer_range=0.2
)
"""Its layers keep a rate, and have no module of dropout."""
MODULES = Phi3Config(**SHAPE, **HEADS, resid_pdrop=0.3, initializer_range=0.2, pad_token_id=0)
NONE = Qwen3Config(**SHAPE, **HEADS, head_dim=8)


def built(config: PreTrainedConfig, *, recompute: str = "none") -> Decoder:
    attention = register("flash")
    model = build_on_meta(config, attention=attention, loss="full", master_dtype=torch.float32)
    if recompute != "none":
        recompute_layers(
            model.layers,
            keeping=attention.kept_in_recompute if recompute == "all-but-attention" else None,
        )
    Fill(model, None, device=CPU, seed=3).one_unit(model)
    return model.train()


def batch():
    ids = torch.arange(24) % 64
    return pack([Document(ids, ids), Document(ids[:9], ids[:9])])


def trained(
    model: Decoder, *, seed: int = 0, rank: int = 0, step: int = 1
) -> tuple[float, list["torch.Tensor"]]:
    """Loss and every gradient of one step's draws."""
    one = batch()
    model.zero_grad()
    with seeded(seed=seed, rank=rank, step=step, device=CPU):
        statistics = model(
            one.input_ids_T,
            one.position_ids_T,
            one.trained_positions_N,
            one.labels_N,
            one.document_lengths,
        )
        loss = -statistics.logprobs_N.mean()
        loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("config", [FUNCTIONAL, MODULES])
@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
def test_a_recomputed_layer_drops_what_it_dropped(config, recompute):
    plain_loss, plain = trained(built(config))
    loss, ours = trained(built(config, recompute=recompute))
    assert loss == plain_loss
    for mine, wanted in zip(ours, plain, strict=True):
        assert torch.equal(mine, wanted)


def test_a_step_draws_the_same_again_and_another_rank_step_or_seed_something_else():
    model = built(FUNCTIONAL)
    before = torch.get_rng_state()
    losses = [
        trained(model, **which)[0] for which in ({}, {}, {"rank": 1}, {"step": 2}, {"seed": 1})
    ]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4
    assert torch.equal(torch.get_rng_state(), before), (
        "a user's data source draws as if there were no dropout"
    )


@pytest.mark.parametrize("config", [FUNCTIONAL, MODULES])
def test_passes_without_a_gradient_drop_nothing_and_leave_the_model_in_training(config):
    model = built(config)
    first, second = (forward_batch(model, [batch()], device=CPU)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in model.modules())
    assert trained(model)[0] != pytest.approx(-float(first.mean())), "which it does drop things in"


def test_only_what_draws_is_drawn_again():
    assert not draws_in_training(built(NONE))
    assert not draws_in_training(nn.Dropout(0.0))
    assert draws_in_training(built(FUNCTIONAL).layers)
    assert draws_in_training(built(MODULES).layers)
