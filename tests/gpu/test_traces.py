"""Traces made beside a GPU, with the CUDA build that trains there, against trials."""

import pytest
from real_trials import fitting

from highwater.memory.trace.replay import replay
from highwater.nouns.settings import Settings
from highwater.trials.traced import CachedTracer
from highwater.units import GIB
from trial_specs import trial_of

TOLERANCE = 0.001
"""Relative. Held-out trials of this size were off by 0.02 % at most (docs/results/predict)."""
GRPO = Settings(
    objective="grpo",
    loss="full",
    entropy="full",
    sequences_per_micro_batch=2,
    allocator="expandable",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [Settings(loss="full"), Settings(loss="chunked", offload=True), GRPO],
    ids=lambda s: s.slug,
)
def test_a_trial_takes_what_its_trace_says(settings, tmp_path):
    spec = trial_of(
        "Qwen3-0.6B", settings=settings, length_tokens=16_384, memory_budget_bytes=60 * GIB
    )
    memory = fitting(spec, tmp_path).memory
    with CachedTracer(tmp_path / "traces", kernel="cudnn") as tracer:
        log = tracer(spec)
    assert "+cu" in log.versions["torch"], "the build that trains here, not a CPU build beside it"
    replayed = replay(log, allocator=settings.allocator)
    assert replayed.peak_allocated_bytes == pytest.approx(
        memory.peak_allocated_bytes, rel=TOLERANCE
    )
    assert replayed.peak_reserved_bytes == pytest.approx(memory.peak_reserved_bytes, rel=TOLERANCE)
