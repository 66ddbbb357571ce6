"""Families: what a config.json leaves out is what transformers' class has."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from highwater.errors import ModelError
from highwater.model.families import FAMILY_ROWS, TRAINED, family_row, logit_transform_of
from highwater.model.held_bytes import matrices
from highwater.model.model import load_model, shape_of
from highwater.model.model_config import MIN_FIELDS
from highwater.model.rope import unscalable, yarn
from highwater.model.rope_block import rope_block
from tables import table
from tiny_models import written_model

SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 32, "max_position_embeddings": 64, "pad_token_id": 0}
SMALL = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 8}
SMALL |= {"intermediate_size": 64, "head_dim": 16}
SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SMALL_COUNTS = {"num_experts": 4, "n_routed_experts": 4, **SMALL_EXPERTS, "n_shared_experts": 1}
SMALL_COUNTS |= {"num_shared_experts": 1, "shared_expert_intermediate_size": 64}
SWITCHES = (
    *("attention_bias", "attention_out_bias", "bias", "enable_bias", "mlp_bias", "qkv_bias"),
    *("use_bias", "use_post_norm", "use_qk_norm", "qk_layernorm"),
    *("do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"),
    *("word_embed_proj_dim", "gating", "num_attention_heads_per_layer"),
)
"""Fields of small parameters, which tests/unit/test_small_parameters.py has either way."""


GIVEN: dict[str, Any] = table("windows", "given")
"""A value for every field that is read of a ``config.json``, and that no class takes by default."""
LINEAR = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
WITHOUT_FIELDS = {
    "cohere2": ("sliding_window_pattern",),
    "cohere2_moe": ("first_k_dense_replace",),
    "gemma3_text": ("sliding_window_pattern",),
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    **dict.fromkeys(LINEAR, ("full_attention_interval",)),
}
"""What a class reads of a file though it is no field of its own; others read RoPE's old names."""
ROPE_BY_LAYER = {name for name, row in FAMILY_ROWS.items() if row.has_rope_by_layer}
OWN_KIND_OF_ROPE = (*ROPE_BY_LAYER, "ministral3", "phi3", "phimoe")
"""Families whose class takes no scaling but its own."""


class Recorded(dict[str, Any]):
    """A config that knows which of its fields anybody asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def __getitem__(self, field: str) -> Any:
        self.asked.add(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self.asked.add(field)
        return super().get(field, default)


def fields_of(family: str) -> set[str]:
    kind = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    old = () if family == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    names = {field.name for field in dataclasses.fields(kind)}
    return names | {*old, *WITHOUT_FIELDS.get(family, ())}


def given_of(family: str) -> dict[str, Any]:
    known = fields_of(family)
    given = {field: value for field, value in GIVEN.items() if field in known}
    if family in OWN_KIND_OF_ROPE:
        del given["rope_parameters"]
    if family_row(family).other_layers or family_row(family).delta:
        given["layer_types"] = ["full_attention"] * len(GIVEN["layer_types"])
    if family == "helium":  # whose heads share the hidden size
        given["head_dim"] = GIVEN["hidden_size"] // GIVEN["num_attention_heads"]
    kind = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    return {**given, "tie_word_embeddings": not kind().tie_word_embeddings}


def written_by_its_class(family: str, given: dict[str, Any]) -> dict[str, Any]:
    """All that the family's own config class knows of a file with these fields."""
    kind = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    return json.loads(kind(**json.loads(json.dumps(given))).to_json_string(use_diff=False))


