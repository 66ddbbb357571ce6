"""Recorded trials of LoRA and of states of few bits on a GPU: the formula has their peaks, and what
it said would fit does.
"""

import json
from pathlib import Path

import msgspec
import pytest

from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome

CELLS = Path(__file__).parents[2] / "docs/results/lora/cells"
TRIALS = json.loads((CELLS / "trials.json").read_text())
PREDICTED = json.loads((CELLS / "predicted.json").read_text())
ON_H100S = json.loads((CELLS.parent / "h100.json").read_text())
FITS = [trial for trial in TRIALS if Outcome(trial["result"]["outcome"]).is_fit]
TOLERANCE = 0.0005
"""Relative."""


@pytest.mark.parametrize(
    "trial", FITS + ON_H100S, ids=lambda each: f"{each['cell']}-{each['length_tokens']}"
)
def test_the_formula_has_the_peak_of_a_recorded_trial(trial):
    spec = trial["spec"]
    found = footprint(
        Step(
            load_model(spec["model_name"]).shape,
            msgspec.convert(spec["settings"], Settings),
            msgspec.convert(spec["layout"], Layout),
            length_tokens=spec["length_tokens"],
        )
    )
    ranks = trial["result"]["ranks"]
    measured = max(rank["memory"]["peak_allocated_bytes"] for rank in ranks)
    assert found.allocated_bytes == pytest.approx(measured, rel=TOLERANCE), found.peak.name


@pytest.mark.parametrize("cell", sorted({trial["cell"] for trial in TRIALS}))
def test_what_was_said_to_fit_does_and_the_capacity_is_within_a_step(cell):
    lengths = [trial["length_tokens"] for trial in FITS if trial["cell"] == cell]
    ran_out = [
        trial["length_tokens"]
        for trial in TRIALS
        if trial["cell"] == cell and Outcome(trial["result"]["outcome"]).is_memory
    ]
    said = PREDICTED[cell]
    assert not [length for length in ran_out if length <= said["capacity_tokens"]]
    assert said["capacity_tokens"] <= max(lengths) <= said["likely_tokens"]
