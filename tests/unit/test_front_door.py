"""Configs of every causal family and of the catalog: counted as their classes build them, or
refused by every command, as docs/results/families/front_door.py found and still finds.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from highwater.memory.formula.formula import FAMILIES
from highwater.memory.formula.moments import families
from highwater.model.families import REFUSED, TRAINED
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from places import script
from tables import deep

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
    known = {row["name"] for row in ROWS if row["origin"] != "catalog"}
    assert known >= TRAINED | set(REFUSED)
    assert {row["name"] for row in ROWS if row["origin"] == "catalog"} == {*catalog_names()} - {
        "tiny"
    }
    predicted = {*FAMILIES, *families()}
    for row in ROWS:
        if row["origin"] == "catalog" or row["name"] in predicted:
            assert row["outcome"] == "answered"
        elif row["name"] in TRAINED:
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


def kind_of(row: dict[str, Any]) -> str:
    """What makes a config another case: its family, or why that is refused."""
    if row["origin"] == "catalog":
        return f"catalog: {load_model(row['name']).shape.model_type}"
    return REFUSED[row["name"]][0] if row["name"] in REFUSED else row["name"]


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
    assert found.outcome == row["outcome"]
    assert found.parameters == row["parameters"]
