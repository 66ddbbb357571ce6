"""Odd configs: whatever stands in a config.json is read or refused, by the family's name."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.api.prediction import predict
from highwater.errors import HighwaterError, ModelError
from highwater.model import rope_block
from highwater.model.families import (
    PLAIN,
    TRAINED,
    WRAPPERS,
    LogitTransform,
    logit_transform_of,
    transforms,
)
from highwater.model.model import Model, load_model
from highwater.nouns.codec import to_json
from tables import deep
from tiny_models import TINY, write_model, written_model

SLIDING, FULLY = ["sliding_attention", "full_attention"], ["full_attention"] * 2
SLIDES = {"use_sliding_window": True}
MAY_SLIDE = ("smollm3", "qwen3", "qwen2_moe", "qwen3_moe")
ALWAYS_SLIDE = (
    *("exaone4", "cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3"),
    *("afmoe", "cohere2_moe", "ministral", "mistral", "llama"),
)
FULL: dict[str, Any] = TINY | {"model_type": "qwen3_moe", "is_encoder_decoder": False}
FULL |= {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2}
FULL |= {"moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
FULL |= {"sliding_window": 8192, "max_window_layers": 1, "layer_types": SLIDING, **SLIDES}
FULL |= {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "rope_parameters": None}
FULL["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
FULL["rope_scaling"]["original_max_position_embeddings"] = 2048
FULL |= {"text_config": {}, "vision_config": {}, "torch_dtype": "bfloat16"}
FAMILIES = ("qwen3_moe", "mistral", "smollm3", "a-type-of-tomorrow")
ODD = (
    *(None, "yarn", ["llama"], [], {}, {"a": 1}, -1, 0, 1.5, 2**31 - 1, 10**30, True),
    *(float("nan"), "\ud800"),
)


def ask(directory: Path) -> None:
    """Read the model and predict it; what cannot be is a HighwaterError."""
    with suppress(HighwaterError):
        load_model(str(directory))
        to_json(predict(str(directory), gpus="1xH100-80GB", loss="chunked", allocator="expandable"))


@pytest.mark.corpus
@pytest.mark.parametrize(("turn", "field"), list(enumerate(FULL)))
def test_whatever_a_field_holds_is_read_or_refused(tmp_path, turn, field):
    """Each field with each odd thing, in each family, or in one in turn."""
    for number, odd in enumerate(ODD):
        for family in deep(*FAMILIES) or (FAMILIES[(turn + number) % len(FAMILIES)],):
            whole = {**FULL, "model_type": family}
            del whole["text_config"]
            (tmp_path / "config.json").write_text(json.dumps({**whole, field: odd}))
            ask(tmp_path)


@pytest.mark.parametrize(
    "field", ["rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"]
)
def test_so_is_whatever_its_rope_scaling_holds(tmp_path, field):
    for odd in ODD:
        write_model(tmp_path, rope_scaling={**FULL["rope_scaling"], field: odd})
        ask(tmp_path)


def asked_of(directory: Path, config: Any) -> Model:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    return load_model(str(directory))


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", '{"a":' * 100_000])
def test_a_config_that_is_no_object_of_fields_is_refused(tmp_path, text):
    with pytest.raises(ModelError):
        asked_of(tmp_path, text)


HYBRID: dict[str, Any] = {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}
HYBRID |= {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
HYBRID["position_embedding_type"] = "rope"
YARN = {"rope_type": "yarn", "original_max_position_embeddings": "4k"}
WIDE: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 128, "head_dim": None}
HUNYUAN = {"model_type": "hunyuan_v1_moe", "num_experts": 4}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": [2, 2]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": []}, r"the family qwen3, has the text_config \[\]"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
        ({"rope_scaling": YARN}, "original_max_position_embeddings is '4k'"),
        ({"model_type": ["llama"]}, r"has the model_type \['llama'\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"num_key_value_heads": 3}, "4 query heads do not go with 3 key/value heads"),
        (WIDE | {"num_key_value_heads": 8}, "a hidden size of 64"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
        ({"hidden_size": 2**30, "intermediate_size": 2**30}, "more than any model has"),
        ({"torch_dtype": "\ud800"}, "holds what is no text"),
        (HYBRID | {"layer_types": ["attention", "mamba"]}, r"layers of mamba \(Mamba-2\)"),
        (HYBRID | {"layer_types": ["linear_attention"] * 2}, r"linear_attention \(Mamba-2\)"),
        (HYBRID | {"layer_types": None}, r"layers of mamba \(Mamba-2\)"),
        (HYBRID | {"layer_types": SLIDING, "sliding_window": 8}, "layers of sliding_attention,"),
        (HYBRID | {"position_embedding_type": "nope"}, "position_embedding_type = 'nope'"),
        (HYBRID | {"position_embedding_type": None}, "has no position_embedding_type"),
        ({"model_type": "hunyuan_v1_moe", "use_mla": True}, "use_mla = True"),
        (HUNYUAN | {"moe_topk": [2, 1]}, "other numbers"),
        (HUNYUAN | {"moe_topk": [2]}, "other numbers"),
        (HUNYUAN | {"moe_topk": ["2", "2"]}, "is '2'"),
        (MIXTRAL, r"is \[2, 2\]"),
    ],
)
def test_what_cannot_be_is_said_with_its_value(tmp_path, changes, said):
    with pytest.raises(ModelError, match=said) as refusal:
        written_model(tmp_path, **changes)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llava", {"text_config": TINY, "vision_config": {}}),
        ("t5", {"d_model": 64, "num_layers": 2, "is_encoder_decoder": True}),
        ("t5", {"d_model": 64, "num_layers": 2}),
    ],
)
def test_a_family_that_is_not_understood_is_refused_by_its_name(tmp_path, family, config):
    with pytest.raises(ModelError, match=f"of the family {family}") as refusal:
        asked_of(tmp_path, {"model_type": family, **config})
    assert ("the text model alone" in refusal.value.hint) == ("text_config" in config)


@pytest.mark.parametrize(
    ("config", "mended"),
    [
        *[({"model_type": family, "sliding_window": 8}, SLIDES) for family in MAY_SLIDE],
        ({"model_type": "smollm3"}, SLIDES | {"sliding_window": 8}),
        ({"model_type": "qwen2", "use_sliding_window": False}, SLIDES | {"sliding_window": 8}),
        *[({"model_type": family}, {"layer_types": FULLY}) for family in ("qwen3", "dots1")],
        *[({"model_type": family}, {"sliding_window": 8}) for family in ALWAYS_SLIDE],
    ],
)
def test_layers_that_slide_without_a_window_are_refused_usefully(tmp_path, config, mended):
    """A null window, where the config names none and its class would."""
    experts = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 32, "n_shared_experts": 1}
    whole = {**TINY, **experts, "sliding_window": None, "layer_types": SLIDING, **config}

    with pytest.raises(ModelError, match="has no window for sliding attention") as refusal:
        asked_of(tmp_path, whole)
    assert all(field in refusal.value.hint for field in mended)
    asked_of(tmp_path, whole | mended)


def test_a_null_window_is_refused_where_the_class_masks_by_it_whatever_its_layers(tmp_path):
    full = {**TINY, "sliding_window": None, "layer_types": FULLY}
    for family in ("gemma2", "olmo3"):
        said = hint_of(tmp_path, {**full, "model_type": family})
        assert said == "set sliding_window to a number of tokens"
    assert asked_of(tmp_path, {**full, "model_type": "qwen3"}).shape.window_tokens is None


def hint_of(directory: Path, config: Any) -> str:
    with pytest.raises(ModelError) as refusal:
        asked_of(directory, config)
    return refusal.value.hint


def test_a_mistral_that_names_its_layers_is_a_ministral_as_in_transformers(tmp_path):
    config = {**TINY, "model_type": "mistral", "sliding_window": 8, "layer_types": SLIDING}
    shape = written_model(tmp_path, **config).shape
    assert shape.model_type == "ministral"
    assert [run.kind.attention.window_tokens for run in shape.runs] == [8, None]


@pytest.mark.parametrize("field", ["layer_types", "mlp_layer_types"])
@pytest.mark.parametrize("layers", [1, 3, 0])
def test_kinds_of_more_or_fewer_layers_than_there_are_are_refused(tmp_path, field, layers):
    kind = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}[field]
    with pytest.raises(ModelError, match=f"{field} names {layers} layers in .*is 2") as refusal:
        written_model(tmp_path, **{field: [kind] * layers})
    assert "name each of the 2 layers" in refusal.value.hint
    written_model(tmp_path, **{field: [kind] * 2})


def test_the_types_of_rope_are_those_of_transformers():
    module = pytest.importorskip("transformers.modeling_rope_utils")
    assert {*rope_block.TYPES} == {"default", *module.ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "yran", "factor": 2.0},
        {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": None},
        {"rope_type": ["yarn"]},
        {"rope_type": "default", "type": "yarn"},
    ],
)
def test_a_rope_type_unknown_to_transformers_is_refused_with_those_it_has(tmp_path, block, field):
    """In a block of one kind of layer, too; of both keys the newer one counts."""
    for family, rope in (("qwen3", block), ("gemma3_text", {"full_attention": block})):
        config = {"model_type": family, "sliding_window": 8, field: rope}
        directory = write_model(tmp_path, **config)
        if block.get("rope_type") == "default":
            load_model(str(directory))
            continue
        with pytest.raises(ModelError, match=f"{field} in .* has the rope_type") as refusal:
            load_model(str(directory))
        assert repr(block.get("rope_type", block.get("type"))) in refusal.value.problem
        names = refusal.value.hint.rpartition(": ")[2].split(", ")
        assert {"default", "linear", "yarn"} <= {*names}
        assert written_model(tmp_path, rope_scaling={"rope_type": names[0]})


@pytest.mark.parametrize(
    ("block", "missing"),
    [
        ({"rope_type": "linear"}, {"factor": 2.0}),
        ({"type": "yarn"}, {"factor": 2.0}),
        ({"rope_type": "dynamic", "factor": None}, {"factor": 2.0}),
        ({"rope_type": "llama3", "factor": 8.0}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ({"rope_type": "longrope", "short_factor": [1.0]}, {"long_factor": [1.0]}),
    ],
)
def test_a_rope_that_lacks_a_field_is_refused_by_its_name(tmp_path, block, missing):
    with pytest.raises(ModelError, match=f"and no {', '.join(missing)}") as refusal:
        written_model(tmp_path, rope_scaling=block)
    assert refusal.value.hint.startswith(f"add {', '.join(missing)} ")
    written_model(tmp_path, rope_scaling=block | missing)


def test_of_two_rope_blocks_the_older_names_one_counts_as_in_transformers(tmp_path):
    plain, scaled = {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}
    for scaling, parameters in ((plain, scaled), (scaled, plain)):
        model = written_model(tmp_path, rope_scaling=scaling, rope_parameters=parameters)
        assert model.own_rope_scaling == (scaling is scaled)


@pytest.mark.parametrize("family", ["laguna", "mellum"])
def test_a_class_that_reads_rope_by_kinds_of_layers_needs_a_block_for_each(tmp_path, family):
    block = {"rope_type": "default", "rope_theta": 10000.0}
    config = {"model_type": family, "sliding_window": 8, "layer_types": SLIDING, "num_experts": 64}
    for rope, lacks in ((block, "full_attention, sliding"), ({SLIDING[1]: block}, "sliding")):
        with pytest.raises(ModelError, match=f"no block for {lacks}_attention"):
            written_model(tmp_path, **config, rope_parameters=rope)
    written_model(tmp_path, **config, rope_parameters=dict.fromkeys(SLIDING, block))


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("hunyuan_v1_moe", "moe_topk"),
        ("ernie4_5_moe", "moe_k"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("mixtral", "num_experts_per_tok"),
    ],
)
def test_too_many_experts_a_token_are_refused_by_the_field_that_says_so(tmp_path, family, field):
    config = {"model_type": family, "num_experts": 4, "num_local_experts": 4, field: 6}
    config |= {"moe_num_experts": 4, "moe_intermediate_size": 32}
    with pytest.raises(ModelError, match="6 experts of 4") as refusal:
        written_model(tmp_path, **config)
    assert refusal.value.hint == f"set {field} to 4 or less"
    assert written_model(tmp_path, **{**config, field: 4}).shape.experts == 4


def test_a_text_model_is_read_from_its_wrapper_with_its_classes_defaults(tmp_path):
    """With the parameters that the classes have, all but the tower's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for name, row in WRAPPERS.items():
        for kind in row.texts:
            text = {
                **(TINY if row.usual is None else {}),
                "num_hidden_layers": 2,
                "model_type": kind,
            }
            config = {"model_type": name, "text_config": text, "vision_config": {}}
            model = asked_of(tmp_path, config)
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            with torch.device("meta"):
                whole = transformers.AutoModelForImageTextToText.from_config(theirs)
            tower = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
            tower += ("model.embed_vision.",)
            counts = {n: p.numel() for n, p in whole.named_parameters() if not n.startswith(tower)}
            assert model.shape.parameters == sum(counts.values()), name
            assert model.shape.native_length_tokens == theirs.text_config.max_position_embeddings
            assert (model.text_of, model.shape.model_type) == (name, row.texts[kind])


