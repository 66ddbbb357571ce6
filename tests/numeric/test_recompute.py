"""Recomputation: what runs again in the backward pass, what is kept, what it costs, and that
dropout is drawn again as it was.
"""

from collections import Counter

import pytest
import torch
from forked_python import answer
from torch import nn
from transformers import Phi3Config, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, SeedOssConfig

from closeness import assert_equal
from dispatched import Dispatched
from engine_models import forward, on_meta, packed, recomputed
from highwater.engine.activations.recompute import draws_in_training, seeded
from highwater.engine.attention.registry import register
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fill import Fill
from highwater.engine.models.fused.fused import fuse_attentions, fuse_mlps, fuse_norms
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.engine.training.experience import forward_batch
from tiny_models import SIZES

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LAYERS, TOKENS = 3, 24


def layers_of() -> nn.ModuleList:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS})).double()
    model.config._attn_implementation = register("flash").name
    assert (fuse_norms(model), fuse_attentions(model), fuse_mlps(model, tiles=2)) == (
        4 * LAYERS + 1,
        LAYERS,
        LAYERS,
    )
    return model.model.layers


def run(layers: nn.ModuleList) -> tuple["torch.Tensor", list["torch.Tensor"], Counter]:
    """Output, every gradient, and how often each operator ran."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    positions = torch.randn(
        2, 1, TOKENS, SIZES["head_dim"], generator=generator, dtype=torch.float64
    ).unbind()
    hidden, count = x, Counter()
    with Dispatched(lambda func, *_: count.update([func])):
        for layer in layers:
            hidden = layer(
                hidden, position_embeddings=positions, sequence_layout=SequenceLayout((20, 4))
            )
        hidden.square().sum().backward()
    return hidden, [x.grad, *(p.grad for p in layers.parameters())], count


@pytest.mark.parametrize(
    ("recompute", "times"), [("none", 1), ("layer", 2), ("all-but-attention", 1)]
)
def test_the_kernel_runs_again_only_where_its_output_is_not_kept_and_the_gradients_are_the_same(
    recompute, times
):
    plain = run(layers_of())
    layers = layers_of()
    recomputed(layers, recompute)
    ours = run(layers)
    assert ours[2][ATTENTION] == 2 * LAYERS * times, "two runs of documents in each layer"
    assert torch.equal(ours[0], plain[0])
    assert_equal(ours[1], plain[1])


CPU = torch.device("cpu")
FUNCTIONAL = SeedOssConfig(
    **SIZES, attention_dropout=0.0, residual_dropout=0.3, initializer_range=0.2
)
"""Its layers keep a rate, and have no module of dropout."""
MODULES = Phi3Config(**SIZES, resid_pdrop=0.3, initializer_range=0.2, pad_token_id=0)
NONE = Qwen3Config(**SIZES)
BATCH = packed(torch.arange(24), torch.arange(9))


def built(config: PreTrainedConfig, *, recompute: str = "none") -> Decoder:
    model = on_meta(config)
    recomputed(model.layers, recompute)
    Fill(model, None, device=CPU, seed=3).one_unit(model)
    return model.train()


def trained(
    model: Decoder, *, seed: int = 0, rank: int = 0, step: int = 1
) -> tuple[float, list["torch.Tensor"]]:
    """Loss and every gradient of one step's draws."""
    model.zero_grad()
    with seeded(seed=seed, rank=rank, step=step, device=CPU):
        loss = -forward(model, BATCH).logprobs_N.mean()
        loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("config", [FUNCTIONAL, MODULES])
@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
def test_a_recomputed_layer_drops_what_it_dropped(config, recompute):
    plain_loss, plain = trained(built(config))
    loss, ours = trained(built(config, recompute=recompute))
    assert loss == plain_loss
    assert_equal(ours, plain)


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
    first, second = (forward_batch(model, [BATCH], device=CPU)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in model.modules())
    assert trained(model)[0] != pytest.approx(-float(first.mean())), "which it does drop things in"


def test_only_what_draws_is_drawn_again():
    assert not draws_in_training(built(NONE))
    assert not draws_in_training(nn.Dropout(0.0))
    assert draws_in_training(built(FUNCTIONAL).layers)
    assert draws_in_training(built(MODULES).layers)


MEASURE = (
    "import json, layer; layer.CPU_TOKENS = 509; "
    "print(json.dumps(layer.measure({model!r}, device='cpu')))"
)
"""In a process of its own: it joins a process group. Half the benchmark's tokens, a prime too."""


def test_one_layers_backward_pass_holds_no_product_of_the_mlp_and_no_copy_of_the_attention():
    row = answer(MEASURE.format(model="Qwen3-0.6B"))
    hidden, queries, keys = 2 * 1024, 2 * 16 * 128, 2 * 8 * 128
    # q before and after its norm and rotation, the output, its gradient and q's; k and v, k before,
    # and their gradients; the layer's normed input and the residual's gradient; cosines and sines,
    # which all layers share.
    floor = 5 * queries + 5 * keys + 2 * hidden + 2 * 2 * 128
    assert floor <= row["layer_bytes_per_token"] < 1.01 * floor
    assert "attention" in row["during"]
    assert sum(item["bytes_per_token"] for item in row["alive"]) == pytest.approx(
        row["bytes_per_token"]
    )
