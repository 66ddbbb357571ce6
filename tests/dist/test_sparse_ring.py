"""Block-sparse and dilated attention by a ring equal a dense masked softmax over the whole row."""

import pytest
from rank_groups import assert_close
from sparse_ring_cases import cases

TOLERANCE = 1e-10
"""Norm-relative in float64; bytes are exact."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_ring_around_sparse_attention_equals_a_dense_masked_softmax(processes, ranks):
    every = ranks.results("sparse_ring_cases", processes)["ranks"]
    assert len(every) == processes
    for found in every:
        assert_close(
            found, dict.fromkeys([*(case.name for case in cases()), "modules"], TOLERANCE), of=None
        )
