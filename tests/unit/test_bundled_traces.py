"""The bundled traces of the reference system's step beside that step on H200s, in what an A100
leaves its allocator.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.memory.trinity import bundled_trace
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.units import GIB, MIB

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "lab"
TRIALS = json.loads((RESULTS / "trinity_trials.json").read_text())
SETTINGS = Settings(
    strategy="fsdp", loss="full", objective="grpo", entropy="full", sequences_per_micro_batch=2
)
NEAR_BYTES = {"native": 24 * MIB, "expandable": 128 * MIB}
"""When the GPU comes to free what other streams used decides which of the last segments are given
back; pages are of 20 MiB."""
RACED_BYTES = GIB
"""Where gradients of 4B on two GPUs are free depends on whether they are reduced when the host has
launched the next layer: its two ranks are 0.7 GiB apart.
"""
UNSPLIT_BYTES = 16 * MIB
"""A block of which less than a MiB would be left is allocated whole: which ones are, the order
decides."""

LAST_BYTES = 32 * MIB
"""With no more left, when the GPU comes to free what other streams used decides."""


def name(row: dict[str, Any]) -> str:
    return (
        f"{row['model']}, {row['gpus']} GPUs, SP {row['ulysses_degree']}, {row['allocator']}, "
        f"{row['length_tokens']}"
    )


@pytest.mark.corpus
@pytest.mark.parametrize("row", TRIALS, ids=name)
def test_a_step_on_gpus_ends_as_its_shipped_trace(row):
    settings = msgspec.structs.replace(SETTINGS, allocator=row["allocator"])
    cell = Cell(
        layout=Layout(gpus=row["gpus"], ulysses_degree=row["ulysses_degree"]), settings=settings
    )
    shape = load_model(row["model"]).shape
    lines = bundled_trace(shape, cell)
    assert lines is not None
    log = lines.at(Step(shape, settings, cell.layout, row["length_tokens"]).tokens)
    ours = replay(
        log, allocator=row["allocator"], capacity_bytes=row["capacity_bytes"], is_share=True
    )
    near_bytes = (
        RACED_BYTES
        if (row["model"], row["gpus"]) == ("Qwen3-4B", 2)
        else NEAR_BYTES[row["allocator"]]
    )
    for measured in row["ranks"]:
        assert row["fits"] == (measured["error"] is None)
        is_full = row["capacity_bytes"] - measured["peak_reserved_bytes"] < LAST_BYTES
        assert ours.fits == row["fits"] or is_full
        assert ours.peak_allocated_bytes == pytest.approx(
            measured["peak_allocated_bytes"], abs=UNSPLIT_BYTES
        )
        assert ours.peak_reserved_bytes == pytest.approx(
            measured["peak_reserved_bytes"], abs=near_bytes
        )
        assert abs(ours.retries - measured["retries"]) <= 1
