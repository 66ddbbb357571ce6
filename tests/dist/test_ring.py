"""Attention by a ring equals the reference."""

import pytest
from rank_groups import assert_close
from ring_cases import cases_for

from highwater.engine.attention.ring import Pairing, pairing_of

TOLERANCE = {"float64": 1e-13, "float32": 2e-5}
"""Of numbers around one: a few roundings of each."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_attention_by_a_ring_equals_the_reference(processes, ranks):
    every, cases = ranks.results("ring_cases", processes)["ranks"], cases_for(processes)
    assert len(every) == processes
    for found in every:
        assert_close(found, {case.name: TOLERANCE[case.dtype] for case in cases}, of=None)


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
