"""LoRA, traced: a step's peak is where the formula says."""

from typing import Any

import pytest

pytest.importorskip("peft", reason="LoRA needs the lora extra")
pytest.importorskip("bitsandbytes", reason="a model in NF4 needs the qlora extra")

from traces import RING, SHARED, alive_at, formula_bytes, peak_bytes, shape_of

from highwater.model.held_bytes import device_state_bytes
from highwater.nouns.objective import adapter_parameters
from tables import deep
from tiny_models import config_of, sized

SHAPE = config_of("tiny") | sized(2048, 256, 4, (8, 2), intermediate_size=768, head_dim=64)
LLAMA = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
PHI = SHAPE | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "pad_token_id": 0,
    # as Phi-3's: all heads together are as wide as the stream, and the MLP does not decide
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
WIDE = LLAMA | {"vocab_size": 120_000, "tie_word_embeddings": False, "num_hidden_layers": 2}
"""Most of its parameters are those of embedding and head, which are gathered first."""
TWO = {"gpus": 2}
USUAL = {"config": LLAMA, "lora": 16, "loss": "chunked", "length_tokens": 16_384}
QLORA = {"lora_base": "nf4"}
BROAD = PHI | {"num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 8192}
TRIALS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fused projections": {"config": PHI},
    "norms of heads": {"config": SHAPE},
    "attention kept": {"recompute": "all-but-attention"},
    "no recompute": {"recompute": "none"},
    "some": {"lora_targets": "q_proj,down_proj"},
    "one micro-batch": {"accumulates": False, "micro_batches": 1},
    "reference": {"objective": "grpo"},
    "pairs": {"loss": "full", "objective": "rw", "sequences_per_micro_batch": 2},
    "whole logits": {"loss": "full", "config": WIDE},
    "nf4": QLORA,
    "nf4, fused projections": {**QLORA, "config": PHI},
    "nf4, wide and fused": {**QLORA, "config": BROAD, "length_tokens": 512},
    "nf4, no recompute": {**QLORA, "recompute": "none"},
    "nf4, two copies": {**QLORA, **SHARED, "replicate_degree": 2},
    "nf4, two, wide and fused": {**QLORA, **TWO, "config": BROAD, "length_tokens": 512},
    "nf4, two, shared, no recompute": {**QLORA, **SHARED, "recompute": "none"},
    "two": TWO,
    "two, shared": SHARED,
    "two, ring": RING,
    "two, gathered": {**TWO, "config": WIDE, "length_tokens": 64},
    "offload": {"offload": True},
    "two, offload": {"offload": True, **TWO},
    "moments": {"offload": "states"},
    "two, moments": {"offload": "states", **TWO},
}
TRIALS |= {f"nf4, {name}": QLORA | TRIALS[name] for name in ("two", "two, gathered", "two, ring")}
EVERYDAY = deep(*TRIALS) or (
    *("fused projections", "some", "reference", "whole logits", "nf4", "nf4, two copies"),
    *("nf4, two", "two, ring", "two, moments"),
)
"""One of each term, of each base and of each way to divide a model."""
LAST = {*("alone", "some", "fused projections", "nf4", "nf4, two", "two", "offload", "moments")}
LAST.add("two, moments")
TOLERANCE = 0.01
"""Relative: what is no larger than one row of numbers per token is no term of the formula."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_step_peaks_where_the_formula_says(specs, logs, name):
    assert formula_bytes(specs[name]) == pytest.approx(peak_bytes(logs[name]), rel=TOLERANCE)


@pytest.mark.parametrize("name", sorted(LAST.intersection(EVERYDAY)))
def test_what_lasts_is_the_frozen_model_and_the_adapters(specs, logs, name):
    spec = specs[name]
    shape = shape_of(spec)
    lasting = sum(alive_at(logs[name], "experience").values())
    expected = device_state_bytes(shape, spec.settings, device="cuda") // spec.layout.shard_degree
    assert lasting == pytest.approx(expected, rel=0.005, abs=2**20)
    if spec.settings.offload is False:
        adapters = spec.settings.adapters
        assert adapters is not None
        trained, frozen = 16 * adapter_parameters(shape, adapters), 2 * shape.parameters
        if adapters.base == "nf4":
            linear = 4 * (2 * 512 * 256 + 2 * 128 * 256 + 3 * 768 * 256)
            means = 4 * 4 * 7
            frozen += linear // 2 + linear // 64 + linear // 64 // 64 + means - 2 * linear
        own = (frozen + trained) / spec.layout.shard_degree
        assert expected == pytest.approx(own, rel=1e-6)
