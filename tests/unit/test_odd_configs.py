"""Odd configs: whatever stands in a config.json, it is read or refused, by the family's name where
it has one.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from places import TINY, write_model

from highwater.api import predict
from highwater.errors import HighwaterError, ModelError
from highwater.spec.codec import to_json
from highwater.spec.model import load_model

FULL: dict[str, Any] = {
    **TINY,
    "model_type": "qwen3_moe",
    "is_encoder_decoder": False,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": True,
    "sliding_window": 8192,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 2,
    "rope_parameters": None,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    "text_config": {},
    "vision_config": {},
    "torch_dtype": "bfloat16",
}
ODD = (
    None,
    "yarn",
    ["llama"],
    [],
    {},
    {"a": 1},
    -1,
    0,
    1.5,
    2**31 - 1,
    10**30,
    True,
    float("nan"),
    "\ud800",
)


def ask(directory: Path) -> None:
    """Read the model and predict it; what cannot be is a HighwaterError, and everything else a
    failure of the test.
    """
    with suppress(HighwaterError):
        load_model(str(directory))
        to_json(predict(str(directory), gpus="1xH100-80GB", loss="chunked", allocator="expandable"))


@pytest.mark.corpus
@pytest.mark.parametrize("field", FULL)
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral", "smollm3", "a-type-of-tomorrow"])
def test_whatever_a_field_holds_is_read_or_refused(tmp_path: Path, family: str, field: str) -> None:
    whole = {**FULL, "model_type": family}
    del whole["text_config"]
    for odd in ODD:
        (tmp_path / "config.json").write_text(json.dumps({**whole, field: odd}))
        ask(tmp_path)


@pytest.mark.parametrize(
    "field", ["rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"]
)
def test_so_is_whatever_its_rope_scaling_holds(tmp_path: Path, field: str) -> None:
    for odd in ODD:
        write_model(tmp_path, rope_scaling={**FULL["rope_scaling"], field: odd})
        ask(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", '{"a":' * 100_000])
def test_a_config_that_is_no_object_of_fields_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": []}, r"the family qwen3, has the text_config \[\]"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "4k"}},
            "original_max_position_embeddings is '4k'",
        ),
        ({"model_type": ["llama"]}, r"has the model_type \['llama'\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"num_key_value_heads": 3}, "4 query heads do not go with 3 key/value heads"),
        (
            {
                "model_type": "llama",
                "num_attention_heads": 128,
                "num_key_value_heads": 8,
                "head_dim": None,
            },
            "a hidden size of 64",
        ),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
        ({"hidden_size": 2**30, "intermediate_size": 2**30}, "more than any model has"),
        ({"torch_dtype": "\ud800"}, "holds what is no text"),
    ],
)
def test_what_cannot_be_is_said_with_its_value(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said) as refusal:
        load_model(str(write_model(tmp_path, **changes)))
    assert refusal.value.hint


def test_a_null_text_config_is_refused_with_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "text_config": None}))
    with pytest.raises(ModelError, match="has the text_config None") as refusal:
        load_model(str(tmp_path))
    assert refusal.value.hint.startswith("remove text_config")


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llava", {"text_config": TINY, "vision_config": {}}),
        ("mistral3", {"text_config": {**TINY, "model_type": "mistral"}, "vision_config": {}}),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", "hidden_size": 64}}),
        ("t5", {"d_model": 64, "num_layers": 2, "is_encoder_decoder": True}),
        ("t5", {"d_model": 64, "num_layers": 2}),
    ],
)
def test_a_family_that_is_not_understood_is_refused_by_its_name(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **config}))
    with pytest.raises(ModelError, match=f"of the family {family}") as refusal:
        load_model(str(tmp_path))
    assert ("the text model alone" in refusal.value.hint) == ("text_config" in config)