def test_a_flat_wrapper_is_read_as_one_with_a_text_config(tmp_path):
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
    found = asked_of(tmp_path, {**TINY, **rope, "model_type": "qwen2_5_vl", "vision_config": {}})
    assert not found.own_rope_scaling
    text = {**TINY, **rope, "model_type": "qwen2_5_vl_text"}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {}}
    assert asked_of(tmp_path, {**nested, "tie_word_embeddings": True}).shape == found.shape


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**TINY, "text_config": None}, "has the text_config None\n\nhint: remove text_config"),
        ({"model_type": "mistral3", "text_config": {"model_type": "llama"}}, "llama: it trains"),
        ({"model_type": "mistral3", "text_config": {}}, "not in text_config"),
        ({"model_type": "gemma3", "text_config": []}, "not in text_config"),
        ({"model_type": "qwen3_vl"}, "not in text_config"),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma3_text"}}, "gemma3_text: it"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "in chunks"),
    ],
)
def test_another_text_model_is_refused_by_what_it_is_missing(tmp_path, config, said):
    with pytest.raises(ModelError, match=said) as refusal:
        asked_of(tmp_path, config)
    assert refusal.value.hint


def test_a_text_model_is_refused_to_trainers_that_load_the_whole(tmp_path):
    text = {**TINY, "model_type": "qwen3_vl_text"}
    asked_of(tmp_path, {"model_type": "qwen3_vl", "text_config": text, "vision_config": {}})
    asked = {"model": str(tmp_path), "gpus": "1xH100-80GB"}
    assert predict(**asked, loss="chunked", allocator="expandable")
    with pytest.raises(HighwaterError, match="qwen3_vl, whose vision tower trl loads"):
        predict(**asked, trainer="trl")


