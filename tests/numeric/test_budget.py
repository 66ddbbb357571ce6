"""Which trials took more of a device than they were allowed, and what they say of it."""

import pytest

from highwater.engine.training.statistics_log import past_budget
from highwater.nouns.trial import MemoryBudget, RankMemory

MIB = 2**20
BUDGET = MemoryBudget(
    budget_bytes=1000 * MIB,
    context_bytes=100 * MIB,
    nccl_bytes=50 * MIB,
    allocator_cap_bytes=850 * MIB,
)


@pytest.mark.parametrize(
    ("used_mib", "reserved_mib"), [(None, 900), (1000, 850), (1000, 858), (900, 700)]
)
def test_a_trial_within_its_budget_has_nothing_to_say(used_mib, reserved_mib):
    used = None if used_mib is None else used_mib * MIB
    assert (
        past_budget(
            RankMemory(device_used_bytes=used, peak_reserved_bytes=reserved_mib * MIB), BUDGET
        )
        is None
    )


@pytest.mark.parametrize(
    ("reserved_mib", "why"),
    [
        (850, "what is outside the allocator grew"),
        (860, "whole pages, with which it passed its cap by 10.0 MiB"),
    ],
)
def test_a_trial_past_its_budget_says_who_took_it(reserved_mib, why):
    said = past_budget(
        RankMemory(device_used_bytes=1012 * MIB, peak_reserved_bytes=reserved_mib * MIB), BUDGET
    )
    assert said is not None
    assert why in said
    assert "1000.0 MiB allowed" in said
