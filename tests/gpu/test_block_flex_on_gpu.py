"""FlexAttention from our own tables against block-gather on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from highwater import BlockSparseAttention, BlockSparseRingDilatedAttention, SparsePatternConfig
from highwater.engine.attention import block_flex
from highwater.engine.attention import block_flex as flex
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.engine.attention.block_table import block_tables
from highwater.engine.attention.kernel_proof import ProofSizes
from highwater.nouns.sparse_pattern import PatternType

EVERY: tuple[PatternType, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
)
DIGITS = 16
"""Roundings that a kernel may be off by, norm-relative: as a proof allows."""


def config(pattern_type: PatternType) -> SparsePatternConfig:
    ratio = None if "local" in pattern_type else 0.2
    return SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=ratio,
        local_window_size=700,
        global_tokens=45,
        block_size=128,
    )


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Products of float32 in float32: TF32 has a thousandth of its digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("pattern_type", EVERY)
@pytest.mark.parametrize(
    ("dtype", "groups", "length"),
    [
        *((dtype, 3, 8191) for dtype in (torch.float32, torch.bfloat16)),
        *((torch.float16, 1, length) for length in (129, 4096)),
    ],
)
def test_flex_is_block_gather(pattern_type, dtype, groups, length):
    sizes = ProofSizes(groups, length, 64, dtype, torch.device("cuda"))
    found = list(flex.deviations(config(pattern_type), sizes))
    names = ("output", "log-sum-exp", "query", "key", "value")
    off = dict(zip(names, found, strict=True))
    assert max(found) < DIGITS * torch.finfo(dtype).eps, off


@pytest.mark.parametrize("pattern_type", EVERY)
def test_a_proof_passes_and_flex_is_what_runs(pattern_type):
    query = torch.zeros(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    assert flex.obstacle(config(pattern_type), 4, 128, torch.bfloat16, query.device) is None
    assert flex.attend_table_of("auto", config(pattern_type), query, 2) is flex.attend_by_flex


def test_packed_documents_are_what_each_is_alone():
    lengths = (700, 700, 3001, 1, 90)
    shape = (1, sum(lengths), 4, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    module = BlockSparseAttention(config("strided"), implementation="flex")
    packed = module(q, k, v, document_lengths=lengths)
    alone = [
        module(*each) for each in zip(*(t.split(lengths, dim=1) for t in (q, k, v)), strict=True)
    ]
    expected = torch.cat(alone, dim=1)
    assert (packed - expected).norm() < DIGITS * torch.finfo(q.dtype).eps * expected.norm()


def test_a_million_tokens_take_little_beside_what_goes_in_and_out():
    """The published setting: 2 heads of 32, 16 bits, q = k = v; forward alone."""
    length = 2**20
    pattern = SparsePatternConfig(sparsity_ratio="adaptive", block_size=256)
    q = torch.randn(1, 2, length, 32, device="cuda", dtype=torch.float16)

    def attend() -> Tensor:
        with torch.no_grad():
            return block_sparse_attention(
                q, q, q, pattern=pattern, scaling=32**-0.5, attend_table=flex.attend_by_flex
            ).output_BHSD

    attend()  # compiled, and the tables are kept
    (table,) = block_tables(pattern, length, q.device)
    tables = sum(each.nbytes for each in flex.block_mask(table).as_tuple() if torch.is_tensor(each))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = attend()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.3 * (output.nbytes + 2 * length * 4), "and log-sum-exps"
    assert tables < 0.05 * q.nbytes


def test_a_layer_that_is_recomputed_has_the_same_kernel_again(monkeypatch):
    module = BlockSparseAttention(config("strided"))
    q, k, v = (
        torch.randn(1, 2048, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    whole = module(q, k, v)  # which proves the kernel beside gathered keys
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), upstream)

    def is_gathered(*_: object) -> None:
        raise AssertionError("keys are gathered")

    monkeypatch.setattr(block_flex, "attend_by_gather", is_gathered)
    again = checkpoint(module, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(again, (q, k, v), upstream)
    for mine, theirs in zip((again, *found), (whole, *expected), strict=True):
        assert (mine - theirs).norm() < DIGITS * torch.finfo(q.dtype).eps * theirs.norm()


def test_the_published_example_runs_in_data_parallel():
    length = 8192
    model = BlockSparseRingDilatedAttention(
        segment_lengths=[length // 2, length],
        dilation_rates=[1, 2],
        sparse_config=SparsePatternConfig(
            pattern_type="dilated_sparse", sparsity_ratio=0.02, block_size=256
        ),
    )
    replicas = nn.DataParallel(model).cuda()
    q = torch.randn(2, length, 2, 32, device="cuda", dtype=torch.float16)
    with torch.no_grad(), torch.autocast("cuda"):
        output = replicas(q, q, q)
    expected = model(*(q.double().cpu() for _ in range(3)))
    eps = torch.finfo(q.dtype).eps
    assert (output.cpu().double() - expected).norm() < DIGITS * eps * expected.norm()
