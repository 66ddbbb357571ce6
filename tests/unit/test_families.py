"""Families: what a config.json leaves out is what transformers' class has, and the window is the one its layers attend in."""

from pathlib import Path
from typing import Any

import pytest
from places import write_model

from highwater.errors import ModelError
from highwater.prediction.formula import FAMILIES
from highwater.spec.families import CLASS_DEFAULTS, DROPOUT_BY_DEFAULT, ROPE_BY_LAYER
from highwater.spec.model import load_model, window_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BIASES = 2e-3
"""Of all parameters, what a shape leaves out at the most: biases and the norms of heads."""
OTHERS = dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings"))
SMALL = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64, "head_dim": 16}
SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW = {"sliding_window": 16}
SWITCHED = {**WINDOW, "use_sliding_window": True}


def test_every_family_that_is_predicted_has_its_classs_defaults() -> None:
    assert set(CLASS_DEFAULTS) == set(FAMILIES)


def test_families_with_a_rope_for_each_kind_of_layer_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    names = pytest.importorskip("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found: set[str] = set()
    for name in set(names) - {"gemma4_assistant"}:  # its class refuses its own defaults
        rope = getattr(transformers.CONFIG_MAPPING[name](), "rope_parameters", None) or {}
        if any(isinstance(block, dict) for block in rope.values()):
            found.add(name)
    assert found <= ROPE_BY_LAYER


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1 in .*, which drops attention weights"),
        ({"attn_config": {"attn_pdrop": 0.2}}, "attn_pdrop is 0.2"),
        ({"layerdrop": 0.5}, "layerdrop is 0.5 in .*, which leaves layers out"),
        ({"model_type": "seed_oss"}, "attention_dropout is left out in .*, which drops attention weights by default"),
    ],
)
def test_dropout_of_attention_weights_and_of_layers_is_refused_by_its_field(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said) as refusal:
        load_model(str(write_model(tmp_path / "m", **config)))
    field = said.partition(" ")[0]
    assert refusal.value.hint == f"set {field} to 0.0 there"
    off = {**config, **({"attn_config": {field: 0.0}} if "attn_config" in config else {field: 0.0})}
    assert load_model(str(write_model(tmp_path / "m", **off, resid_pdrop=0.1))).name == "m"


