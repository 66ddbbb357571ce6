"""Moments alone in host memory, traced: a step's peak is where the formula says, and what lasts on
the GPU is parameters and gradients.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from traces import alive_at, requested_bytes, traced, trial

from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.footprint import device_state_bytes, gradient_bytes, update_bytes
from highwater.model.model import load_model
from highwater.nouns.events import EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec

SHAPE = json.loads(Path(load_model("tiny").directory, "config.json").read_text()) | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DEEP = SHAPE | {"num_hidden_layers": 24}
"""States of few tokens are most of it, and the update is the peak."""
WIDE = SHAPE | {"vocab_size": 120_000, "tie_word_embeddings": False, "num_hidden_layers": 2}
"""Of whose embedding a piece is a part."""
STATES: dict[str, Any] = {"offload": "states", "loss": "chunked"}
ONE: dict[str, Any] = {
    "settings": Settings(**STATES, accumulates=False),
    "micro_batches": 1,
}
SHORT: dict[str, Any] = {"config": DEEP, "length_tokens": 64}
TRIALS: dict[str, dict[str, Any]] = {
    "alone": {},
    "one micro-batch": ONE,
    "no recompute": {"settings": Settings(**STATES, recompute="none")},
    "whole logits": {"settings": Settings(offload="states")},
    "reference": {"settings": Settings(**STATES, objective="grpo")},
    "critic": {"settings": Settings(**STATES, objective="ppo", critic=True)},
    "two": {"layout": Layout(gpus=2)},
    "two, shared": {"layout": Layout(gpus=2, ulysses_degree=2)},
    "copies": {"layout": Layout(gpus=2, replicate_degree=2)},
    "short": SHORT,
    "short, one micro-batch": {**SHORT, **ONE},
    "short, two": {**SHORT, "layout": Layout(gpus=2)},
    "wide": {"config": WIDE, "length_tokens": 64},
    "wide, two, one micro-batch": {
        **ONE,
        "config": WIDE,
        "length_tokens": 64,
        "layout": Layout(gpus=2),
    },
}
TOLERANCE = 0.01
"""Relative: what is no larger than one row of numbers per token is no term of the formula."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrialSpec]:
    root = tmp_path_factory.mktemp("trials")
    usual = {"config": SHAPE, "settings": Settings(**STATES), "length_tokens": 16_384}
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


@pytest.mark.parametrize("name", TRIALS)
def test_what_lasts_on_the_gpu_has_no_moments(specs, logs, name):
    spec = specs[name]
    shape, shards = load_model(spec.model_directory).shape, spec.layout.shard_degree
    expected = device_state_bytes(shape, spec.settings, device="cuda", shards=shards)
    if not spec.settings.keeps_gradients:
        expected -= gradient_bytes(shape, spec.settings)
    lasting = sum(alive_at(logs[name], "experience").values())
    # norms, a step for each parameter, and the rows that the last shard lacks
    assert lasting == pytest.approx(expected // shards, rel=0.01, abs=2**20)


@pytest.mark.parametrize("name", TRIALS)
def test_an_update_takes_its_buffers_and_leaves_nothing(specs, logs, name):
    spec = specs[name]
    shape, shards = load_model(spec.model_directory).shape, spec.layout.shard_degree
    buffers = update_bytes(shape, spec.settings, shards=shards)
    states = device_state_bytes(shape, spec.settings, device="cuda", shards=shards) // shards
    found = requested_bytes(logs[name])["optimizer"]
    assert buffers < found < states + buffers + 2**21
    if name.startswith("short"):
        assert found > states + 0.99 * buffers
