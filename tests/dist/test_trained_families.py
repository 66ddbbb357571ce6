"""Every causal family of the installed transformers: trained as its own class trains it, or
refused; never different. What one does not train stays as the files have it.

The sweep writes the table of docs/results/families where ``HIGHWATER_FAMILIES`` names a folder.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import LAYOUTS, LONGEST_DOCUMENT, RINGS
from frozen_cases import CASES
from rank_groups import RankGroups
from transformers import AfmoeConfig, AfmoeForCausalLM

from family_models import WINDOW, WRAPPED, families, save_tiny, tiny_config
from highwater.errors import HighwaterError
from highwater.model.families import REFUSED, TRAINED, WRAPPERS, family_row
from highwater.model.model import load_model
from tables import deep
from tiny_models import SIZES

pytestmark = pytest.mark.timeout(600)
NARROW = LONGEST_DOCUMENT // 2
"""A window that the longest document does not fit into."""
WINDOWED = ("gpt_oss", "mistral", "olmo3")
"""Families with a window in every layer, and in some; with sinks."""
PAST = (*WINDOWED, "cohere2", "gemma2", "gemma3_text", "granite_swa", "phi3", "phimoe", "qwen2")
PAST_IN = ("alone", "fsdp1 ulysses")
DELTA = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
TRANSFORMED = ("cohere", "cohere2", "cohere2_moe", "gemma3_text", "granite", "nanochat")
"""Families that scale or cap their logits, each in a way of its own."""
SCALED_IN = ("alone", "fsdp1 ulysses", "ring")
UNLIKE = ("gemma4_text", "gemma4_text_dense", "gemma4_text_experts")
"""Of layers that share keys and have embeddings, and of models without either, with experts beside
each MLP and without."""
HIDDEN = ("granitemoehybrid", "granitemoehybrid_dense", "hunyuan_v1_moe")
"""Families of which a config may have layers, or a form, that do not train."""
FEW = ("fsdp2", "fsdp1 ulysses", "ring", "alone")
"""Layouts that differ in more than where states are."""


def sweep(
    ranks: RankGroups, layout: str, names: list[str], *, window: int | None = None
) -> dict[str, dict[str, object]]:
    of_layout = {**LAYOUTS, **RINGS}[layout]
    if window is None:
        window = WINDOW if "ring" in of_layout else NARROW
    models = ranks.folder / f"models {window}"
    for name in names:
        if not (models / name).is_dir():
            save_tiny(name, models, window=window)
    words = (models, layout, *names)
    found = ranks.results("family_cases", of_layout["processes"], *words, timeout_s=1500)
    assert list(found) == names
    return found


def turn(layout: str, names: Sequence[str], layouts: Sequence[str]) -> list[str]:
    """Those of the families whose turn it is in one of the layouts."""
    return list(names if deep(layout) else names[layouts.index(layout) :: len(layouts)])


def of_each_kind(names: Sequence[str]) -> list[str]:
    """A family of each kind of layers; in `make test-all` all of them."""
    kinds = dict[object, str]()
    for name, row in ((name, family_row(name)) for name in names):
        layers = row.window is None, row.has_sinks, row.caps_scores, row.has_unlike_layers
        shares = row.experts and row.experts.shared != (None, 0)
        kinds[layers, row.delta, row.is_gated, row.experts is None, shares] = name
    return list(deep(*names) or kinds.values())


def wrong_ones(layout: str, found: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The outcomes that should not be: all are equal, but that a ring caps no scores."""
    is_ring = "ring" in LAYOUTS[layout]

    def is_right(name: str, line: dict[str, object]) -> bool:
        row = family_row(WRAPPED.get(name, {"text": name})["text"])
        if is_ring and row.caps_scores:
            return "caps the scores of its attention" in str(line.get("problem"))
        return line["outcome"] == "equal"

    return {name: line for name, line in found.items() if not is_right(name, line)}


def test_every_family_is_known_to_train_or_is_refused_with_what_stands_in_the_way():
    assert not TRAINED & set(REFUSED)
    assert set(families()) <= TRAINED | set(REFUSED) | set(WRAPPERS), (
        "compare new families by the sweep, and write down what it finds"
    )
    assert all(why and hint for why, hint in REFUSED.values())


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_families_train_as_their_own_classes_do(layout, ranks):
    names = of_each_kind(sorted(TRAINED & {*families()}))
    found = sweep(ranks, layout, turn(layout, names, list(LAYOUTS)))
    _write_table(layout, found)
    assert wrong_ones(layout, found) == {}


@pytest.mark.parametrize("layout", SCALED_IN)
def test_families_that_scale_or_cap_logits_train_as_their_own_classes_do(layout, ranks):
    found = sweep(ranks, layout, turn(layout, TRANSFORMED, SCALED_IN))
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}


