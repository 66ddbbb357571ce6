"""Every causal family of the installed transformers: trained as its own class trains it, or
refused; never different.

The whole sweep is slow, and writes the table of docs/results/families where ``HIGHWATER_FAMILIES``
names a folder; a part of it, another one each day, runs always.
"""

import contextlib
import datetime
import json
import os
from pathlib import Path

import pytest
import torch
from family_cases import LAYOUTS, LONGEST_DOCUMENT
from family_models import WINDOW, families, save_tiny, tiny_config
from rank_groups import RankGroups

from highwater.errors import HighwaterError
from highwater.model.families import WITH_CAPS
from highwater.model.model import load_model
from highwater.model.trained_families import REFUSED, TRAINED

PARTS = 8
"""Days until every family was in the part that always runs."""
NARROW = LONGEST_DOCUMENT // 2
"""A window that the longest document does not fit into."""
WINDOWED = ("gpt_oss", "mistral", "olmo3")
"""Families with a window in every layer, and in some; with sinks."""
PAST = (*WINDOWED, "cohere2", "gemma2", "gemma3_text", "granite_swa", "phi3", "phimoe", "qwen2")
TRANSFORMED = ("cohere", "cohere2", "cohere2_moe", "gemma3_text", "granite", "nanochat")
"""Families that scale or cap their logits, each in a way of its own."""
COUNTED = 2e-4
"""Of a family's usual config, what its shape may miss: biases and norms of heads, and the learned
positions of the smallest OPT."""


def sweep(
    ranks: RankGroups, layout: str, names: list[str], folder: Path, *, window: int | None = None
) -> dict[str, dict[str, object]]:
    """Outcomes by family, of one launch that trains all of them.

    Documents are longer than a family's windows, but in a ring, which holds only whole ones.
    """
    if window is None:
        window = WINDOW if "ring" in LAYOUTS[layout] else NARROW
    models, result = folder / f"models {window}", folder / f"{layout}.jsonl"
    for name in names:
        if not (models / name).is_dir():
            save_tiny(name, models, window=window)
    words = (models, result, layout, *names)
    ranks.run("family_cases.py", LAYOUTS[layout]["processes"], *words, timeout_s=1500)
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    assert [line["family"] for line in lines] == names
    return {line.pop("family"): line for line in lines}


def wrong_ones(layout: str, found: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The outcomes that should not be: all are equal, but that a ring caps no scores."""
    is_ring = "ring" in LAYOUTS[layout]
    return {
        name: line
        for name, line in found.items()
        if not (
            "caps the scores of its attention" in str(line.get("problem"))
            if is_ring and name in WITH_CAPS
            else line["outcome"] == "equal"
        )
    }


def test_every_family_is_known_to_train_or_is_refused_with_what_stands_in_the_way() -> None:
    assert not TRAINED & set(REFUSED)
    assert set(families()) <= TRAINED | set(REFUSED), (
        "compare new families by the sweep, and write down what it finds"
    )
    assert all(why and hint for why, hint in REFUSED.values())


@pytest.mark.timeout(1600)
def test_families_of_the_day_train_as_their_own_classes_do(
    ranks: RankGroups, tmp_path: Path
) -> None:
    day = int(os.environ.get("HIGHWATER_DAY", datetime.date.today().toordinal()))
    names = sorted(TRAINED & {*families()})[day % PARTS :: PARTS]
    layout = list(LAYOUTS)[day % len(LAYOUTS)]
    assert wrong_ones(layout, sweep(ranks, layout, names, tmp_path)) == {}


@pytest.mark.corpus
@pytest.mark.by_turns
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["alone", "fsdp1 ulysses", "ring"])
def test_families_that_scale_or_cap_their_logits_train_as_their_own_classes_do(
    layout: str, ranks: RankGroups, tmp_path: Path
) -> None:
    found = sweep(ranks, layout, list(TRANSFORMED), tmp_path)
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_every_family_that_is_trained_equals_its_own_class_in_every_layout(
    ranks: RankGroups, tmp_path: Path
) -> None:
    names = sorted(TRAINED)
    table = {layout: sweep(ranks, layout, names, tmp_path) for layout in LAYOUTS}
    _write_table(table)
    found = {layout: wrong_ones(layout, lines) for layout, lines in table.items()}
    assert found == {layout: {} for layout in LAYOUTS}


@pytest.mark.corpus
@pytest.mark.by_turns
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["alone", "fsdp1 ulysses"])
def test_documents_past_a_window_are_trained_as_the_familys_own_class_does(
    layout: str, ranks: RankGroups, tmp_path: Path
) -> None:
    """With windows in every layer, in some, of a mask alone, sinks, and two kinds of RoPE."""
    found = sweep(ranks, layout, list(PAST), tmp_path)
    assert {name: line for name, line in found.items() if line["outcome"] != "equal"} == {}
    for name in PAST:
        window = load_model(str(tmp_path / f"models {NARROW}" / name)).shape.window_tokens
        assert window == NARROW < LONGEST_DOCUMENT


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("window", "outcome"), [(LONGEST_DOCUMENT, "equal"), (LONGEST_DOCUMENT - 1, "refused")]
)
def test_around_a_ring_a_document_within_a_window_is_trained_and_one_past_it_refused(
    window: int, outcome: str, ranks: RankGroups, tmp_path: Path
) -> None:
    """By their own lengths: a ring's padding, which makes them longer, counts for nothing."""
    found = sweep(ranks, "ring", list(WINDOWED), tmp_path, window=window)
    assert {name: line["outcome"] for name, line in found.items()} == dict.fromkeys(
        WINDOWED, outcome
    )
    if outcome == "refused":
        for line in found.values():
            problem = str(line["problem"])
            assert f"a sliding window of {window} tokens" in problem
            assert f"documents of {LONGEST_DOCUMENT}" in problem


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_is_not_trained_is_refused_by_its_name(tmp_path: Path, family: str) -> None:
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


@pytest.mark.corpus
@pytest.mark.parametrize("family", sorted(TRAINED))
def test_the_parameters_of_a_trained_family_are_counted(tmp_path: Path, family: str) -> None:
    """Of the class's usual config, where it can be built; of the tiny one no more than that it is
    read.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if family not in CONFIG_MAPPING:
        return
    config = CONFIG_MAPPING[family]()
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0  # which is refused for itself
    try:
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except TypeError:  # a config that is no model by itself: sizes that are None
        tiny_config(family).save_pretrained(tmp_path)
        assert load_model(str(tmp_path)).shape.parameters > 0
        return
    config.save_pretrained(tmp_path)
    counted = load_model(str(tmp_path)).shape.parameters
    assert counted == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=COUNTED)


def _write_table(table: dict[str, dict[str, dict[str, object]]]) -> None:
    """The table as JSON, in the folder that the environment names."""
    folder = os.environ.get("HIGHWATER_FAMILIES")
    if folder is None:
        return
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    trained = {
        name: {layout: lines[name] for layout, lines in table.items()} for name in sorted(TRAINED)
    }
    refused = {name: {"why": why, "hint": hint} for name, (why, hint) in sorted(REFUSED.items())}
    lifted = {
        name: sorted(
            {cast for line in lines.values() for cast in line.get("float64", {}).get("lifted", [])}
        )  # type: ignore[attr-defined]
        for name, lines in trained.items()
    }
    for lines in trained.values():
        for line in lines.values():
            line.get("float64", {}).pop("lifted", None)  # type: ignore[attr-defined]
    text = json.dumps(
        {"versions": versions, "trained": trained, "lifted": lifted, "refused": refused}, indent=1
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "sweep.json").write_text(text + "\n")
