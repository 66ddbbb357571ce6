"""LoRA as verl's actor, which is Trinity-RFT's, is predicted to train it."""

from typing import Any

import pytest

import highwater
from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.objective import adapter_parameters
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.trainers.trinity import OF_ADAPTERS, covers, footprint

SHAPE = load_model("Qwen3-4B").shape
RANK = 16


def footprint_of(**settings: Any) -> Footprint:
    """On four GPUs."""
    asked = Settings(objective="grpo", entropy="full", **settings)
    return footprint(Step(SHAPE, asked, Layout(gpus=4), length_tokens=16_384))


def peak_terms(of: Footprint) -> dict[str, int]:
    return {term.name: term.bytes for term in of.peak.terms}


def test_a_frozen_model_is_in_float32_and_adapters_have_states():
    of_whole, of_adapted = (peak_terms(footprint_of(lora=lora)) for lora in (None, RANK))
    lora = Settings(lora=RANK).adapters
    assert lora is not None
    trained = adapter_parameters(SHAPE, lora)
    assert of_adapted.pop("states") == (4 * SHAPE.parameters + 16 * trained) // 4
    assert of_whole.pop("states") == 16 * SHAPE.parameters // 4
    assert of_adapted == of_whole


def test_offloaded_all_of_it_is_in_host_memory():
    on_gpus, on_host = (footprint_of(lora=RANK, offload=offload) for offload in (False, True))
    states = peak_terms(on_gpus)["states"]
    assert peak_terms(on_host)["states"] == 0
    assert on_gpus.host_bytes == 0
    assert 4 * states < on_host.host_bytes < 5 * states  # in pinned blocks of powers of two


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_no_bundled_trace_speaks_of_adapters(model):
    asked = {"gpus": "4xA100-80GB", "trainer": "trinity"}
    whole, adapted = (highwater.predict(model, **asked, **lora) for lora in ({}, {"lora": RANK}))
    assert any(cell.replayed for cell in whole.cells)
    assert not any(cell.replayed for cell in adapted.cells)
    assert {cell.cell.settings.strategy for cell in adapted.cells} == {"fsdp2"}
    assert OF_ADAPTERS in adapted.accuracy
    assert OF_ADAPTERS not in whole.accuracy
    shape = load_model(model).shape
    of_whole = whole.cells[0].cell
    assert covers(shape, of_whole)
    assert not covers(shape, Cell(layout=of_whole.layout, settings=Settings(lora=RANK)))


def test_longer_sequences_fit_where_adapters_alone_are_trained():
    asked = {"gpus": "4xA100-80GB", "trainer": "trinity", "allocator": "expandable"}
    whole, adapted = (
        highwater.predict("Qwen3-14B", **asked, **lora, offload=False).answer.capacity_tokens
        for lora in ({}, {"lora": RANK})
    )
    assert whole < adapted
