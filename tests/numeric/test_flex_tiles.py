"""Tiles attended by FlexAttention: masks hold what queries see, and an output that is part of a
whole has its part of the gradients. What is compiled is judged by tests/gpu/test_flex_tiles_on_gpu.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from highwater.engine.attention import branch_attention as branch_attention_module
from highwater.engine.attention import branch_kernel, flex_tiles
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branch_kernel import attend_branches, branches_obstacle
from highwater.engine.attention.branches import Branch, dilated_branches, exchange
from highwater.engine.attention.flex_tiles import tile_mask
from highwater.engine.attention.tiles import TilePairs
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.sparse_pattern import PatternType, SparsePatternConfig

CPU = torch.device("cpu")
BLOCK = 32
"""Of the kernel for the CPU."""
LENGTHS = (209, 40, 423)
EVERY: tuple[PatternType | None, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
    None,
)


def pattern_of(pattern_type: PatternType | None) -> SparsePatternConfig | None:
    return pattern_type and SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=None if "local" in pattern_type else 0.4,
        block_size=BLOCK,
        local_window_size=70,
        global_tokens=45,
    )


def seen_in(mask: BlockMask) -> Tensor:
    """What the tables and the function of a mask let each query see."""
    queries, keys = (torch.arange(length) for length in mask.seq_lengths)
    zero = torch.zeros((), dtype=torch.int64)
    by_token = mask.mask_mod(zero, zero, queries[:, None], keys)
    size = mask.BLOCK_SIZE[0]
    part, full = (
        torch.zeros(len(queries) // size, len(keys) // size, dtype=torch.bool) for _ in range(2)
    )
    for kept, numbers, indices in (
        (part, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert numbers is not None
        assert indices is not None
        for row, count in enumerate(numbers[0, 0].tolist()):
            kept[row, indices[0, 0, row, :count].long()] = True
    assert not (part & full).any()
    part, full = (
        each.repeat_interleave(size, 0).repeat_interleave(size, 1) for each in (part, full)
    )
    return full | (part & by_token)


def seen_of(pairs: TilePairs) -> Tensor:
    """The same, token by token, from what the tiles are said to hold."""
    queries, keys, size = pairs.queries, pairs.keys, pairs.queries.size
    seen = torch.zeros(len(queries) * size, len(keys) * size, dtype=torch.bool)
    for row in range(len(queries)):
        for column in pairs.columns[0, pairs.starts[row] : pairs.starts[row + 1]].tolist():
            within = torch.arange(size)
            token = queries.offsets_R[row] + within[:, None]
            key = keys.offsets_R[column] + within
            found = (within[:, None] < queries.counts_R[row]) & (within < keys.counts_R[column])
            found &= (key <= token) | torch.tensor(not pairs.is_causal)
            found &= key >= pairs.keys_from
            if pairs.keys_below is not None:
                found &= key < pairs.keys_below
            if pairs.window_tokens is not None:
                found &= key > token - pairs.window_tokens
            seen[row * size :][:size, column * size :][:, :size] = found
    return seen


@pytest.mark.parametrize(
    ("pattern_type", "is_causal"), [*((each, True) for each in EVERY), (None, False)]
)
@pytest.mark.parametrize("degrees", [(1, 1), (1, 2), (3, 1)])
def test_masks_hold_what_queries_see_of_every_rank(
    pattern_type: PatternType | None, degrees: tuple[int, int], *, is_causal: bool
) -> None:
    layout = SequenceLayout(LENGTHS, *degrees)
    count = 0
    for branch in (Branch(), *dilated_branches((100, 300), (1, 3), 4)[1:3]):
        for source in range(layout.degree):
            found = exchange(
                layout,
                branch,
                pattern_of(pattern_type),
                is_causal=is_causal,
                rank=layout.degree - 1,
                source=source,
                device=CPU,
            )
            for pairs in found.pairs:
                mask = tile_mask(pairs)
                assert torch.equal(seen_in(mask), seen_of(pairs))
                count += int(seen_in(mask).sum())
    assert count


def in_plain_pytorch(
    query_NGSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    mask: BlockMask,
    scaling: float,
    **_: Any,
) -> Any:
    """What FlexAttention computes, and of a query that sees nothing zeros and minus infinity."""
    seen = seen_in(mask)
    scores = query_NGSD @ key_NSD[:, None].transpose(-1, -2) * scaling
    finite = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    output = (finite.softmax(-1) * seen) @ value_NSD[:, None]

    class Auxiliary:
        lse = finite.logsumexp(-1).masked_fill(~seen.any(-1), -torch.inf)

    return output, Auxiliary


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("pattern_type", EVERY)
@pytest.mark.parametrize("is_dilated", [False, True])
@pytest.mark.parametrize("at_hand", [1, 2**28])
def test_parts_have_their_part_of_the_gradients(
    pattern_type: PatternType | None,
    heads: tuple[int, int],
    at_hand: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_dilated: bool,
) -> None:
    monkeypatch.setattr(flex_tiles, "attend_mask", in_plain_pytorch)
    monkeypatch.setattr(branch_attention_module, "_QUERIES_AT_HAND", at_hand)
    sharing = Sharing(
        layout=SequenceLayout(LENGTHS),
        branches=dilated_branches((100, 300), (1, 3), 4) if is_dilated else (Branch(),),
        pattern=pattern_of(pattern_type),
        scaling=0.3,
    )
    torch.manual_seed(0)
    shapes = [(2, count, sum(LENGTHS), 8) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream = (torch.randn_like(inputs[0]), torch.randn_like(inputs[0][..., 0]))
    found: list[list[Tensor]] = []
    for implementation in ("flex", "gather"):
        output, sums = attend_branches(*inputs, sharing=sharing, implementation=implementation)
        finite = sums.masked_fill(sums == -torch.inf, 0.0)
        gradients = torch.autograd.grad((output, finite), inputs, upstream)
        found.append([output, finite, *gradients])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() < 1e-12 * theirs.norm()


def test_a_kernel_that_is_wrong_is_not_used_for_branches(monkeypatch):
    """Gathered keys in its place prove themselves; other values do not, and are not used."""
    sharing = Sharing(
        layout=SequenceLayout((64,)),
        branches=(Branch(),),
        pattern=SparsePatternConfig(pattern_type="strided", block_size=16),
        scaling=0.3,
    )
    query, key = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    monkeypatch.setattr(flex_tiles, "attend_mask", in_plain_pytorch)
    branch_kernel.proof_of_branches.cache_clear()
    assert branches_obstacle(sharing, query, 2) is None

    def is_off(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Any:
        return in_plain_pytorch(query, key, value * 1.001, *others, **more)

    monkeypatch.setattr(flex_tiles, "attend_mask", is_off)
    branch_kernel.proof_of_branches.cache_clear()
    assert "is off by" in (branches_obstacle(sharing, query, 2) or "")
    monkeypatch.setattr(branch_kernel, "takes", lambda *_: True)
    with pytest.warns(UserWarning, match="keys are gathered instead"):
        output, _ = attend_branches(query, key, key, sharing=sharing)
    branch_kernel.proof_of_branches.cache_clear()
    assert torch.equal(output, branch_attention(query, key, key, sharing=sharing)[0])