def read(folder: Path, family: str, config: dict[str, Any]) -> tuple[object, ...] | None:
    """All that this package reads of a config; None where it refuses it."""
    whole = {"model_type": family, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    try:
        model = load_model(str(folder))
    except ModelError:
        return None
    far = 4 * model.shape.native_length_tokens
    return (
        model.shape,
        model.shape.window_tokens,
        model.own_rope_scaling,
        model.rope,
        logit_transform_of(whole, "config.json"),
        unscalable(model),
        *(yarn(model, length_tokens=far, rope=rope) for rope in ("auto", "yarn")),
    )


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_a_field_that_is_left_out_is_the_classs_or_refused(tmp_path, family):
    given = given_of(family)
    without = {field: {n: v for n, v in given.items() if n != field} for field in given}
    needed = {
        field: value
        for field, value in given.items()
        if field in MIN_FIELDS or read(tmp_path, family, without[field]) is None
    }
    left = set(given) - set(needed)
    assert len(left) > 4
    configs = [given, needed, *(without[field] for field in left)]
    configs += [{**needed, field: given[field]} for field in left]
    for config in configs:
        found = read(tmp_path, family, config)
        assert found is not None
        theirs = read(tmp_path, family, written_by_its_class(family, config))
        assert found == theirs, sorted(set(given) - set(config))
    given = given_of(family)
    for field in set(given) - set(MIN_FIELDS):
        config = {name: given[name] for name in given if name != field}
        if read(tmp_path, family, config) is None:
            assert read(tmp_path, family, written_by_its_class(family, config)) is None, field


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_every_field_that_is_read_and_that_a_class_has_is_left_out_by_the_sweep(family):
    neutral = {  # refused but at their defaults, or at 0
        *("is_encoder_decoder", "attn_logit_softcapping", "use_bidirectional_attention"),
        *("lm_head_bias", "rope_scaling", "decoder_sparse_step", "mlp_only_layers"),
        *("attention_multiplier", "hidden_act", "enable_moe_block", "model_type"),
        *(field for field in SWITCHES if field in fields_of(family)),
    }
    given = given_of(family)
    config = Recorded({"model_type": family, **given})
    shape_of(config, source="config.json")
    rope_block(config, "config.json")
    least = ("model_type", *MIN_FIELDS, *family_row(family).needs)
    least += {"helium": ("head_dim",), "granitemoehybrid": ("layer_types",)}.get(family, ())
    small = Recorded({name: value for name, value in config.items() if name in least})
    shape_of(small, source="config.json")
    asked = (config.asked | small.asked) & fields_of(family) - neutral
    assert asked <= {*given, "rope_parameters"}


def test_phi_3s_long_rope_starts_from_the_length_beside_its_block(tmp_path):
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi3 = {"model_type": "phi3", "rope_scaling": rope, "max_position_embeddings": 131072}
    found = yarn(written_model(tmp_path, **phi3), length_tokens=262144, rope="yarn")
    assert found.factor == 64, "its class takes 4096 tokens where the file says nothing"


@pytest.mark.parametrize("field", family_row("dots1").needs)
def test_experts_of_which_no_model_can_be_built_are_refused_by_the_fields_name(tmp_path, field):
    dots1 = {"model_type": "dots1", "n_routed_experts": 4, "num_experts_per_tok": 2}
    dots1 |= {"n_shared_experts": 1}
    assert written_model(tmp_path, **dots1).shape.experts == 4
    with pytest.raises(ModelError, match=f"dots1, has no {field}"):
        written_model(tmp_path, **{**dots1, field: None})


@pytest.mark.corpus
def test_families_with_a_rope_for_each_kind_of_layer_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    found: set[str] = set()
    for name in TRAINED:
        rope = getattr(transformers.CONFIG_MAPPING[name](), "rope_parameters", None) or {}
        if any(isinstance(block, dict) for block in rope.values()):
            found.add(name)
    assert found == ROPE_BY_LAYER


DROPS = "which drops attention weights"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"attention_dropout": 0.1}, f"attention_dropout is 0.1 in .*, {DROPS}"),
        ({"attn_config": {"attn_pdrop": 0.2}}, "attn_pdrop is 0.2"),
        ({"layerdrop": 0.5}, "layerdrop is 0.5 in .*, which leaves layers out"),
        ({"model_type": "seed_oss"}, f"attention_dropout is left out in .*, {DROPS} by default"),
    ],
)
def test_dropout_of_attention_weights_and_of_layers_is_refused_by_its_field(tmp_path, config, said):
    with pytest.raises(ModelError, match=said) as refusal:
        written_model(tmp_path / "m", **config)
    field = said.partition(" ")[0]
    assert refusal.value.hint == f"set {field} to 0.0 there"
    off = {"attn_config": {field: 0.0}} if "attn_config" in config else {field: 0.0}
    assert written_model(tmp_path / "m", **{**config, **off}, resid_pdrop=0.1).name == "m"