def test_a_hybrid_is_read_by_the_layers_that_its_config_has(tmp_path):
    (run,) = written_model(tmp_path, **HYBRID).shape.runs
    assert (run.kind.mlp.width, run.kind.mlp.experts, run.kind.mlp.shared_width) == (96, 1, 0)
    experts = {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2}
    (run,) = written_model(tmp_path, **experts).shape.runs
    assert (run.kind.mlp.experts, run.kind.mlp.shared_width) == (4, 96)


@pytest.mark.corpus
def test_the_text_model_alone_is_offered_where_it_trains_and_nowhere_else(tmp_path):
    """Over every family of transformers with a text model in it, as its class writes it."""
    transformers = pytest.importorskip("transformers")
    offered: set[str] = set()
    for family, kind in transformers.CONFIG_MAPPING.items():
        config: dict[str, Any] = {}
        with suppress(Exception):  # of some no usual config can be made
            config = json.loads(kind().to_json_string(use_diff=False))
        text = config.get("text_config")
        if not isinstance(text, dict) or family in WRAPPERS:
            continue
        if "save the text model alone" in hint_of(tmp_path, config):
            offered.add(family)
            asked_of(tmp_path, text)
        else:
            assert hint_of(tmp_path, text), "refused by itself, too"
    assert {"llava", "got_ocr2"} <= offered
    assert not {"gemma3n", "gemma4", "llama4"} & offered


