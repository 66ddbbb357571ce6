"""Dilated attention: branches of growing segment length, in which fewer and fewer tokens attend.

A branch of segment length w and rate r attends within segments of w tokens, over every r-th token
from offset ``j mod r`` on, for head j. Branches are mixed by the sums of their softmaxes: this is
one softmax over all their keys, with a key that two branches share counted twice. A token that is
in no branch of some head gets zeros there.

Segments are a batch, each branch is a few calls of a fused kernel, and memory is linear in the
length.

Shapes:  B sequences  H query heads  K key/value heads  S tokens  D head size  n segments  l tokens
         of one that attend
Source: Ding et al., LongNet, https://arxiv.org/abs/2307.02486. ``normalisation="groups"`` is that
        of the package dilated-attention-pytorch (fkodom), for checkpoints trained with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import Block, merge_
from highwater.errors import UsageError
from highwater.nouns.hardware import Kernel
from highwater.nouns.sparse_pattern import refuse_branches

Normalisation = Literal["softmax", "groups"]


class Segments(NamedTuple):
    """Segments of one length, and the heads and tokens in them that attend."""

    heads: slice
    start: int
    segments: int
    length: int
    """Tokens of a whole segment."""
    tokens: slice
    """Tokens of a segment that attend."""

    def of(self, tensor_BHSn: Tensor) -> Tensor:
        """View the tokens and heads of a tensor that attend: BnHl, then further dimensions."""
        stop = self.start + self.segments * self.length
        row = tensor_BHSn[:, self.heads, self.start : stop]
        return row.unflatten(2, (self.segments, self.length)).transpose(1, 2)[..., self.tokens, :]

    def sums_of(self, tensor_BHS: Tensor) -> Tensor:
        """View the tokens and heads of BHS sums, one value for each token, that attend; BnHl."""
        return self.of(tensor_BHS[..., None])[..., 0]


def dilated_attention(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    scaling: float,
    is_causal: bool = True,
    kernel: Kernel = "flash",
    normalisation: Normalisation = "softmax",
) -> tuple[Tensor, Tensor]:
    """Return attention of each sequence over itself, BHSD, and the log-sum-exp of each query, BHS,
    minus infinity for a query in no branch; the log-sum-exp has no gradient.

    Default segments and rates are the published ones: half the length and all of it, rates 1 and 2.
    With ``normalisation="groups"`` each branch has a group of heads, its outputs are divided by
    their sum over the sequence, and the log-sum-exp is all zeros.

    Raises UsageError for invalid segments and rates.
    """
    length = query_BHSD.shape[2]
    lengths = (max(1, length // 2), length) if segment_lengths is None else segment_lengths
    rates = (1, 2) if dilation_rates is None else dilation_rates
    refuse_branches(lengths, rates)
    groups = query_BHSD.shape[1] // key_BKSD.shape[1]
    tensors = [query_BHSD, key_BKSD, value_BKSD]
    if groups > 1:
        tensors[1:] = (each.repeat_interleave(groups, dim=1) for each in tensors[1:])
    how = (scaling, is_causal, kernel)
    if normalisation == "groups":
        return _by_groups(tensors, lengths, rates, how)
    parts = [
        part
        for segment, rate in zip(lengths, rates, strict=True)
        for offset in range(min(rate, query_BHSD.shape[1]))
        for part in _parts(slice(offset, None, rate), length, segment, slice(offset, None, rate))
    ]
    return _Branches.apply(*tensors, parts, how)


def _parts(heads: slice, length: int, segment: int, tokens: slice) -> Iterator[Segments]:
    """Yield the full segments, then the shorter rest of the sequence, if there is one."""
    segments = length // segment
    if segments:
        yield Segments(heads, 0, segments, segment, tokens)
    rest = length - segments * segment
    if rest:
        yield Segments(heads, segments * segment, 1, rest, tokens)


def _by_groups(
    tensors: Sequence[Tensor],
    lengths: Sequence[int],
    rates: Sequence[int],
    how: tuple[float, bool, Kernel],
) -> tuple[Tensor, Tensor]:
    """Attend with one group of heads for each branch; the first groups may have one more head."""
    heads, length = tensors[0].shape[1:3]
    output = torch.zeros_like(tensors[0])
    for number, (segment, rate) in enumerate(zip(lengths, rates, strict=True)):
        if length % segment:
            raise UsageError(
                f"segments of {segment} tokens do not divide {length}",
                hint='use segment lengths that do, or `normalisation="softmax"`',
            )
        size = heads // len(rates) + (number < heads % len(rates))
        own = slice(number * size, (number + 1) * size)
        parts = list(_parts(slice(None), length, segment, slice(number % rate, None, rate)))
        branch, _ = _Branches.apply(*(tensor[:, own] for tensor in tensors), parts, how)
        normalised = branch / branch.sum(dim=2, keepdim=True)
        output[:, own] = output[:, own] + normalised
    return output / len(rates), torch.zeros_like(output[..., 0])


class _Branches(torch.autograd.Function):
    """Autograd function over all segments; backward passes use the merged output and sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHSD: Tensor,
        key_BHSD: Tensor,
        value_BHSD: Tensor,
        parts: Sequence[Segments],
        how: tuple[float, bool, Kernel],
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query_BHSD.dtype, torch.float32)
        output = torch.zeros_like(query_BHSD, dtype=wide)
        log_sums = torch.full_like(query_BHSD[..., 0], -torch.inf, dtype=wide)
        for part in parts:
            own = part.of(output)
            if own.numel():
                found, its_sums = _block(part, (query_BHSD, key_BHSD, value_BHSD), how).forward()
                shaped = [each.unflatten(0, own.shape[:2]) for each in (found, its_sums)]
                merge_(own, part.sums_of(log_sums), (shaped[0], shaped[1]))
        narrow = output.to(query_BHSD.dtype)
        ctx.save_for_backward(query_BHSD, key_BHSD, value_BHSD, narrow, log_sums)
        ctx.parts, ctx.how = parts, how
        ctx.mark_non_differentiable(log_sums)
        return narrow, log_sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *tensors, output, log_sums = ctx.saved_tensors
        wide = log_sums.dtype
        sums = [torch.zeros_like(tensor, dtype=wide) for tensor in tensors]
        for part in ctx.parts:
            of_queries = [part.of(gradients[0]), part.of(output)]
            if not of_queries[0].numel():
                continue
            upstream, attended = (each.flatten(0, 1) for each in of_queries)
            its_sums = part.sums_of(log_sums).flatten(0, 1)
            found = _block(part, tensors, ctx.how).backward(upstream, attended, its_sums)
            for sum_, gradient in zip(sums, found, strict=True):
                own = part.of(sum_)
                own.add_(gradient.unflatten(0, own.shape[:2]))
        query, key, value = (one.to(like.dtype) for one, like in zip(sums, tensors, strict=True))
        return query, key, value, None, None


def _block(part: Segments, tensors: Sequence[Tensor], how: tuple[float, bool, Kernel]) -> Block:
    """Return the attention block of a part, whose segments are the batch."""
    scaling, is_causal, kernel = how
    query, key, value = (part.of(tensor).flatten(0, 1) for tensor in tensors)
    return Block(query, key, value, is_causal, scaling, kernel)
