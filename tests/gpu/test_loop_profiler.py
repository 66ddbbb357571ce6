"""Snapshots of anybody's loop, and of one around Trainer, recorded in this process and read by the
profile.
"""

import pytest
import torch

from highwater import MemoryProfiler
from highwater.engine import Trainer
from highwater.memory.snapshot.memory_profile import memory_profile


def test_anybodys_loop_leaves_a_snapshot_out_of_memory_or_not(tmp_path):
    weight = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    with MemoryProfiler(tmp_path / "one") as profiler:
        profiler.enter("forward")
        loss = (torch.ones(1024, 1024, device="cuda") @ weight).relu().sum()
        profiler.enter("backward")
        loss.backward()
    profile = memory_profile(profiler.path)
    assert profile.rank == 0
    assert profile.allocated_bytes >= 3 * weight.nbytes
    failing = MemoryProfiler(tmp_path / "two")
    with pytest.raises(torch.OutOfMemoryError), failing:
        torch.empty(1 << 50, device="cuda")
    failed = memory_profile(failing.path)
    assert (failed.moment, failed.requested_bytes) == ("out of memory", 4 << 50)


ANSWERS = [
    {"input_ids": [5, 6, 7, 8], "reward": 1.0, "group": 0},
    {"input_ids": [5, 6, 9], "reward": 0.0, "group": 0},
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective": "dpo"},
        {"objective": "grpo"},
        {"objective": "ppo", "critic": True},
        {"objective": "rw"},
    ],
)
def test_a_trainer_leaves_a_snapshot_of_each_step_that_is_named_and_of_one_that_runs_out(
    settings, tmp_path
):
    recorded = {"memory_profiler": "1", "log_dir": str(tmp_path)}
    settings |= {"sequences_per_micro_batch": 2, "device": "cuda"}
    with Trainer("tiny", length=8, **settings, **recorded) as trainer:
        for _ in range(3):
            trainer.step([ANSWERS])
        trainer.training.policy.register_forward_pre_hook(_take_more_than_there_is)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.step([ANSWERS])
    parts = {path.name: path for path in (tmp_path / "memory_snapshots").iterdir()}
    assert parts.keys() == {"step_1", "step_3"}
    whole, failed = (
        memory_profile(parts[part] / "snapshot_rank00_d0r0u0.pickle") for part in sorted(parts)
    )
    assert (whole.moment, whole.rank, whole.coordinates) == ("peak", 0, ("d0", "r0", "u0"))
    for category in ("parameters", "gradients", "optimizer_states"):
        assert whole.bytes_of(category) > 0
    assert failed.bytes_of("parameters") == whole.bytes_of("parameters")


def _take_more_than_there_is(*_: object) -> None:
    torch.empty(1 << 50, device="cuda")
