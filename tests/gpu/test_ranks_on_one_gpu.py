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


@pytest.mark.timeout(600)
def test_ranks_that_share_a_model_in_nf4_train_what_one_does(model):
    packed: dict[str, Any] = {"lora": 8, "lora_base": "nf4"}
    single = trained(model, Layout(), "sft", **packed)
    for layout in (Layout(gpus=2, ulysses_degree=2), Layout(gpus=4, replicate_degree=2)):
        together = trained(model, layout, "sft", **packed)
        assert together.losses == pytest.approx(single.losses, rel=TOLERANCE)
        assert together.gradient_norms == pytest.approx(single.gradient_norms, rel=TOLERANCE)


def test_the_bytes_of_nf4_are_gathered_as_they_are():
    """Every two bytes, among them what is a NaN in bfloat16, beside weights of other dtypes."""
    bytes_ = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.uint8)
    unit = torch.nn.Linear(8, 8, device="cuda")
    unit.frozen = torch.nn.Parameter(unit.bias.detach().bfloat16(), requires_grad=False)
    unit.nf4 = torch.nn.Parameter(bytes_.clone(), requires_grad=False)
    with process_mesh.alone(torch.device("cuda")):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = process_mesh.shard_mesh(Layout(), torch.device("cuda"))
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        unit(torch.ones(2, 8, device="cuda", dtype=torch.bfloat16))
        unit.unshard()
        assert torch.equal(unit.nf4, bytes_)


def trained(model: Path, layout: Layout, objective: Objective, **settings: Any) -> RankReport:
    micro_batches = SEQUENCES // layout.data_parallel_degree
    spec = trial_of(
        model,
        layout=layout,
        objective=objective,
        loss="chunked",
        length_tokens=LENGTH,
        micro_batches=micro_batches,
        **settings,
    )
    return one_gpu.run(spec, timeout_s=240)[0]
