"""The YaRN block that a recommendation names is the one that the engine writes."""

import json

import pytest
from transformers import AutoConfig

from highwater.engine.models.rope import scale_rope
from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.model.rope import yarn

_BY_KIND_OF_LAYER = ("gemma3_text", "olmo3")
"""Families whose kinds of layers have each their own RoPE, which YaRN does not stretch here."""


@pytest.mark.parametrize("rope", ["auto", "yarn"])
@pytest.mark.parametrize("name", catalog_names())
def test_the_block_is_the_engines(name, rope):
    model = load_model(name)
    native = model.shape.native_length_tokens
    for length in (native // 2, native, native + 4096, 8 * native):
        if length > native and model.own_rope_scaling and rope == "auto":
            continue  # refused
        if length > native and model.shape.model_type in _BY_KIND_OF_LAYER:
            with pytest.raises(UsageError, match="RoPE for each kind of layer"):
                scale_rope(
                    AutoConfig.from_pretrained(model.directory), length_tokens=length, rope=rope
                )
            continue
        config = AutoConfig.from_pretrained(model.directory)
        before = json.dumps(config.rope_parameters, default=str)
        scale_rope(config, length_tokens=length, rope=rope)
        found = yarn(model, length_tokens=length, rope=rope)
        if found is None:
            assert json.dumps(config.rope_parameters, default=str) == before
        else:
            assert config.rope_parameters == found.rope_parameters, (
                "a base that config.json leaves out is its family's"
            )
            assert config.max_position_embeddings == found.max_position_embeddings == length
