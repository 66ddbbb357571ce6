"""Ranks that share one GPU, over NCCL: by heads, by a ring, by both."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "results" / "context_parallel"))

import one_gpu

from highwater.engine.parallel import mesh as process_mesh
from highwater.nouns.layout import Layout
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
TRAININGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"objective": "grpo"},
    "beside a model in nf4": {"lora": 8, "lora_base": "nf4"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 million parameters: between ranks of one GPU everything goes through sockets."""
    sizes = sized(8192, 512, 4, (8, 2), head_dim=64, intermediate_size=1536)
    return write_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, RankReport]:
    """One rank's report."""
    return {name: trained(model, Layout(), name) for name in TRAININGS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_share_a_trial_train_what_one_does(layout, training, model, alone):
    together, single = trained(model, layout, training), alone[training]
    assert together.losses == pytest.approx(single.losses, rel=TOLERANCE, abs=NOTHING)
    assert together.gradient_norms == pytest.approx(single.gradient_norms, rel=TOLERANCE)


def test_the_bytes_of_nf4_are_gathered_as_they_are():
    """Every two bytes, among them what is a NaN in bfloat16, beside weights of another dtype."""
    pairs = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.uint8)
    unit, gpu = torch.nn.Linear(8, 8, device="cuda"), torch.device("cuda")
    unit.nf4 = torch.nn.Parameter(pairs.clone(), requires_grad=False)
    with process_mesh.alone(gpu):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        sharded = fully_shard(unit, mesh=process_mesh.shard_mesh(Layout(), gpu), mp_policy=policy)
        sharded.unshard()
        assert torch.equal(unit.nf4, pairs)


def trained(model: Path, layout: Layout, training: str) -> RankReport:
    micro_batches = SEQUENCES // layout.data_parallel_degree
    spec = trial_of(
        model,
        layout=layout,
        loss="chunked",
        length_tokens=LENGTH,
        micro_batches=micro_batches,
        **TRAININGS[training],
    )
    return one_gpu.run(spec, timeout_s=240)[0]
