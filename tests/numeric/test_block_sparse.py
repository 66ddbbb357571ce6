"""Block-sparse attention against a dense masked softmax in float64, masks of tests/references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_near, with_gradients
from highwater.engine.attention import block_gather
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.engine.attention.block_table import BlockTable, block_tables, top_k_table
from highwater.errors import UsageError
from highwater.nouns import sparse_pattern as sparse_costs
from highwater.nouns.sparse_pattern import (
    WINDOWED,
    PatternType,
    SparsePatternConfig,
    causal_pairs,
    dilated_pairs,
)
from references.sparse_masks import dense, mask

TOLERANCE = 1e-10
BLOCK = 8
CPU = torch.device("cpu")
BY_RATIO: tuple[PatternType, ...] = ("dilated_sparse", "strided", "random")
EVERY: tuple[PatternType, ...] = (*BY_RATIO, "local_window", "global_local", "block_top_k")
LENGTHS = (1, 7, 8, 61, 128, 203)


def config(pattern_type: PatternType, **settings: object) -> SparsePatternConfig:
    sizes = {"block_size": BLOCK, "local_window_size": 19, "global_tokens": 11}
    return SparsePatternConfig(pattern_type=pattern_type, **{**sizes, **settings})


def tensors(length: int, heads: tuple[int, int], size: int = 5) -> list[Tensor]:
    """One sequence or two, whose tokens have their heads side by side, as models have them."""
    torch.manual_seed(length)
    shapes = [(1 + length % 2, length, count, size) for count in (heads[0], heads[1], heads[1])]
    made = [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    return [each.requires_grad_() for each in made]


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return dense(query, key, value, seen.repeat_interleave(groups, dim=1), 0.4)


@pytest.mark.parametrize("pattern_type", EVERY)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)])
def test_a_pattern_equals_a_dense_masked_softmax(pattern_type, length, heads, monkeypatch):
    # several rows at a time, but never all of them
    monkeypatch.setattr(block_gather, "SCORES_AT_HAND", 3 * 4 * BLOCK**2 * 2 * heads[0])
    pattern = config(pattern_type, sparsity_ratio=None if pattern_type in WINDOWED else 0.3)
    q, k, v = tensors(length, heads)
    ours = block_sparse_attention(q, k, v, pattern=pattern, scaling=0.4)
    seen = mask(pattern, q, k)
    found = with_gradients(ours[:2], (q, k, v))
    assert_near(found, with_gradients(masked(q, k, v, seen), (q, k, v)), TOLERANCE, beside=1)
    assert ours.kept_share == pytest.approx(float(seen[0, 0].sum()) / causal_pairs(length))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_dtype_is_as_exact_as_its_digits(dtype):
    exact = tensors(203, (4, 2))
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    pattern = config("global_local")
    ours = block_sparse_attention(*rounded, pattern=pattern, scaling=0.4)
    wide = [tensor.detach().double().requires_grad_() for tensor in rounded]
    expected, sums = masked(*wide, mask(pattern, *wide[:2]))
    assert (ours.output_BHSD.dtype, ours.log_sums_BHS.dtype) == (dtype, torch.float32)
    found = with_gradients([ours.output_BHSD], rounded)
    wanted = with_gradients([expected], wide, rounded=dtype)
    near = 4 * torch.finfo(dtype).eps
    assert_near([*found, ours.log_sums_BHS], [*wanted, sums], near)


@pytest.mark.parametrize("pattern_type", BY_RATIO)
@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.5, 1.0])
def test_a_ratio_is_what_is_kept(pattern_type, ratio):
    length = 65_536
    pattern = SparsePatternConfig(pattern_type=pattern_type, sparsity_ratio=ratio)
    tables = block_tables(pattern, length, CPU)
    rows = tables[0].rows
    # each row keeps whole blocks: half a block more in the mean
    assert ratio <= tables[0].kept_pairs / causal_pairs(length) <= ratio + 1.5 / rows
    columns, row = tables[0].columns[0].long(), tables[0].row_of_entry
    assert (columns <= row).all()
    pairs = row * rows + columns
    assert (pairs.diff() > 0).all(), "sorted, and none twice"
    assert set(range(rows)) == set(row[columns == row].tolist()), "each row has its own block"


def test_a_window_says_what_is_kept_and_a_ratio_that_contradicts_it_is_refused():
    (table,) = block_tables(config("local_window"), 4096, CPU)
    share = table.kept_pairs / causal_pairs(4096)
    assert share == pytest.approx(2 * 19 / 4096, rel=0.01)
    block_tables(config("local_window", sparsity_ratio=round(share, 4)), 4096, CPU)
    with pytest.raises(UsageError, match=r"keeps 0\.93%"):
        block_tables(config("local_window", sparsity_ratio=0.1), 4096, CPU)


def test_adaptive_keeps_less_of_longer_sequences():
    pattern = config("random", sparsity_ratio="adaptive")
    shares = [pattern.ratio_at(length) for length in (65_536, 65_537, 131_072, 131_073)]
    assert shares == [0.05, 0.02, 0.02, 0.01]


def test_tables_of_a_million_tokens_take_two_numbers_for_each_pair_of_blocks():
    (table,) = block_tables(SparsePatternConfig(sparsity_ratio="adaptive"), 2**20, CPU)
    kept_blocks = table.columns.shape[1]
    assert table.starts.nbytes + table.columns.nbytes <= 2 * kept_blocks * 4
    assert table.rows**2 > 50 * kept_blocks


BY_TABLE: tuple[PatternType, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
)


def kept_share(tables: tuple[BlockTable, ...]) -> float:
    return sum(table.kept_pairs for table in tables) / causal_pairs(tables[0].length_tokens)


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
    assert sparse_costs.kept_pairs(pattern, length) == sum(t.kept_pairs for t in tables)
    assert sparse_costs.kept_share(pattern, length) == pytest.approx(kept_share(tables))


@given(length=st.integers(1, 200), size=st.integers(1, 20), ratio=st.floats(0.01, 1.0))
def test_the_formula_counts_what_content_keeps(length, size, ratio):
    pattern = SparsePatternConfig(pattern_type="block_top_k", sparsity_ratio=ratio, block_size=size)
    table = top_k_table(pattern, torch.randn(3, length, 4), torch.randn(3, length, 4))
    assert sparse_costs.kept_pairs(pattern, length) == table.kept_pairs


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
            expected += sum(table.kept_pairs for table in tables)
    assert found == expected