FACTORS = dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), "logit_scale")
FACTORS |= {"hyperclovax": "logits_scaling"}
GRANITE = "granite granite_swa granitemoe granitemoehybrid granitemoe_swa granitemoeshared"
DIVISORS = dict.fromkeys(GRANITE.split(), "logits_scaling")
CAPPED = ("beam", "gemma2", "gemma3_text", "gemma4_text", "nanochat", "vaultgemma")
CAPS = dict.fromkeys(CAPPED, "final_logit_softcapping")
FIELDS = FACTORS | DIVISORS | CAPS
TAKE_WHOLE = {"beam", "hyperclovax", *DIVISORS}
"""Families whose class takes a whole number."""
VALUES = st.floats(1e-6, 1e6)


@given(st.sampled_from(sorted(FIELDS)), VALUES)
def test_a_value_is_what_multiplies_divides_or_caps(family, value):
    found = logit_transform_of({"model_type": family, FIELDS[family]: value}, "config.json")
    if family in FACTORS:
        assert found == LogitTransform(scale=value)
    elif family in DIVISORS:
        assert found == LogitTransform(scale=1 / value)
    else:
        assert found == LogitTransform(soft_cap=value)


NO_FACTORS = (None, 0, 0.0, -1.0, -30, math.inf, math.nan, 1e9, True, "8", [8.0], {})


