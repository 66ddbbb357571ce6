"""Recomputation: what runs again in the backward pass, what is kept, and that nothing else
changes.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.attention.registry import register
from highwater.engine.models.fused.fused import fuse_attentions, fuse_mlps, fuse_norms
from highwater.engine.parallel.sequence_layout import SequenceLayout

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LAYERS, TOKENS, HEADS, SIZE = 3, 24, 4, 8


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def layers_of() -> nn.ModuleList:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_hidden_layers": LAYERS,
    }
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": SIZE}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).double()
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
    positions = torch.randn(2, 1, TOKENS, SIZE, generator=generator, dtype=torch.float64).unbind()
    hidden = x
    with Calls() as calls:
        for layer in layers:
            hidden = layer(
                hidden, position_embeddings=positions, sequence_layout=SequenceLayout((20, 4))
            )
        hidden.square().sum().backward()
    return hidden, [x.grad, *(p.grad for p in layers.parameters())], calls.count


@pytest.mark.parametrize(("keep_attention", "times"), [(None, 1), (False, 2), (True, 1)])
def test_the_kernel_runs_again_only_where_its_output_is_not_kept_and_the_gradients_are_the_same(
    keep_attention, times
):
    plain = run(layers_of())
    layers = layers_of()
    if keep_attention is not None:
        recompute_layers(
            layers, keeping=register("flash").kept_in_recompute if keep_attention else None
        )
    ours = run(layers)
    assert ours[2][ATTENTION] == 2 * LAYERS * times, "two runs of documents in each layer"
    assert torch.equal(ours[0], plain[0])
    for mine, wanted in zip(ours[1], plain[1], strict=True):
        assert torch.equal(mine, wanted)
