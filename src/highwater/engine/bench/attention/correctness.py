"""Whether a contender is right: its output and the gradients of queries, keys and values beside the
textbook formula in float64, of a short sequence whose length no block divides.

The formula knows an attention by its counts alone: how many times each token meets each key, none
for a key that it does not see.

Shapes:  B 1  H query heads  K key/value heads  S tokens  s tokens of this rank  D head size
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from highwater.engine.bench.attention.contenders import AttentionContender, Conditions
from highwater.engine.parallel.sequence_layout import PADDING

CHECKED_TOKENS = 515
"""Length of the sequence: five blocks, the last of them not full."""
OFF_AT_THE_MOST: dict[torch.dtype, float] = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 2e-5,
}
"""Norm-relative difference: of each dtype eight roundings of its own, which weights and their
gradients go through."""


_COMPARED = ("output", "query_gradient", "key_gradient", "value_gradient")


def differences(
    contender: AttentionContender,
    conditions: Conditions,
    rank: int = 0,
    *,
    length: int = CHECKED_TOKENS,
) -> dict[str, float]:
    """Norm-relative difference of each from float64, the largest of the contender and its variants;
    of what this rank holds.
    """
    found = [
        _differences(each, conditions, rank, length) for each in (contender, *contender.variants)
    ]
    largest = (float(torch.stack(each).max()) for each in zip(*found, strict=True))
    return dict(zip(_COMPARED, largest, strict=True))


def naive_attention(
    query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, counts: Tensor, scaling: float
) -> Tensor:
    """The textbook formula in float64, each exponential as many times as it is counted; zeros for a
    token that meets no key.
    """
    groups = len(query_HSD) // len(key_KSD)
    key_HSD, value_HSD = (t.double().repeat_interleave(groups, 0) for t in (key_KSD, value_KSD))
    scores_HSS = query_HSD.double() @ key_HSD.transpose(1, 2) * scaling + counts.double().log()
    return scores_HSS.softmax(-1).nan_to_num(0.0) @ value_HSD


def _differences(
    contender: AttentionContender, conditions: Conditions, rank: int, length: int
) -> Sequence[Tensor]:
    whole = _tensors(conditions, length)
    expected = _expected(contender, conditions, whole)
    share = conditions.layout(length).cut(rank)
    positions_s = torch.from_numpy(share.positions_T).to(conditions.device)
    is_token_s = positions_s != PADDING
    query, key, value, upstream = (_of_rank(each, positions_s) for each in whole)
    inputs = [each.requires_grad_() for each in (query, key, value)]
    output = contender.build(conditions, length)(*inputs)[0]
    gradients = torch.autograd.grad(output, inputs, upstream)
    return [
        _difference(mine[0][:, is_token_s], theirs[:, positions_s[is_token_s]])
        for mine, theirs in zip((output, *gradients), expected, strict=True)
    ]


def _difference(mine: Tensor, theirs: Tensor) -> Tensor:
    return (mine.detach().double() - theirs).norm() / theirs.norm()


def _tensors(conditions: Conditions, length: int) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: the same on every rank."""
    random = torch.Generator().manual_seed(0)
    heads = (conditions.heads, conditions.kv_heads, conditions.kv_heads, conditions.heads)
    return [
        torch.randn(count, length, conditions.head_dim, generator=random).to(
            conditions.device, conditions.dtype
        )
        for count in heads
    ]


def _of_rank(tensor_XSD: Tensor, positions_s: Tensor) -> Tensor:
    """What a rank holds of it, zeros for padding; BXsD."""
    held = tensor_XSD[:, positions_s.clamp(min=0)]
    return held.masked_fill((positions_s == PADDING)[:, None], 0.0)[None]


def _expected(
    contender: AttentionContender, conditions: Conditions, whole: Sequence[Tensor]
) -> list[Tensor]:
    query, key, value, upstream = (each.double() for each in whole)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    counts = contender.counts(conditions, query.shape[1]).to(conditions.device)
    output = naive_attention(*inputs, counts, conditions.scaling)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
