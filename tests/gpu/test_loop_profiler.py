"""Snapshots of anybody's loop, recorded in this process and read by the profile."""

import pytest
import torch

from highwater import MemoryProfiler
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
