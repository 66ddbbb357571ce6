"""Real trials on one GPU: what fits, what does not."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_trials import tried

from highwater.errors import MachineError
from highwater.nouns.settings import Allocator, Loss
from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import GIB, parse_bytes
from trial_specs import trial_of

BUDGET = "20GiB"


def trial(
    tmp_path: Path, length: int, *, loss: Loss = "full", allocator: Allocator = "native"
) -> TrialResult:
    spec = trial_of(
        "Qwen3-0.6B",
        loss=loss,
        allocator=allocator,
        length_tokens=length,
        memory_budget_bytes=parse_bytes(BUDGET),
    )
    return tried(spec, tmp_path)


@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_a_trial_that_fits_stays_within_its_budget_and_says_how_it_was_divided(tmp_path, allocator):
    result = trial(tmp_path, 8192, allocator=allocator)
    assert result.outcome is Outcome.FIT, result.reason
    (rank,) = result.ranks
    assert rank.budget.budget_bytes == parse_bytes(BUDGET)
    assert (
        rank.budget.context_bytes + rank.budget.nccl_bytes + rank.budget.allocator_cap_bytes
        == parse_bytes(BUDGET)
    )
    memory = rank.memory
    assert (
        memory.peak_allocated_bytes
        <= (memory.peak_reserved_bytes or 0)
        <= rank.budget.allocator_cap_bytes
    )
    assert (memory.device_used_bytes or 0) <= parse_bytes(BUDGET)
    assert (memory.peak_allocated_bytes or 0) > 16 * (rank.parameters or 0) > 8 * GIB
    assert rank.attention_kernel in ("cudnn", "flash")
    assert rank.allocator_settings["expandable_segments"] == str(allocator == "expandable")
    assert result.launch_to_first_step_s is not None
    assert result.mfu is not None


def test_what_does_not_fit_is_out_of_memory_and_fits_with_the_chunked_loss(tmp_path):
    full = trial(tmp_path, 40_960, allocator="expandable")
    assert full.outcome is Outcome.OUT_OF_MEMORY, full.reason
    assert full.ranks[0].losses == (), (
        "every state is there before the first activation: the first step tells"
    )
    chunked = trial(tmp_path, 40_960, loss="chunked", allocator="expandable")
    assert chunked.outcome is Outcome.FIT, chunked.reason


def test_a_gpu_that_others_use_is_reported_and_not_blamed_on_the_model(tmp_path):
    hog = (
        "import sys, torch; x = torch.ones(1 << 30, device='cuda'); print('ready', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(MachineError, match=r"GPU \d+ is in use"):
            trial(tmp_path, 8192)
        process.communicate("")