@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(NO_FACTORS))
def test_what_is_no_factor_and_no_cap_is_refused_by_the_fields_name(family, value):
    field = FIELDS[family]
    if value is None and family in CAPS:
        assert logit_transform_of({"model_type": family, field: None}, "config.json") == PLAIN
        return
    with pytest.raises(ModelError, match=f"of the family {family}, has {field} ") as refusal:
        logit_transform_of({"model_type": family, field: value}, "config.json")
    assert field in refusal.value.hint


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_a_whole_number_is_refused_where_the_class_refuses_it_and_the_hint_works(family):
    config: dict[str, Any] = {"model_type": family, FIELDS[family]: 8}
    if family in TAKE_WHOLE:
        assert logit_transform_of(config, "config.json") != PLAIN
        return
    with pytest.raises(ModelError, match=r"= 8\n") as refusal:
        logit_transform_of(config, "config.json")
    offered = refusal.value.hint.rpartition(" ")[2]
    assert offered == "8.0"
    logit_transform_of({**config, FIELDS[family]: json.loads(offered)}, "config.json")


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_the_class_takes_what_is_taken_and_refuses_what_is_refused(family):
    """A null factor is refused also where the class takes it: it makes no logits of it."""
    kind = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    field = FIELDS[family]
    written = json.loads(kind().to_json_string(use_diff=False))
    assert logit_transform_of({"model_type": family}, "") == logit_transform_of(written, "")
    for value in (None, 8, 8.0, True, "8"):
        try:
            kind(**{field: value})
        except Exception:  # noqa: BLE001 (of huggingface_hub, which the control plane has not)
            with pytest.raises(ModelError):
                logit_transform_of({"model_type": family, field: value}, "config.json")
        else:
            if value is not None or family in CAPS:
                logit_transform_of({"model_type": family, field: value}, "config.json")


def test_every_family_of_transformers_whose_logits_are_transformed_is_known():
    """By the source of its causal LM: what it reads of its config."""
    transformers = pytest.importorskip("transformers")
    names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    for family in sorted(TRAINED & set(transformers.CONFIG_MAPPING)):
        folder = transformers.CONFIG_MAPPING[family].__module__.split(".")[2]
        files = Path(transformers.__file__).parent.joinpath("models", folder).glob("modeling_*.py")
        source = "".join(file.read_text() for file in files)
        read = {field for field in names if f"config.{field}" in source}
        assert read == ({FIELDS[family]} if family in FIELDS else set()), family
        assert all(transforms(family, field) == (field in read) for field in names)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 7000.0}}, "rope_type"),
    ],
)
def test_rope_that_the_mixture_of_coheres_class_does_not_read_is_refused(tmp_path, rope, said):
    experts = {"model_type": "cohere2_moe", "num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ModelError, match=said):
        written_model(tmp_path, **experts, **rope)
    whole = {"rope_type": "default", "rope_theta": 7000.0}
    written_model(tmp_path, **experts, rope_parameters=whole)
