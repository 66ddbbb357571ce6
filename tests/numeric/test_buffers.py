"""Buffers of an activation: a model without files has the values that its class builds."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from highwater.engine.models.fill import fill_buffers


def test_the_activation_of_apertus_has_the_numbers_that_its_class_gives_it():
    config = transformers.ApertusConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = transformers.AutoModelForCausalLM.from_config(config).model.layers[0].mlp.act_fn
    ours = model.model.layers[0].mlp.act_fn
    assert fill_buffers(model, ours, device=torch.device("cpu")) == []
    found = {name: float(buffer) for name, buffer in ours.named_buffers()}
    assert found == {name: float(buffer) for name, buffer in theirs.named_buffers()}
    assert found["beta"] == 0.5
