"""Ranks that share one GPU, over NCCL: by heads, by a ring, by both."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "results" / "context_parallel"))

import one_gpu

from highwater.nouns.layout import Layout
from highwater.nouns.settings import Objective
from highwater.nouns.trial import RankReport
from tiny_models import sized, write_model
from trial_specs import trial_of

TOLERANCE = 1e-3
"""Relative, in bfloat16: kernels see other blocks, and sums have another order."""
NOTHING = 1e-6
"""Absolute: GRPO's first loss is 0 but for rounding."""
LENGTH = 1021
SEQUENCES = 4
"""Of a step, whatever its layout."""
LAYOUTS = {
    "ulysses 2": Layout(gpus=2, ulysses_degree=2),
    "ring 2": Layout(gpus=2, ring_degree=2),
    "2 copies": Layout(gpus=2, replicate_degree=2),
    "ulysses 2, ring 2": Layout(gpus=4, ulysses_degree=2, ring_degree=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 million parameters: between ranks of one GPU everything goes through sockets."""
    sizes = sized(8192, 512, 4, (8, 2), head_dim=64, intermediate_size=1536)
    return write_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[Objective, RankReport]:
    """One rank's report."""
    objectives: tuple[Objective, ...] = ("sft", "grpo")
    return {objective: trained(model, Layout(), objective) for objective in objectives}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("objective", ["sft", "grpo"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_share_a_trial_train_what_one_does(layout, objective, model, alone):
    together, single = trained(model, layout, objective), alone[objective]
    assert together.losses == pytest.approx(single.losses, rel=TOLERANCE, abs=NOTHING)
    assert together.gradient_norms == pytest.approx(single.gradient_norms, rel=TOLERANCE)


def trained(model: Path, layout: Layout, objective: Objective) -> RankReport:
    micro_batches = SEQUENCES // layout.data_parallel_degree
    spec = trial_of(
        model,
        layout=layout,
        objective=objective,
        loss="chunked",
        length_tokens=LENGTH,
        micro_batches=micro_batches,
    )
    return one_gpu.run(spec, timeout_s=240)[0]
