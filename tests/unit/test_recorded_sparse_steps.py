"""Recorded steps of sparse attention on a GPU: the formula has their peaks."""

import json
from pathlib import Path

import msgspec
import pytest

from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.trial import TrialSpec

RECORDED = sorted((Path(__file__).parents[2] / "docs/results/attention/training").glob("*.json"))
TOLERANCE = 0.0025
"""Relative."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_formula_has_the_peak_of_a_recorded_step(path):
    document = json.loads(path.read_text())
    spec = msgspec.convert(document["spec"], TrialSpec, strict=False)
    found = footprint(
        Step(
            load_model(spec.model_name).shape,
            spec.settings,
            spec.layout,
            length_tokens=spec.length_tokens,
        )
    )
    (rank,) = document["result"]["ranks"]
    measured = rank["memory"]["peak_allocated_bytes"]
    assert found.allocated_bytes == pytest.approx(measured, rel=TOLERANCE), found.peak.name
