"""Counts: a model has as many parameters as its own class builds, whatever its sizes."""

import json
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from highwater.errors import ModelError
from highwater.memory.formula.formula import FAMILIES
from highwater.memory.formula.moments import families
from highwater.model.families import FAMILY_ROWS, REFUSED, TRAINED, WRAPPERS, family_row
from highwater.model.model import ModelShape, load_model
from highwater.model.model_place import catalog_names
from places import script
from tables import deep
from tiny_models import written_model

(DRAWS,) = deep(3) or (1,)
SWITCHES = ("bias", "norm")
"""Parts of the names of fields that may switch small parameters on."""
SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WITHOUT_HEAD_SIZE = ("helium",)
"""Families whose heads have a size of their own that no other works for: together the hidden
size's."""


def draw(family: str, number: int) -> dict[str, Any]:
    """Sizes that tell all parts of a model apart, of those fields that the family's class has."""
    transformers = pytest.importorskip("transformers")
    drawn = random.Random(number)
    kind = transformers.CONFIG_MAPPING[family]
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {})}
    layers, kv_heads = drawn.choice((3, 4, 5)), drawn.choice((2, 4))
    heads, head_dim = kv_heads * drawn.choice((2, 3)), drawn.choice((8, 16, 24))
    is_shared = "head_dim" not in known or family in WITHOUT_HEAD_SIZE
    sizes: dict[str, Any] = {
        "vocab_size": drawn.choice((96, 128, 304)),
        "hidden_size": heads * (head_dim if is_shared else 8 * drawn.choice((4, 5, 7))),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": drawn.choice((64, 96)),
        **dict.fromkeys(("intermediate_size", "ffn_dim"), 16 * drawn.choice((5, 7, 9))),
        "moe_intermediate_size": 8 * drawn.choice((3, 5)),
        "prefix_dense_intermediate_size": 8 * drawn.choice((9, 11)),
        **dict.fromkeys(SHARED_WIDTHS, 8 * drawn.choice((1, 7))),
        **dict.fromkeys(NUMBERS_OF_EXPERTS, drawn.choice((4, 6))),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
        "moe_layer_end_index": layers - 1,
        **({"layer_types": ["full_attention"] * layers} if family_row(family).other_layers else {}),
    }
    sizes |= {"position_embedding_type": "rope", "mamba_n_heads": 1, "attention_dropout": 0.0}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16}
    if family == "opt":
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
    return {name: value for name, value in sizes.items() if name in known}