def test_families_that_drop_attention_weights_by_default_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    fields = (
        *("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
        *("layerdrop", "decoder_layerdrop"),
    )
    found: dict[str, str] = {}
    for name in TRAINED:
        config = transformers.CONFIG_MAPPING[name]().to_dict()
        found.update((name, field) for field in fields if config.get(field))
    rows = {name: row.dropout_field for name, row in FAMILY_ROWS.items() if row.dropout_field}
    assert found == rows


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_the_matrices_of_a_usual_config_are_all_its_parameters_but_norms(tmp_path, family):
    pytest.importorskip("transformers")
    least = {field: GIVEN[field] for field in family_row(family).needs} | {"attention_dropout": 0.0}
    if family_row(family).other_layers:
        least["layer_types"] = ["full_attention"] * 32
    (tmp_path / "config.json").write_text(json.dumps(written_by_its_class(family, least)))
    shape = load_model(str(tmp_path)).shape
    with_norms = sum(run.count * run.kind.parameters for run in shape.runs)
    found = sum(count * rows * size for count, rows, size in matrices(shape))
    assert found == pytest.approx(with_norms + shape.parameters_outside_layers, rel=1e-2)


@pytest.mark.corpus
@pytest.mark.parametrize(("changes", "window"), table("windows", "windows"))
def test_the_window_is_the_one_that_transformers_layers_attend_in(tmp_path, changes, window):
    family = changes["model_type"]
    experts = SMALL_EXPERTS if family in ("mixtral", "qwen3_moe") else {}
    if family_row(family).experts and not experts:
        experts = {name: SMALL_COUNTS[name] for name in SMALL_COUNTS if name in fields_of(family)}
    model = written_model(tmp_path, **{**SMALL, **experts, **changes})
    assert model.shape.window_tokens == window
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    told: list[int | None] = []

    def attend(layer: Any, query: Any, *_: Any, **features: Any) -> tuple[Any, None]:
        # Qwen2-MoE puts its window into the mask and does not hand it on.
        told.append(features.get("sliding_window", getattr(layer, "sliding_window", None)))
        return query.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("window_recorder", attend)
    config = transformers.AutoConfig.from_pretrained(model.directory)
    asked = {"attn_implementation": "window_recorder", "dtype": torch.bfloat16}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, **asked)
        theirs(input_ids=torch.zeros((1, 8), dtype=torch.long), use_cache=False)
    kinds = [run.kind for run in model.shape.runs for _ in range(run.count)]
    assert told == [kind.attention.window_tokens for kind in kinds]


@pytest.mark.parametrize(
    "changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"mlp_only_layers": "all"}]
)
def test_layers_without_experts_among_others_are_refused_by_the_fields_name(tmp_path, changes):
    moe = {"model_type": "qwen3_moe", **SMALL_EXPERTS}
    written_model(tmp_path, **moe, decoder_sparse_step=1, mlp_only_layers=[])
    with pytest.raises(ModelError, match=next(iter(changes))) as refusal:
        written_model(tmp_path, **moe, **changes)
    assert load_model("Qwen3-30B-A3B").name in refusal.value.hint


@pytest.mark.parametrize(
    ("field", "usual", "other"),
    [("gating", True, "per-element"), ("num_attention_heads_per_layer", [4, 4], [4, 8])],
)
def test_other_gates_or_heads_of_laguna_are_refused_by_the_field(tmp_path, field, usual, other):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    laguna = {"model_type": "laguna", **SMALL_COUNTS, **sizes}
    written_model(tmp_path, **laguna, **{field: usual})
    with pytest.raises(ModelError, match=f"has {field} = .* not supported"):
        written_model(tmp_path, **laguna, **{field: other})


@pytest.mark.parametrize("family", ["mixtral", "ministral"])
def test_a_config_without_a_head_size_is_read_past_its_native_length(tmp_path, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from highwater.engine.models.build import read_config

    sizes = {**SMALL, **(SMALL_EXPERTS if family == "mixtral" else {}), "head_dim": None}
    model = written_model(tmp_path, model_type=family, **sizes)
    config = read_config(model.directory, length_tokens=256, rope="auto")
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.head_dim == model.shape.head_dim == 64
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)
