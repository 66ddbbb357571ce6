"""Branches by FlexAttention against gathered keys on a GPU."""

import pytest
import torch

from highwater import BlockSparseRingDilatedAttention, SparsePatternConfig
from highwater.engine.attention.branch_kernel import branch_deviations
from highwater.engine.attention.branches import Branch, dilated_branches
from highwater.engine.attention.kernel_proof import ProofSizes
from highwater.nouns.sparse_pattern import PatternType

EVERY: tuple[PatternType | None, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
    None,
)
DIGITS = 16
"""Roundings that a kernel may be off by, norm-relative: as a proof allows."""


def config(pattern_type: PatternType) -> SparsePatternConfig:
    return SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=None if "local" in pattern_type else 0.2,
        local_window_size=700,
        global_tokens=45,
    )


@pytest.mark.parametrize(
    ("pattern_type", "is_dilated"),
    [*((each, False) for each in EVERY), ("strided", True), ("global_local", True), (None, True)],
)
@pytest.mark.parametrize(
    ("dtype", "groups"), [(torch.float32, 3), (torch.bfloat16, 4), (torch.float16, 1)]
)
def test_branches_are_what_gathered_keys_give(
    pattern_type: PatternType | None, dtype: torch.dtype, groups: int, *, is_dilated: bool
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 has a thousandth of its digits
    sizes = ProofSizes(groups, 5003, 64, dtype, torch.device("cuda"))
    branches = dilated_branches((1500, 6000), (1, 2), 2 * groups) if is_dilated else (Branch(),)
    found = list(branch_deviations(sizes, branches, pattern_type and config(pattern_type)))
    torch.set_float32_matmul_precision(before)
    names = ("output", "log-sum-exp", "query", "key", "value")
    assert max(found) < DIGITS * torch.finfo(dtype).eps, dict(zip(names, found, strict=True))


def test_the_module_is_what_it_is_in_double_precision():
    """In the backward pass too, which runs in a thread of PyTorch's own."""
    length = 8192
    model = BlockSparseRingDilatedAttention(
        segment_lengths=[length // 2, length],
        dilation_rates=[1, 2],
        sparse_config=SparsePatternConfig(sparsity_ratio=0.1),
    )
    q = torch.randn(1, length, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = q.detach().cpu().double().requires_grad_()
    output, expected = (model(each, each, each) for each in (q, wide))
    upstream = torch.randn_like(output)
    (mine,) = torch.autograd.grad(output, q, upstream)
    (theirs,) = torch.autograd.grad(expected, wide, upstream.cpu().double())
    for one, other in ((output, expected), (mine, theirs)):
        assert (one.cpu().double() - other).norm() < DIGITS * 2**-8 * other.norm()
