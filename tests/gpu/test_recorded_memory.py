"""Snapshots of real trials, read by the profile."""

from pathlib import Path

import pytest
from real_trials import tried

from highwater.memory.snapshot.memory_profile import MemoryProfile, memory_profile
from highwater.nouns.environment import Profiling
from highwater.nouns.settings import Loss
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_commands import request_line, sizes_of
from highwater.store.logs import snapshot_folder, snapshot_lines
from highwater.units import parse_bytes
from trial_specs import trial_of

UNATTRIBUTED_SHARE = 0.05
"""Part of what is allocated that may have no name."""
PROFILING = Profiling(max_entries=50_000)


def recorded(
    tmp_path: Path, length: int, *, loss: Loss = "full", data: str | None = None
) -> tuple[TrialSpec, TrialResult]:
    spec = trial_of(
        "Qwen3-0.6B",
        loss=loss,
        length_tokens=length,
        memory_budget_bytes=parse_bytes("20GiB"),
        data=data,
    )
    return spec, tried(spec, tmp_path, timeout_s=400, profiling=PROFILING)


def profiles_of(result: TrialResult) -> dict[str, MemoryProfile]:
    assert result.log_path is not None
    folder = snapshot_folder(Path(result.log_path))
    return {
        path.parent.name: memory_profile(path)
        for path in folder.glob("*/snapshot_rank00_d0r0u0.pickle")
    }


def check_names(profile: MemoryProfile) -> None:
    nameless = profile.bytes_of("unattributed")
    assert nameless <= UNATTRIBUTED_SHARE * profile.allocated_bytes, profile.places[:5]
    for category in ("parameters", "gradients", "optimizer_states"):
        assert profile.bytes_of(category) > 0


def test_every_step_that_was_asked_for_has_a_snapshot_that_names_what_was_alive(tmp_path):
    spec, result = recorded(tmp_path, 8192)
    assert result.outcome is Outcome.FIT, result.reason
    profiles = profiles_of(result)
    assert sorted(profiles) == ["step_0", "step_1"]
    peak = result.ranks[0].memory.peak_allocated_bytes or 0
    assert max(each.allocated_bytes for each in profiles.values()) == pytest.approx(peak, rel=0.02)
    for profile in profiles.values():
        assert profile.moment == "peak"
        check_names(profile)
    assert not [line for line in snapshot_lines(spec, result, PROFILING) if "none of" in line]


def test_out_of_memory_leaves_a_snapshot_that_names_the_request_and_the_logits(tmp_path):
    _, result = recorded(tmp_path, 64 * 1024)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    (profile,) = profiles_of(result).values()
    assert profile.moment == "out of memory"
    assert profile.requested_bytes
    assert profile.phase
    check_names(profile)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_out_of_memory_says_what_was_alive_without_any_profiling(tmp_path, loss):
    spec = trial_of(
        "Qwen3-0.6B", loss=loss, length_tokens=256 * 1024, memory_budget_bytes=parse_bytes("20GiB")
    )
    result = tried(spec, tmp_path, timeout_s=400)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    failure = result.ranks[0].failure
    alive = failure.alive
    sizes = sizes_of(alive)
    assert sum(sizes.values()) == alive.allocated_bytes
    assert sizes["unattributed"] <= UNATTRIBUTED_SHARE * sum(sizes.values())
    assert alive.parameters_bytes == pytest.approx(4 * (result.ranks[0].parameters or 0), rel=0.01)
    assert alive.requested_bytes
    assert (alive.largest_free_bytes or 0) <= alive.fragmented_bytes
    assert request_line(result, spec.settings, spec.layout)
