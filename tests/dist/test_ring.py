"""Attention by a ring equals its reference: dense, block-sparse and dilated, and a gated delta rule
whose state goes round.
"""

import delta_ring_cases
import pytest
import ring_cases
import sparse_ring_cases
from rank_groups import RankGroups, assert_close

from highwater.engine.attention.ring import Pairing, pairing_of

pytestmark = pytest.mark.timeout(600)
TOLERANCE = {"float64": 1e-13, "float32": 2e-5}
"""Of numbers around one: a few roundings of each."""
SUMMATION = 1e-10
"""Norm-relative, in float64: the order of summation alone differs; bytes are exact."""


def assert_all_close(
    ranks: RankGroups, module: str, processes: int, tolerances: dict[str, float]
) -> None:
    every = ranks.results(module, processes)["ranks"]
    assert len(every) == processes
    for found in every:
        assert_close(found, tolerances, of=None)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_attention_by_a_ring_equals_the_reference(processes, ranks):
    cases = ring_cases.cases_for(processes)
    tolerances = {case.name: TOLERANCE[case.dtype] for case in cases}
    assert_all_close(ranks, "ring_cases", processes, tolerances)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_ring_around_sparse_attention_equals_a_dense_masked_softmax(processes, ranks):
    names = [*(case.name for case in sparse_ring_cases.cases()), "modules"]
    assert_all_close(ranks, "sparse_ring_cases", processes, dict.fromkeys(names, SUMMATION))


@pytest.mark.parametrize("processes", [2, 3])
def test_slices_give_what_the_definition_gives_for_the_row(processes, ranks):
    names = [case.name for case in delta_ring_cases.CASES]
    assert_all_close(ranks, "delta_ring_cases", processes, dict.fromkeys(names, SUMMATION))


def test_what_a_step_computes_is_as_much_on_every_rank_and_in_the_end_everything():
    length, degree = 12, 4
    seen = [
        [pairing_of(length, rank=rank, source=(rank - step) % degree) for step in range(degree)]
        for rank in range(degree)
    ]
    for step in range(1, degree):
        assert {_pairs(blocks[step], length) for blocks in seen} == {length * length // 2}
    assert all(blocks[0] == Pairing(slice(0, 12), slice(0, 12), is_causal=True) for blocks in seen)


def _pairs(block: Pairing, length: int) -> int:
    queries, keys = (len(range(length)[part]) for part in (block.queries, block.keys))
    return queries * keys
