"""LoRA, traced: a step's peak is where the formula says, and what lasts is the frozen model in
bfloat16 and four numbers of float32 for each of an adapter's.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="LoRA needs the lora extra")
pytest.importorskip("bitsandbytes", reason="a model in NF4 needs the qlora extra")

from traces import alive_at, traced, trial

from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.footprint import device_state_bytes
from highwater.model.model import load_model
from highwater.nouns.events import EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.lora import adapter_parameters
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec

SHAPE = json.loads(Path(load_model("tiny").directory, "config.json").read_text()) | {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
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
LORA = {"lora": 16, "loss": "chunked"}
QLORA = LORA | {"lora_base": "nf4"}
TRIALS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fused projections": {"config": PHI},
    "norms of heads": {"config": SHAPE},
    "attention kept": {"settings": Settings(**LORA, recompute="all-but-attention")},
    "no recompute": {"settings": Settings(**LORA, recompute="none")},
    "some": {"settings": Settings(**LORA, lora_targets="q_proj,down_proj")},
    "one micro-batch": {"settings": Settings(**LORA, accumulates=False), "micro_batches": 1},
    "reference": {"settings": Settings(**LORA, objective="grpo")},
    "pairs": {"settings": Settings(lora=16, objective="rw", sequences_per_micro_batch=2)},
    "whole logits": {"settings": Settings(lora=16), "config": WIDE},
    "nf4": {"settings": Settings(**QLORA)},
    "nf4, fused projections": {"settings": Settings(**QLORA), "config": PHI},
    "nf4, wide and fused": {
        "settings": Settings(**QLORA),
        "config": PHI | {"num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 8192},
        "length_tokens": 512,
    },
    "nf4, no recompute": {"settings": Settings(**QLORA, recompute="none")},
    "nf4, two copies": {
        "settings": Settings(**QLORA),
        "layout": Layout(gpus=2, ulysses_degree=2, replicate_degree=2),
    },
    "two": {"layout": Layout(gpus=2)},
    "two, shared": {"layout": Layout(gpus=2, ulysses_degree=2)},
    "two, ring": {"layout": Layout(gpus=2, ring_degree=2)},
    "two, gathered": {"layout": Layout(gpus=2), "config": WIDE, "length_tokens": 64},
    "offload": {"settings": Settings(**LORA, offload=True)},
    "two, offload": {"settings": Settings(**LORA, offload=True), "layout": Layout(gpus=2)},
    "moments": {"settings": Settings(**LORA, offload="states")},
    "two, moments": {"settings": Settings(**LORA, offload="states"), "layout": Layout(gpus=2)},
}
TOLERANCE = 0.01
"""Relative: what is no larger than one row of numbers per token is no term of the formula."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrialSpec]:
    root = tmp_path_factory.mktemp("trials")
    usual = {"config": LLAMA, "settings": Settings(**LORA), "length_tokens": 16_384}
    return {name: trial(root / name, **{**usual, **asked}) for name, asked in TRIALS.items()}


@pytest.fixture(scope="module")
def logs(
    specs: dict[str, TrialSpec], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EventLog]:
    return traced(specs, tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("name", TRIALS)
def test_a_step_peaks_where_the_formula_says(specs, logs, name):
    spec = specs[name]
    shape = load_model(spec.model_directory).shape
    predicted = footprint(Step(shape, spec.settings, spec.layout, length_tokens=spec.length_tokens))
    traced_bytes = replay(logs[name], allocator="expandable").peak_allocated_bytes
    assert predicted.allocated_bytes == pytest.approx(traced_bytes, rel=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    ["alone", "some", "fused projections", "nf4", "two", "offload", "moments", "two, moments"],
)
def test_what_lasts_is_the_frozen_model_and_the_adapters(specs, logs, name):
    spec = specs[name]
    shape = load_model(spec.model_directory).shape
    lasting = sum(alive_at(logs[name], "experience").values())
    expected = device_state_bytes(shape, spec.settings, device="cuda") // spec.layout.shard_degree
    assert lasting == pytest.approx(expected, rel=0.005, abs=2**20)
    if spec.settings.offload is False:
        adapters = spec.settings.adapters
        assert adapters is not None
        trained = 16 * adapter_parameters(shape, adapters) // spec.layout.shard_degree
        frozen = 2 * shape.parameters // spec.layout.shard_degree
        if adapters.base == "nf4":
            linear = 8 * (2 * 512 * 256 + 2 * 128 * 256 + 3 * 768 * 256)
            means = 4 * 8 * 7
            frozen += linear // 2 + linear // 64 + linear // 64 // 64 + means - 2 * linear
        assert expected == pytest.approx(frozen + trained, rel=1e-6)
