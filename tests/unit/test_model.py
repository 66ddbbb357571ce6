"""Models: what is read from a config.json, and what is said about one that cannot be trained."""

import sys
from itertools import product
from pathlib import Path

import pytest
from studies import fifo

from highwater.errors import ModelError
from highwater.model.model import load_model
from highwater.model.model_config import MIN_FIELDS
from highwater.model.model_place import (
    cache_folder,
    catalog_model,
    catalog_names,
    is_hub_id,
    model_catalog,
    model_place,
    near_names,
)
from tiny_models import write_model, written_model

MOST_BESIDE_PUBLISHED = 0.015
"""Cards round, and some leave a part out: 32.5 billion for 32.76."""


@pytest.mark.parametrize(
    "model",
    [model for model in model_catalog() if model.published_parameters],
    ids=lambda model: model.name,
)
def test_a_catalog_model_has_as_many_parameters_as_were_published(model):
    billions = load_model(model.name).shape.parameters / 1e9
    assert billions == pytest.approx(model.published_parameters, rel=MOST_BESIDE_PUBLISHED)


def test_every_catalog_model_can_be_read_and_says_where_it_is_from():
    assert len(catalog_names()) >= 50
    assert all(load_model(name).name == name for name in catalog_names())
    assert all(model.source for model in model_catalog())
    without = [model.name for model in model_catalog() if not model.published_parameters]
    assert without == ["tiny"], "any other was published"
    folders = (model_catalog()[0].directory.parent).iterdir()
    assert sorted(folder.name for folder in folders) == catalog_names()


@pytest.mark.parametrize("field", MIN_FIELDS)
def test_a_config_without_a_needed_field_is_refused_by_the_fields_name(tmp_path, field):
    with pytest.raises(ModelError, match=field):
        written_model(tmp_path, **{field: None})


FIELDS = ("num_key_value_heads", "head_dim", "intermediate_size", "num_experts")
FIELDS = (*FIELDS, "moe_intermediate_size", "num_experts_per_tok")
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("hidden_size", value) for value in (0, -1, "64", 1.5)),
        *product(FIELDS, (0, "2", True, [64, 64])),
    ],
)
def test_a_size_that_is_no_positive_whole_number_is_refused(tmp_path, field, value):
    experts = EXPERTS if "expert" in field or field.startswith("moe") else {}
    with pytest.raises(ModelError, match=f"{field} is"):
        written_model(tmp_path, **{**experts, field: value})


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_what_a_dense_familys_config_says_of_experts_is_read_by_nobody(tmp_path, field):
    plain = written_model(tmp_path / "plain", model_type="llama").shape
    odd = {"model_type": "llama", field: 8, "num_experts_per_tok": 2}
    assert written_model(tmp_path / "odd", **odd).shape == plain


FULLY = ["full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "field", "value", "neutral"),
    [
        ("llama", "logits_scaling", 8.0, 1.0),
        ("granite", "logits_scaling", 0.0, 1.0),
        ("gemma3_text", "final_logit_softcapping", 30, 30.0),
        ("gemma3_text", "use_bidirectional_attention", True, False),
        ("phimoe", "lm_head_bias", True, False),
        ("qwen3", "layer_types", ["full_attention", "linear_attention"], FULLY),
    ],
)
def test_a_value_that_changes_attention_is_refused(tmp_path, family, field, value, neutral):
    with pytest.raises(ModelError, match=family) as refusal:
        written_model(tmp_path, model_type=family, **{field: value})
    said = "linear_attention" if field == "layer_types" else str(value)
    assert said in refusal.value.problem
    written_model(tmp_path, model_type=family, **{field: neutral})


@pytest.mark.parametrize(
    ("model_type", "has_rope"),
    [("opt", False), *((name, True) for name in ("llama", "qwen2", "qwen3", "mistral", "phi3"))],
)
def test_a_config_without_rope_has_what_its_model_type_has(tmp_path, model_type, has_rope):
    without_dropout = {"attention_probs_dropout_prob": 0.0}
    assert written_model(tmp_path, model_type=model_type, **without_dropout).rope is has_rope


def test_the_tiny_model_of_the_catalog_is_the_one_in_the_examples():
    example = Path(__file__).parents[2] / "examples" / "tiny"
    assert load_model("tiny").config_digest == load_model(str(example)).config_digest


REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def keep(cache: Path, hub_id: str, **changes: object) -> Path:
    """Put a model into the cache as ``huggingface_hub`` lays it; returns its snapshot."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = write_model(folder / "snapshots" / REVISION, **changes)
    blob = folder / "blobs" / "a-blob"
    blob.parent.mkdir()
    (snapshot / "config.json").rename(blob)
    (snapshot / "config.json").symlink_to(Path("../../blobs/a-blob"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return snapshot


def test_an_id_is_read_from_the_cache_after_paths_and_before_the_catalog(cache):
    snapshot = keep(cache, "someone/small-model")
    model = load_model("someone/small-model")
    assert (model.name, model.directory) == ("small-model", str(snapshot))
    assert model.config_digest == load_model(str(snapshot)).config_digest
    in_catalog = load_model("Qwen/Qwen3-4B")
    keep(cache, "Qwen/Qwen3-4B", num_hidden_layers=3)
    in_cache = load_model("Qwen/Qwen3-4B")
    write_model(Path("Qwen/Qwen3-4B"), num_hidden_layers=5)
    at_the_path = load_model("Qwen/Qwen3-4B")
    assert [model.shape.layers for model in (in_catalog, in_cache, at_the_path)] == [36, 3, 5]
    assert {model.name for model in (in_catalog, in_cache, at_the_path)} == {"Qwen3-4B"}
    assert load_model("Qwen3-4B") == in_catalog, "a catalog name is the catalog's"


def test_no_library_of_the_hub_is_needed_to_read_and_the_hint_installs_it(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    keep(cache, "someone/small-model")
    assert load_model("someone/small-model").shape == load_model(str(keep(cache, "b/c"))).shape
    assert load_model("Qwen/Qwen3-4B").name == "Qwen3-4B"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ModelError, match="huggingface_hub is not installed") as refusal:
        load_model("someone/another-model")
    assert "pip install" in refusal.value.hint


@pytest.mark.parametrize("revision", ["", "../../elsewhere", "no-revision", "\udcff"])
def test_a_cache_without_a_revision_of_the_model_is_no_model(cache, revision):
    snapshot = keep(cache, "someone/small-model")
    (snapshot.parents[1] / "refs" / "main").write_bytes(revision.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match="not in the Hub's cache"):
        load_model("someone/small-model")


def test_the_cache_is_where_the_hubs_own_library_has_it():
    home = Path.home()
    assert cache_folder({}) == home / ".cache/huggingface/hub"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/x"}) == home / "hf/hub"
    assert cache_folder({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}) == Path("/old")
    assert cache_folder({"HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/old"}) == Path("/c")


def test_a_tuned_model_has_its_own_name_and_a_config_file_is_its_directory(cache):
    base = load_model("Llama-3.1-8B")
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"):
        tuned = load_model(name)
        assert (tuned.name, tuned.shape) == ("Llama-3.1-8B-Instruct", base.shape)
        assert tuned.config_digest == base.config_digest
    assert load_model(tuned.name) == tuned, "what a study calls it is found again"
    directory = write_model(Path("mine"))
    assert load_model("mine/config.json") == load_model(str(directory))
    (directory / "other.json").write_text("{}")
    with pytest.raises(ModelError, match="is a file"):
        load_model("mine/other.json")


def test_every_name_of_the_catalog_means_one_model():
    ids = [hub_id.lower() for model in model_catalog() for hub_id in model.hub_ids]
    assert len(ids) == len(set(ids))
    assert all(is_hub_id(hub_id) for hub_id in ids)
    for model in model_catalog():
        for name in (model.name, *model.hub_ids):
            assert catalog_model(name) == (name, model)
        assert model.hub_id is None or model.hub_id.endswith(f"/{model.name}")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        *(("Qwen/Qwen2.5-7B-Instruct", True), ("Qwen3-4B", False), ("./Qwen/Qwen3-4B", False)),
        *(("/models/Qwen3-4B", False), ("~/Qwen3-4B", False), ("../Qwen3-4B", False)),
        *(("a/b/c", False), ("a--b/c", False), ("a/", False)),
    ],
)
def test_an_id_of_the_hub_is_told_from_a_path(text, is_id):
    assert is_hub_id(text) is is_id


def test_what_other_programs_open_is_a_path_or_the_id(cache):
    keep(cache, "someone/small-model")
    here = write_model(Path("mine"))
    assert model_place("someone/small-model").opened_as == "someone/small-model"
    assert model_place("qwen/qwen3-4b").opened_as == "Qwen/Qwen3-4B"
    assert model_place("mine").opened_as == str(here.resolve())
    assert model_place("Qwen3-4B").opened_as is None


def test_a_name_that_is_nearly_one_is_offered(cache):
    assert near_names("lama-3.1-8b")[0] == "Llama-3.1-8B"
    assert (near_names("Qwen3-4")[0], near_names("nothing-like-it")) == ("Qwen3-4B", [])
    for typed, family, first in (
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-", "Qwen/Qwen2-7B-Instruct"),
        ("gemma4-32b", "gemma-4-", "gemma-4-31B-text"),
        ("Qwen3.5-8B", "Qwen3.5-", "Qwen3.5-9B"),
    ):
        assert near_names(typed)[0] == first
        assert all(each.startswith(family) for each in near_names(typed))
    with pytest.raises(ModelError) as refusal:
        load_model("Qwen3-8")
    assert "did you mean `Qwen3-8B`" in refusal.value.hint


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_pipe_or_a_device_in_a_models_directory_is_refused_by_its_name(name, kind, tmp_path):
    directory = write_model(tmp_path / "model")
    (directory / name).unlink(missing_ok=True)
    if kind == "pipe":
        fifo(directory / name)
    else:
        (directory / name).symlink_to(kind)
    named = [directory, directory / name] if name == "config.json" else [directory]
    for each in named:
        with pytest.raises(ModelError, match=f"{name} is no regular file") as refused:
            load_model(str(each))
        assert str(directory / name) in refused.value.hint


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gemma-3-27b", "gemma-3-27b-text"),
        ("google/gemma-3-12b-it", "gemma-3-12b-text"),
        ("gemma-3-4b-it", "gemma-3-4b-text"),
        ("Mixtral-8x7B", "Mixtral-8x7B-v0.1"),
        ("llama-3-8b", "Meta-Llama-3-8B"),
    ],
)
def test_a_short_name_and_the_id_of_a_larger_model_open_the_catalogs(cache, name, model):
    place = model_place(name)
    assert (place.name, place.opened_as) == (model, None)


UNKNOWN = [("Kimi-Linear-48B-A3B-Instruct", "kimi_linear"), ("DeepSeek-V3-0324", "deepseek_v3")]
UNKNOWN += [("Kimi-K2-Instruct", "deepseek_v3"), ("GLM-5.2", "glm_moe_dsa")]
UNKNOWN += [("Qwen3-VL-30B-A3B", "qwen3_vl_moe"), ("DeepSeek-V4-Flash", "deepseek_v4")]
UNKNOWN += [("Llama-4-Scout-17B", "llama4"), ("falcon-mamba-7b", "falcon_mamba")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, f"of the family {family}, which is not supported") for name, family in UNKNOWN),
        *((name, "not in the catalog") for name in ("qwen9", "Phi-5", "gitter-1b", "mptron")),
    ],
)
def test_an_unsupported_family_says_so_and_none_of_a_name_that_begins_alike(cache, name, said):
    with pytest.raises(ModelError, match=said) as error:
        model_place(name)
    listed = "`highwater models` lists the catalog and all families"
    assert "supported" not in said or listed in error.value.hint


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("GLM-4.5", "its family, glm4_moe, trains"),
        ("Qwen3-VL-2B", "its family, qwen3_vl, trains: put its config.json here"),
        ("Qwen2.5-VL-7B-Instruct", "./config.json instead, or the like of it, `Qwen2.5-7B"),
        ("Mistral-Small-3.1-24B-Instruct", "text model of its family, mistral3, trains"),
    ],
)
def test_a_model_whose_family_trains_is_not_only_said_to_be_in_no_catalog(cache, name, family):
    with pytest.raises(ModelError, match="not in the catalog") as error:
        model_place(name)
    assert family in error.value.hint
