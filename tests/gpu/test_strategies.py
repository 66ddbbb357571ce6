"""FSDP1, FSDP2 and Ulysses on GPUs, with and without offload: the same training."""

from pathlib import Path

import pytest
from real_trials import fitting

from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings, Strategy
from highwater.nouns.trial import RankReport
from highwater.trials.probe import probe
from highwater.units import GIB
from tiny_models import WIDE_HEADS, write_model
from trial_specs import trial_of

GPUS = [count for count in (1, 2, 4) if count <= max(1, len(probe().gpus))]
TOLERANCE = 1e-3
"""Relative. The kernels and the weights are the same; sums over ranks, and over a norm's parts,
have another order."""
NOTHING = 1e-6
"""Absolute: GRPO's loss is the mean of its normalised advantages while the policy is the old one,
which is 0 but for rounding."""
LENGTH = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """320 million parameters, without weights: every placement of the shards starts from the same
    random ones.
    """
    sizes = {"num_hidden_layers": 12, "vocab_size": 32_000}
    return write_model(tmp_path_factory.mktemp("model"), WIDE_HEADS, **sizes)


@pytest.mark.parametrize("gpus", GPUS)
def test_every_strategy_trains_the_same_and_offload_empties_the_gpu_as_far_as_it_says(
    gpus, model, tmp_path
):
    plain = trained(model, tmp_path, gpus, "fsdp2", offload=False)
    state_bytes = (plain.parameters or 0) / gpus
    for strategy, offload, saved in (("fsdp", False, 0), ("fsdp2", True, 16), ("fsdp", True, 12)):
        other = trained(model, tmp_path, gpus, strategy, offload=offload)
        assert other.losses == pytest.approx(plain.losses, rel=TOLERANCE), (strategy, offload)
        assert other.gradient_norms == pytest.approx(plain.gradient_norms, rel=TOLERANCE), (
            strategy,
            offload,
        )
        assert other.parameters == plain.parameters
        if offload:
            less = (plain.memory.peak_allocated_bytes or 0) - (
                other.memory.peak_allocated_bytes or 0
            )
            # A unit's float32 shard passes through the GPU on its way to the narrow copy.
            assert less > 0.8 * saved * state_bytes, (strategy, less / state_bytes)


@pytest.mark.parametrize("objective", ["sft", "grpo"])
@pytest.mark.parametrize("degree", GPUS[1:])
def test_gpus_that_share_a_sequence_train_what_one_gpu_trains(degree, objective, model, tmp_path):
    settings = Settings(objective=objective, loss="chunked", sequences_per_micro_batch=2)
    alone = report(model, tmp_path, Layout(), settings)
    together = report(model, tmp_path, Layout(gpus=degree, ulysses_degree=degree), settings)
    assert together.losses == pytest.approx(alone.losses, rel=TOLERANCE, abs=NOTHING)
    assert together.gradient_norms == pytest.approx(alone.gradient_norms, rel=TOLERANCE)


def trained(model: Path, logs: Path, gpus: int, strategy: Strategy, *, offload: bool) -> RankReport:
    return report(
        model, logs, Layout(gpus=gpus), Settings(strategy=strategy, offload=offload, loss="chunked")
    )


def report(model: Path, logs: Path, layout: Layout, settings: Settings) -> RankReport:
    """The first rank's report of three steps of four micro-batches."""
    spec = trial_of(
        model,
        layout=layout,
        settings=settings,
        length_tokens=LENGTH,
        memory_budget_bytes=40 * GIB,
        steps=3,
        micro_batches=4,
    )
    return fitting(spec, logs)
