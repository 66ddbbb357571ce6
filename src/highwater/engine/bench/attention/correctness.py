"""Correctness of a contender: its output, and the gradients of queries, keys and values, against
the textbook formula in float64, on a short sequence whose length no block divides.

The formula knows an attention only by its counts: how many times each token meets each key, 0 for
a key that it does not see.

Shapes:  B 1  H query heads  K key/value heads  S tokens  s tokens of this rank  D head size
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from highwater.engine.bench.attention.contenders import Build, Conditions, counts
from highwater.engine.parallel.sequence_layout import PADDING
from highwater.nouns.attention_bench import CHECKED_TOKENS

_COMPARED = ("output", "query_gradient", "key_gradient", "value_gradient")


def differences(build: Build, conditions: Conditions, rank: int = 0) -> dict[str, float]:
    """Norm-relative differences from float64, over this rank's tokens: the larger ones of two
    checks, one with the pattern's own sizes, one with sizes that suit a short sequence.
    """
    found = [_differences(build, conditions, rank)]
    if (short := conditions.short()) != conditions:
        found.append(_differences(build, short, rank))
    largest = (float(torch.stack(each).max()) for each in zip(*found, strict=True))
    return dict(zip(_COMPARED, largest, strict=True))


def naive_attention(
    query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, counts: Tensor, scaling: float
) -> Tensor:
    """Compute the textbook formula in float64, each exponential as often as it is counted; zeros
    for a token that meets no key.
    """
    groups = len(query_HSD) // len(key_KSD)
    key_HSD, value_HSD = (t.double().repeat_interleave(groups, 0) for t in (key_KSD, value_KSD))
    scores_HSS = query_HSD.double() @ key_HSD.transpose(1, 2) * scaling + counts.double().log()
    return scores_HSS.softmax(-1).nan_to_num(0.0) @ value_HSD


def _differences(build: Build, conditions: Conditions, rank: int) -> list[Tensor]:
    random, size = torch.Generator().manual_seed(0), conditions.order.head_dim
    # queries, keys, values and output gradient, XSD: the same on every rank
    whole = [
        torch.randn(heads, CHECKED_TOKENS, size, generator=random).to(
            conditions.device, conditions.dtype
        )
        for heads in (*conditions.heads_of_qkv, conditions.order.heads)
    ]
    expected = _expected(conditions, whole)
    share = conditions.layout(CHECKED_TOKENS).cut(rank)
    positions_s = torch.from_numpy(share.positions_T).to(conditions.device)
    is_token_s = positions_s != PADDING
    held = [
        each[:, positions_s.clamp(min=0)].masked_fill(~is_token_s[:, None], 0.0)[None]
        for each in whole
    ]
    inputs = [each.requires_grad_() for each in held[:3]]
    output = build(conditions, CHECKED_TOKENS)(*inputs)[0]
    gradients = torch.autograd.grad(output, inputs, held[3])
    found: list[Tensor] = []
    for mine, its in zip((output, *gradients), expected, strict=True):
        theirs = its[:, positions_s[is_token_s]]
        difference = mine[0][:, is_token_s].detach().double() - theirs
        found.append(difference.norm() / theirs.norm())
    return found


def _expected(conditions: Conditions, whole: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients by the formula."""
    query, key, value, upstream = (each.double() for each in whole)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    counts_HSS = counts(conditions, query.shape[1]).to(conditions.device)
    output = naive_attention(*inputs, counts_HSS, conditions.scaling)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
