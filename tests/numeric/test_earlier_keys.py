"""Layers that read keys of earlier ones, and embeddings of their own: recomputed or not, gradients
are the class's own, adapters' too, and what is handed from layer to layer is let go of as layers go
backward.
"""

from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from engine_models import recomputed
from highwater.engine.attention.registry import register
from highwater.engine.models.adapters import add_adapters, peft_config
from highwater.engine.models.fused import earlier_keys
from highwater.engine.models.fused.earlier_keys import hand_over_earlier_keys
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.objective import Lora
from tiny_models import SIZES

KINDS = ("sliding_attention", "full_attention")
DOCUMENTS = (9, 1, 14)
ADAPTERS = Lora(rank=3, alpha=6)


def model_of(attention: str) -> Gemma4ForCausalLM:
    """Six layers, of which the last two read keys of the two before them."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        layer_types=[*KINDS, *KINDS, *KINDS],
        global_head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=5,
    )
    config._attn_implementation = attention
    return Gemma4ForCausalLM(config).double()


def adapt(ours: Gemma4ForCausalLM, theirs: Gemma4ForCausalLM) -> None:
    """Put the same adapters on all linear layers of both, by the engine and by peft."""
    peft = pytest.importorskip("peft", reason="LoRA needs the lora extra")
    peft.inject_adapter_in_model(peft_config(ADAPTERS, ours.config.model_type), theirs)
    add_adapters(ours, ADAPTERS, dtype=torch.float64)
    with torch.no_grad():
        for parameter in theirs.double().parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    ours.load_state_dict(theirs.state_dict(), assign=True)


def run(model: Gemma4ForCausalLM, ids_T: torch.Tensor, **how: Any) -> dict[str, torch.Tensor]:
    hidden_1TE = model.model(input_ids=ids_T[None], use_cache=False, **how).last_hidden_state
    hidden_1TE.pow(3).sum().backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.model.named_parameters()
        if parameter.grad is not None
    }
    return {"hidden": hidden_1TE.detach(), **gradients}


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("recompute", ["none", "layer", "all-but-attention"])
def test_recomputed_or_not_gradients_are_the_classs_own_and_shared_keys_are_let_go_of(
    recompute, has_adapters, monkeypatch
):
    made: list[Any] = []
    usual = earlier_keys._earlier_keys
    monkeypatch.setattr(earlier_keys, "_earlier_keys", lambda: made.append(usual()) or made[-1])
    ours, theirs = model_of(register("flash").name), model_of("eager")
    hand_over_earlier_keys(ours)
    if has_adapters:
        adapt(ours, theirs)
    recomputed(ours.model.layers, recompute)
    ids_T = torch.randint(64, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    positions_1T = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    found = run(ours, ids_T, position_ids=positions_1T, sequence_layout=SequenceLayout(DOCUMENTS))

    expected: dict[str, torch.Tensor] = {}
    parts = [run(theirs, part) for part in ids_T.split(DOCUMENTS)]
    expected = {**parts[-1], "hidden": torch.cat([part["hidden"] for part in parts], dim=1)}
    assert found.keys() == expected.keys()
    of_projection = "per_layer_model_projection.lora_A.default.weight"
    assert (of_projection in found) == has_adapters
    for name, own in expected.items():
        # float32 inside the class's norms and positions, where ours stays in float64
        assert torch.allclose(found[name], own, rtol=1e-5, atol=1e-5 * float(own.abs().max())), name
    assert len(made) == 1
    assert {*made[0]} == ({*KINDS} if recompute == "none" else set())
