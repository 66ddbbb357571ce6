"""Families whose layers were learned from traces, on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_trials import fitting

from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.trials.traced import CachedTracer
from highwater.units import GIB
from trial_specs import trial_of

SHAPES = Path(__file__).parents[2] / "docs/results/families/shapes"
FEWER: dict[str, dict[str, Any]] = {
    "gemma3-1b": {"num_hidden_layers": 12},
    "gpt-oss-4-layers": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size": 32_768,
    },
}
"""Fewer layers than the shapes have: both kinds, in a minute."""
FORMULA_TOLERANCE = 0.01
TRACE_TOLERANCE = 0.002
"""Relative."""
SETTINGS = Settings(loss="chunked", allocator="expandable")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FEWER)
def test_a_trial_takes_what_formula_and_trace_say(name, tmp_path):
    config = json.loads((SHAPES / name / "config.json").read_text()) | FEWER[name]
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(str(directory))
    spec = trial_of(
        directory, settings=SETTINGS, length_tokens=32_768, memory_budget_bytes=70 * GIB
    )
    peak = fitting(spec, tmp_path).memory.peak_allocated_bytes
    found = upper_footprint(Step(model.shape, SETTINGS, Layout(), length_tokens=spec.length_tokens))
    assert found.allocated_bytes == pytest.approx(peak, rel=FORMULA_TOLERANCE), found.peak.name
    with CachedTracer(tmp_path / "traces", kernel="cudnn") as tracer:
        log = tracer(spec)
    traced = replay(log, allocator=SETTINGS.allocator)
    assert traced.peak_allocated_bytes == pytest.approx(peak, rel=TRACE_TOLERANCE)