@pytest.mark.parametrize("layout", [*FEW[: len(HIDDEN)], *deep("alone")])
def test_configs_that_a_familys_name_hides_train_as_their_own_classes_do(layout, ranks):
    """Hybrids of attention alone, with experts and without; experts a token by a list."""
    found = sweep(ranks, layout, turn(layout, HIDDEN, FEW))
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}


@pytest.mark.parametrize("layout", [*LAYOUTS, *RINGS])
def test_layers_with_a_state_train_as_their_own_classes_do(layout, ranks):
    """Packed documents against each alone, with and without experts."""
    others = turn(layout, DELTA[1:], [*LAYOUTS, *RINGS])
    found = sweep(ranks, layout, [DELTA[0], *others])
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}


@pytest.mark.parametrize("layout", deep(*LAYOUTS) or FEW[: len(UNLIKE)])
def test_layers_that_share_keys_and_have_embeddings_train_as_their_class(layout, ranks):
    """Gemma 4: heads of two sizes, values that are keys, documents past its windows."""
    found = sweep(ranks, layout, turn(layout, UNLIKE, FEW))
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}


@pytest.mark.parametrize("layout", FEW)
def test_text_models_train_as_the_classes_that_read_images_too(layout, ranks):
    """Called on text alone: a RoPE of several positions a token is a plain one."""
    found = sweep(ranks, layout, turn(layout, list(WRAPPED), FEW))
    assert wrong_ones(layout, found) == {}


@pytest.mark.parametrize("layout", PAST_IN)
def test_documents_past_a_window_are_trained_as_the_familys_own_class_does(layout, ranks):
    """With windows in every layer, in some, of a mask alone, sinks, and two kinds of RoPE."""
    names = turn(layout, PAST, PAST_IN)
    found = sweep(ranks, layout, names)
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}
    for name in names:
        window = load_model(str(ranks.folder / f"models {NARROW}" / name)).shape.window_tokens
        assert window == NARROW < LONGEST_DOCUMENT


@pytest.mark.parametrize(
    ("window", "outcome"), [(LONGEST_DOCUMENT, "equal"), (LONGEST_DOCUMENT - 1, "refused")]
)
def test_around_a_ring_a_document_within_a_window_is_trained_and_one_past_it_refused(
    window, outcome, ranks
):
    """By their own lengths: a ring's padding, which makes them longer, counts for nothing."""
    found = sweep(ranks, "ring", list(WINDOWED), window=window)
    assert {name: row["outcome"] for name, row in found.items()} == dict.fromkeys(WINDOWED, outcome)
    if outcome == "refused":
        for row in found.values():
            problem = str(row["problem"])
            assert f"a sliding window of {window}" in problem
            assert f"document of {LONGEST_DOCUMENT}" in problem


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_is_not_trained_is_refused_by_its_name(tmp_path, family):
    """Its usual config, as its class writes it."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        return  # of another version of transformers: the table above is the newest one's
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with contextlib.suppress(Exception):
        # where no tiny config of it can be made, its name has to do
        tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(HighwaterError, match=family if family != "gpt-sw3" else "gpt") as refusal:
        load_model(str(tmp_path))
    assert "of the family" in refusal.value.problem
    assert refusal.value.hint


def _write_table(layout: str, found: dict[str, dict[str, Any]]) -> None:
    """Add a layout to the table, in the folder that the environment names."""
    folder = os.environ.get("HIGHWATER_FAMILIES")
    if folder is None:
        return
    import transformers

    path = Path(folder, "sweep.json")
    table = json.loads(path.read_text()) if path.exists() else {}
    table["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    table["refused"] = {
        name: {"why": why, "hint": hint} for name, (why, hint) in sorted(REFUSED.items())
    }
    for name, line in found.items():
        casts = line.get("float64", {}).pop("lifted", [])
        lifted = table.setdefault("lifted", {})
        lifted[name] = sorted({*lifted.get(name, ()), *casts})
        table.setdefault("trained", {}).setdefault(name, {})[layout] = line
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


FROZEN = {f"model.layers.{layer}.mlp.expert_bias" for layer in (0, 1)}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_frozen_parameter_has_no_gradient_no_state_and_no_decay(processes, ranks, tmp_path):
    every = save_model(tmp_path / "weights")
    found = ranks.results("frozen_cases", processes, tmp_path / "weights")
    assert set(found) == set(CASES)
    for case, what in found.items():
        for kind, names in what.items():
            assert set(names) == every - FROZEN, (case, kind)


def save_model(folder: Path) -> set[str]:
    """A mixture of experts whose routers have a bias that is not trained, here not 0."""
    config = AfmoeConfig(
        **SIZES | {"vocab_size": 97},
        moe_intermediate_size=24,
        num_dense_layers=0,
        num_experts=4,
        num_experts_per_tok=2,
        global_attn_every_n_layers=1,
    )
    torch.manual_seed(0)
    model = AfmoeForCausalLM(config)
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    assert frozen == FROZEN
    with torch.no_grad():
        for name in frozen:
            parameters[name].uniform_(0.01, 0.1)
    model.save_pretrained(folder)
    return set(parameters)
