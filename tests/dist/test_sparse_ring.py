"""Block-sparse and dilated attention by a ring equal a dense masked softmax over the whole row:
output, log-sum-exp and every gradient, zigzag and contiguous, and what is sent is what is seen.
"""

import json
from pathlib import Path

import pytest
from rank_groups import RankGroups
from sparse_ring_cases import cases

TOLERANCE = 1e-10
"""Norm-relative in float64; bytes are exact."""


@pytest.mark.corpus
@pytest.mark.by_turns
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_ring_around_sparse_attention_equals_a_dense_masked_softmax(
    processes: int, ranks: RankGroups, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    ranks.run("sparse_ring_cases.py", processes, result)
    every = json.loads(result.read_text())
    assert len(every) == processes
    wrong = {
        f"rank {rank}: {name}": found[name]
        for rank, found in enumerate(every)
        for name in (*(case.name for case in cases()), "modules")
        if "error" in found[name] or not max(map(abs, found[name].values())) < TOLERANCE
    }
    assert not wrong, json.dumps(wrong, indent=1)