def test_families_that_drop_attention_weights_by_default_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    names = pytest.importorskip("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found: dict[str, str] = {}
    for name in set(names) - {"gemma4_assistant"}:  # its class refuses its own defaults
        config = transformers.CONFIG_MAPPING[name]().to_dict()
        if not isinstance(config.get("text_config"), dict):
            found.update((name, field) for field in set(DROPOUT_BY_DEFAULT.values()) if config.get(field))
    assert found.items() <= DROPOUT_BY_DEFAULT.items()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_with_nothing_but_sizes_has_the_parameters_of_transformers_own_model(tmp_path: Path, family: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from highwater.engine.model import read_config

    model = load_model(str(write_model(tmp_path, model_type=family, **SIZES, **OTHERS)))
    config = read_config(model.directory, length_tokens=64, rope="auto")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert model.shape.parameters == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=BIASES)
    assert model.shape.tied_embeddings == config.tie_word_embeddings
    assert model.shape.experts == getattr(config, "num_local_experts", 1)
    assert model.shape.experts_per_token == getattr(config, "num_experts_per_tok", 1)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", **WINDOW}, 16),
        ({"model_type": "mistral", **WINDOW, "use_sliding_window": False}, 16),
        ({"model_type": "ministral"}, 4096),
        ({"model_type": "ministral", **WINDOW, "layer_types": ["full_attention"] * 4}, None),
        ({"model_type": "ministral", **WINDOW, "layer_types": [*["full_attention"] * 3, "sliding_attention"]}, 16),
        ({"model_type": "mixtral"}, None),
        ({"model_type": "mixtral", **WINDOW}, 16),
        ({"model_type": "phi3"}, None),
        ({"model_type": "phi3", **WINDOW}, 16),
        ({"model_type": "llama", **SWITCHED}, None),
        ({"model_type": "olmo2", **SWITCHED}, None),
        ({"model_type": "qwen2", **WINDOW}, None),
        ({"model_type": "qwen2", **SWITCHED}, None),
        ({"model_type": "qwen2", **SWITCHED, "max_window_layers": 3}, 16),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, 4096),
        ({"model_type": "qwen3", **SWITCHED, "max_window_layers": 4}, None),
        ({"model_type": "qwen3", **SWITCHED, "layer_types": ["sliding_attention"] * 4}, 16),
        ({"model_type": "qwen3", **WINDOW, "layer_types": ["sliding_attention"] * 4}, None),
        ({"model_type": "qwen3_moe", **SWITCHED, "max_window_layers": 9}, 16),
        ({"model_type": "qwen3_moe", **WINDOW}, None),
        ({"model_type": "smollm3", **SWITCHED}, 16),
        ({"model_type": "smollm3", **SWITCHED, "no_rope_layers": [1, 1, 1, 1]}, None),
        ({"model_type": "smollm3", **SWITCHED, "no_rope_layer_interval": 5}, None),
        ({"model_type": "smollm3", **WINDOW}, None),
        ({"model_type": "starcoder2", **WINDOW}, 16),
    ],
)
def test_the_window_is_the_one_that_transformers_layers_attend_in(
    tmp_path: Path, changes: dict[str, Any], window: int | None
) -> None:
    experts = SMALL_EXPERTS if changes["model_type"] in ("mixtral", "qwen3_moe") else {}
    model = load_model(str(write_model(tmp_path, **{**SMALL, **experts, **changes})))
    assert window_tokens(model) == window
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    told: set[int | None] = set()

    def attend(_: Any, query: Any, *__: Any, sliding_window: int | None = None, **___: Any) -> tuple[Any, None]:
        told.add(sliding_window)
        return query.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("window_recorder", attend)
    config = transformers.AutoConfig.from_pretrained(model.directory)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="window_recorder", dtype=torch.bfloat16)
        theirs(input_ids=torch.zeros((1, 8), dtype=torch.long), use_cache=False)
    assert told - {None} == ({window} - {None})


def test_a_null_window_is_full_attention(tmp_path: Path) -> None:
    directory = write_model(tmp_path, model_type="mistral")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("{", '{"sliding_window": null, ', 1))
    assert window_tokens(load_model(str(directory))) is None


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"mlp_only_layers": "all"}])
def test_layers_without_experts_among_those_with_them_are_refused_by_the_fields_name(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    moe = {"model_type": "qwen3_moe", **SMALL_EXPERTS}
    load_model(str(write_model(tmp_path, **moe, decoder_sparse_step=1, mlp_only_layers=[])))
    with pytest.raises(ModelError, match=next(iter(changes))) as refusal:
        load_model(str(write_model(tmp_path, **moe, **changes)))
    assert load_model("Qwen3-30B-A3B").name in refusal.value.hint


def test_more_experts_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="8 experts of 4") as refusal:
        load_model(str(write_model(tmp_path, model_type="qwen3_moe", num_local_experts=4)))
    assert refusal.value.hint == "set num_experts_per_tok to 4 or less"


@pytest.mark.parametrize("family", ["mixtral", "ministral"])
def test_a_config_without_a_head_size_is_read_past_its_native_length(tmp_path: Path, family: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from highwater.engine.model import read_config

    sizes = {**SMALL, **(SMALL_EXPERTS if family == "mixtral" else {}), "head_dim": None}
    model = load_model(str(write_model(tmp_path, model_type=family, **sizes)))
    config = read_config(model.directory, length_tokens=256, rope="auto")
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.head_dim == model.shape.head_dim == 64
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)
