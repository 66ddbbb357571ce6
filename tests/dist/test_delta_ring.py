"""The gated delta rule around a ring is what its definition says of the whole row."""

import pytest
from delta_ring_cases import CASES
from rank_groups import assert_close

TOLERANCE = 1e-10
"""Norm-relative, in float64: the order of summation alone differs."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 3])
def test_slices_give_what_the_definition_gives_for_the_row(processes, ranks):
    every = ranks.results("delta_ring_cases", processes)["ranks"]
    assert len(every) == processes
    for found in every:
        assert_close(found, {case.name: TOLERANCE for case in CASES}, of=None)
