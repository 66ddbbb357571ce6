"""Traces made beside a GPU, with the CUDA build that trains there, against trials: the same peaks."""

import os
from pathlib import Path

import pytest

from highwater.launch.torchrun import TorchrunRunner
from highwater.launch.tracing import CachedTracer
from highwater.prediction.replay import replay
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import Outcome, TrialSpec
from highwater.units import GIB

TOLERANCE = 0.001
"""Relative. Held-out trials of this size were off by 0.02 % at most (docs/results/predict)."""
GRPO = Settings(objective="grpo", loss="full", entropy="full", sequences_per_micro_batch=2, allocator="expandable")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [Settings(loss="full"), Settings(loss="chunked", offload=True), GRPO], ids=lambda s: s.slug)
def test_a_trial_takes_what_its_trace_says(settings: Settings, tmp_path: Path) -> None:
    model = load_model("Qwen3-0.6B")
    spec = TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=Layout(),
        settings=settings,
        length_tokens=16_384,
        memory_budget_bytes=60 * GIB,
    )
    result = TorchrunRunner(log_directory=tmp_path, timeout_s=280).run(spec)
    assert result.outcome is Outcome.FIT, result.reason
    with CachedTracer(tmp_path / "traces", kernel="cudnn") as tracer:
        replayed = replay(tracer(spec), allocator=settings.allocator)
    memory = result.ranks[0].memory
    assert replayed.peak_allocated_bytes == pytest.approx(memory.peak_allocated_bytes, rel=TOLERANCE)
    assert replayed.peak_reserved_bytes == pytest.approx(memory.peak_reserved_bytes, rel=TOLERANCE)


def test_a_trace_leaves_the_gpu_alone(tmp_path: Path) -> None:
    """Its process sees no GPU: what is being measured there would be disturbed by a context of half a GiB."""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    model = load_model("Qwen3-0.6B")
    spec = TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=Layout(),
        settings=Settings(loss="chunked"),
        length_tokens=4096,
    )
    with CachedTracer(tmp_path / "traces", kernel="cudnn") as tracer:
        assert tracer(spec).versions["torch"].partition("+")[2].startswith("cu")