def counts(family: str, folder: Path, fields: dict[str, Any]) -> tuple[ModelShape, int] | None:
    """The shape that is read of a config, and the parameters of its class."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    refused = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
    try:
        config = transformers.CONFIG_MAPPING[family](**fields)
    except refused:  # its class checks what goes together
        return None
    config.save_pretrained(folder)
    try:
        shape = load_model(str(folder)).shape
    except ModelError:
        return None
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    return shape, sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_a_model_has_as_many_parameters_as_its_class_builds(family, tmp_path):
    for number in range(DRAWS):
        found = counts(family, tmp_path, draw(family, number))
        assert found is not None
        shape, theirs = found
        usual = family_row(family).experts
        assert (shape.experts > 1) == (usual is not None and usual.switch is None)
        assert shape.parameters == theirs


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_a_part_that_a_config_switches_is_counted_or_refused(family, tmp_path):
    usual = pytest.importorskip("transformers").CONFIG_MAPPING[family]().to_dict()
    switches = [name for name, value in usual.items() if isinstance(value, bool)]
    for name in (name for name in switches if any(part in name for part in SWITCHES)):
        found = counts(family, tmp_path, {**draw(family, 0), name: not usual[name]})
        if found is not None:
            shape, theirs = found
            assert shape.parameters == theirs, name


@pytest.mark.corpus
@pytest.mark.parametrize("name", catalog_names())
def test_a_catalog_model_has_as_many_parameters_as_its_class_builds(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = load_model(name)
    config = transformers.AutoConfig.from_pretrained(model.directory)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert model.shape.parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_what_its_class_has_already_stands_in_no_document(tmp_path):
    def shape_of(**changes: Any) -> ModelShape:
        return written_model(tmp_path, draw("qwen2", 0), **changes).shape

    usual, without = shape_of(model_type="qwen2"), shape_of(model_type="llama")
    switched = shape_of(model_type="llama", attention_bias=True)
    assert not usual.small_parameters
    assert not without.small_parameters
    assert switched.small_parameters == switched.parameters - without.parameters


FOLDER = Path(__file__).parents[2] / "docs" / "results" / "families"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "front_door.json").read_text())["configs"]


def test_a_hundred_configs_were_asked_about_and_none_was_counted_wrongly():
    outcomes = Counter(row["outcome"] for row in ROWS)
    assert set(outcomes) <= {"answered", "refused", "measured alone"}
    assert len(ROWS) >= 100
    assert all(row["said"] for row in ROWS if row["outcome"] != "answered")
    for row in ROWS:
        if row["outcome"] != "refused":
            assert row["parameters"] == pytest.approx(row["class_parameters"], rel=2e-4)


def test_what_was_asked_about_is_every_family_and_every_catalog_model():
    assert {row["name"] for row in ROWS if row["origin"] != "catalog"} >= TRAINED | set(REFUSED)
    of_the_catalog = {row["name"] for row in ROWS if row["origin"] == "catalog"}
    assert of_the_catalog | {"tiny"} == {*catalog_names()}
    predicted = {*FAMILIES, *families()}
    texts = {name: {*row.texts.values()} for name, row in WRAPPERS.items()}
    predicted |= {name for name, text in texts.items() if text <= predicted}
    for row in ROWS:
        name = row["family" if row["origin"] == "catalog" else "name"]
        if name in predicted:
            assert row["outcome"] == "answered"
        elif name in TRAINED | {*WRAPPERS}:
            assert row["outcome"] == "measured alone"
        else:
            assert row["outcome"] == "refused"


def test_the_page_names_every_family_that_is_predicted_and_every_other_as_measured():
    page = (FOLDER / "README.md").read_text()
    (paragraph,) = (line for line in page.splitlines() if line.startswith("`highwater predict` "))
    predicted = {*FAMILIES, *families()}
    assert f"{len(predicted)} of the {len(TRAINED)}" in paragraph
    by_hand, learned = re.findall(r"(?:for|from traces)(?: \(|: )([a-z0-9_, ]+)", paragraph)[:2]
    assert {*by_hand.split(", "), *learned.strip().split(", ")} == predicted
    assert all(family in paragraph for family in TRAINED)


def kind_of(row: dict[str, Any]) -> object:
    """What makes a config another case: the kind of its layers, or why its family is refused."""
    name = row["family" if row["origin"] == "catalog" else "name"]
    if name in REFUSED:
        return REFUSED[name][0]
    known = FAMILY_ROWS.get(name)
    parts = ("experts", "delta", "other_layers", "has_sinks", "is_gated", "has_unlike_layers")
    return row["origin"], *(known and bool(getattr(known, part)) for part in parts)


ASKED = deep(*ROWS) or tuple({kind_of(row): row for row in ROWS}.values())
"""A config of each kind; `make test-all` has all."""


@pytest.mark.corpus
@pytest.mark.parametrize("row", ASKED, ids=lambda row: row["name"])
def test_a_config_is_still_answered_or_refused_as_it_was(row):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if row["origin"] != "catalog" and row["name"] not in transformers.CONFIG_MAPPING:
        return  # of another version of transformers
    front_door = script(FOLDER / "front_door.py")
    ask = front_door.of_catalog if row["origin"] == "catalog" else front_door.usual
    found = ask(row["name"])
    assert (found.outcome, found.parameters) == (row["outcome"], row["parameters"])
