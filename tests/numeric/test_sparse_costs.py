"""What sparse and dilated attention cost by formula is what the tables count, and what a dense mask
of the definition has.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.engine.attention.block_table import BlockTable, block_tables, top_k_table
from highwater.errors import UsageError
from highwater.nouns import sparse_pattern as sparse_costs
from highwater.nouns.sparse_pattern import (
    PatternType,
    SparsePatternConfig,
    causal_pairs,
    dilated_pairs,
)

CPU = torch.device("cpu")
BY_TABLE: tuple[PatternType, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
)


def kept_share(tables: tuple[BlockTable, ...]) -> float:
    return sum(table.kept_pairs() for table in tables) / causal_pairs(tables[0].length_tokens)


@st.composite
def patterns(draw: st.DrawFn) -> SparsePatternConfig:
    pattern_type = draw(st.sampled_from(BY_TABLE))
    ratio = None
    if "local" not in pattern_type:
        ratio = draw(st.sampled_from(["adaptive", 1.0]) | st.floats(0.001, 1.0))
    return SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=ratio,
        block_size=draw(st.integers(1, 40)),
        local_window_size=draw(st.integers(1, 90)),
        global_tokens=draw(st.integers(0, 70)),
    )


@given(pattern=patterns(), length=st.integers(1, 700))
def test_the_formula_counts_what_the_tables_keep(pattern, length):
    tables = block_tables(pattern, length, CPU)
    assert sparse_costs.kept_pairs(pattern, length) == sum(t.kept_pairs() for t in tables)
    share = sparse_costs.kept_share(pattern, length)
    assert share == pytest.approx(kept_share(tables))


@given(length=st.integers(1, 200), size=st.integers(1, 20), ratio=st.floats(0.01, 1.0))
def test_the_formula_counts_what_content_keeps(length, size, ratio):
    pattern = SparsePatternConfig(pattern_type="block_top_k", sparsity_ratio=ratio, block_size=size)
    table = top_k_table(pattern, torch.randn(3, length, 4), torch.randn(3, length, 4))
    assert sparse_costs.kept_pairs(pattern, length) == table.kept_pairs()


@given(
    length=st.integers(1, 90),
    branches=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), min_size=1, max_size=3),
    heads=st.integers(1, 5),
    is_causal=st.booleans(),
)
def test_dilated_pairs_are_those_that_meet(length, branches, heads, is_causal):
    segments, rates = zip(*branches, strict=True)
    met = 0
    token, key = torch.arange(length)[:, None], torch.arange(length)
    for segment, rate in branches:
        for head in range(heads):
            pairs = token // segment == key // segment
            for each in (token, key):
                pairs = pairs & (each % segment % rate == head % rate)
            met += int((pairs & (key <= token) if is_causal else pairs).sum())
    assert dilated_pairs(segments, rates, length, heads=heads, is_causal=is_causal) == met


@given(length=st.integers(1, 90), ratio=st.floats(0.05, 1.0), segment=st.integers(1, 60))
def test_dilated_pairs_of_a_pattern_are_those_of_each_row(length, ratio, segment):
    pattern = SparsePatternConfig(sparsity_ratio=ratio, block_size=4)
    found = dilated_pairs((segment,), (2,), length, heads=3, pattern=pattern)
    expected = 0
    for head in range(3):
        for start in range(0, length, segment):
            row = len(range(start, min(start + segment, length))[head % 2 :: 2])
            tables = block_tables(pattern, row, CPU) if row else ()
            expected += sum(table.kept_pairs() for table in tables)
    assert found == expected


def test_a_ratio_that_a_window_contradicts_is_refused_without_a_table():
    pattern = SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.5)
    with pytest.raises(UsageError, match="a window of 512 tokens keeps"):
        sparse_costs.kept_share(pattern, 8192)
