"""What saving adds to a trial on one GPU: the bytes on disk, and nothing at the peak."""

import msgspec
import pytest
from real_trials import tried

from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome
from highwater.units import GIB
from trial_specs import trial_of

BYTES_TOLERANCE = 0.01
"""Headers of files, relative: 311 parameters of 600 million numbers."""


@pytest.mark.timeout(600)
def test_a_save_takes_its_bytes_on_the_disk_and_adds_nothing_to_the_peak(tmp_path):
    plain = trial_of(
        "Qwen3-0.6B", allocator="expandable", length_tokens=8192, memory_budget_bytes=20 * GIB
    )
    saving = msgspec.structs.replace(
        plain, settings=Settings(allocator="expandable", checkpoint="sharded", save_hf="always")
    )
    without, result = tried(plain, tmp_path), tried(saving, tmp_path)
    assert (without.outcome, result.outcome) == (Outcome.FIT, Outcome.FIT), (
        without.reason,
        result.reason,
    )
    (rank,) = result.ranks
    parameters = rank.parameters or 0
    assert [save.kind for save in rank.saves] == ["hf", "sharded", "hf"]
    for save in rank.saves:
        expected = parameters * {"hf": 2, "sharded": 12}[save.kind]
        assert save.written_bytes == pytest.approx(expected, rel=BYTES_TOLERANCE)
    # Every step's logits are larger than any parameter, and gone when it saves.
    assert rank.memory.peak_allocated_bytes == without.ranks[0].memory.peak_allocated_bytes
    left = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == [".jsonl", ".jsonl", ".log", ".log"], "logs and statistics alone"
