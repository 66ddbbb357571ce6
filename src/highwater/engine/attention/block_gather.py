"""Block-gather attention: block-sparse attention in plain PyTorch, forward and backward, in any
dtype and on any device.

A few rows of blocks are computed at a time: the keys and values that they keep are gathered, and
one softmax goes over all of them. The scores held at once are bounded for any length, so memory is
linear in the length. Scores and sums are in float32 or wider.

Shapes:  N groups of heads, of all sequences: B K  G query heads of a group  S tokens  D head size
         R tiles of queries (``tiles``), a row each  C tiles of keys  r rows computed at once
         c entries of the fullest row  b tokens of a tile  l = c b keys of a row  M 1, or N: tables
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from highwater.engine.attention.block_table import (
    BlockTable,
    TilePairs,
    block_tables,
    pairs_of,
    top_k_table,
)
from highwater.nouns.sparse_pattern import SparsePatternConfig, causal_pairs

SCORES_AT_HAND = 2**24
"""Scores computed at once, over all heads; at least one row of blocks."""


AttendTable = Callable[[Tensor, Tensor, Tensor, BlockTable, float], tuple[Tensor, Tensor]]
"""Attend by one table: queries, keys and values of groups of heads, the table, and the scaling."""


class SparseAttention(NamedTuple):
    """Output of block-sparse attention, with the log-sum-exp of each query."""

    output_BHSD: Tensor
    log_sums_BHS: Tensor
    """Logarithm of each query's sum of exponentials, in float32 or wider."""
    kept_share: float
    """Share of the causal token pairs within documents that the pattern keeps, exactly."""


def block_sparse_attention(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    pattern: SparsePatternConfig,
    scaling: float,
    document_lengths: Sequence[int] | None = None,
    attend_table: AttendTable | None = None,
) -> SparseAttention:
    """Causal attention of each sequence over the keys that a pattern keeps: one softmax over all of
    them, differentiable through output and log-sum-exp.

    ``document_lengths`` add up to S: each document attends only to itself, and its pattern counts
    from its own start; None: one document. Query head h reads key and value head ``h // (H / K)``.
    ``attend_table`` computes the attention of one table; None: by gathering keys.
    Raises UsageError for a ratio that the pattern's window contradicts.
    """
    length = query_BHSD.shape[2]
    lengths = (length,) if document_lengths is None else tuple(document_lengths)
    assert sum(lengths) == length, "the documents' lengths add up to the sequence"
    parts: list[tuple[Tensor, Tensor]] = []
    start = kept = 0
    for of_each, run in groupby(lengths):
        documents = len(list(run))
        stop = start + documents * of_each
        each = [
            t[:, :, start:stop].unflatten(2, (documents, of_each)).transpose(1, 2).flatten(0, 1)
            for t in (query_BHSD, key_BKSD, value_BKSD)
        ]
        output, log_sums, kept_pairs = _of_one_length(
            *each, pattern, scaling, attend_table or attend_by_gather
        )
        batch = (len(query_BHSD), documents)
        output_BHsD = output.unflatten(0, batch).transpose(1, 2).flatten(2, 3)
        parts.append((output_BHsD, log_sums.unflatten(0, batch).transpose(1, 2).flatten(2, 3)))
        start, kept = stop, kept + documents * kept_pairs
    outputs, sums = zip(*parts, strict=True)
    share = kept / sum(map(causal_pairs, lengths))
    if len(parts) == 1:
        return SparseAttention(*parts[0], share)
    return SparseAttention(torch.cat(outputs, dim=2), torch.cat(sums, dim=2), share)


def _of_one_length(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    pattern: SparsePatternConfig,
    scaling: float,
    attend_table: AttendTable,
) -> tuple[Tensor, Tensor, int]:
    """Attend within documents of one length; returns output, log-sum-exp, number of kept pairs."""
    batch, kv_heads = key_BKSD.shape[:2]
    query_NGSD = query_BHSD.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    key_NSD, value_NSD = key_BKSD.flatten(0, 1), value_BKSD.flatten(0, 1)
    if pattern.follows_content:
        with torch.no_grad(), exact(query_BHSD.device):
            tables = (top_k_table(pattern, query_NGSD.mean(1), key_NSD),)
    else:
        tables = block_tables(pattern, query_BHSD.shape[2], query_BHSD.device)
    passes = [attend_table(query_NGSD, key_NSD, value_NSD, table, scaling) for table in tables]
    output_NGSD, log_sums_NGS = merged(passes)
    heads = (batch, kv_heads)
    return (
        output_NGSD.unflatten(0, heads).flatten(1, 2),
        log_sums_NGS.unflatten(0, heads).flatten(1, 2),
        sum(table.kept_pairs for table in tables),
    )


def attend_by_gather(
    query_NGSD: Tensor, key_NSD: Tensor, value_NSD: Tensor, table: BlockTable, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend by one table by gathering keys, NGSD, with each query's log-sum-exp, NGS."""
    return _BlockGather.apply(query_NGSD, key_NSD, value_NSD, pairs_of(table), scaling)


def merged(passes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention outputs over disjoint keys, each weighted by its sum of exponentials.
    Differentiable; a query may have no key in some of the passes, but not in all.
    """
    if len(passes) == 1:
        return passes[0]
    log_sums = torch.stack([log_sums for _, log_sums in passes]).logsumexp(0)
    output = sum(part * (sums - log_sums).exp()[..., None].to(part.dtype) for part, sums in passes)
    assert isinstance(output, Tensor)
    return output, log_sums


class _BlockGather(torch.autograd.Function):
    """Autograd function for one block table; it holds the scores of only a few rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NGSD: Tensor,
        key_NSD: Tensor,
        value_NSD: Tensor,
        pairs: TilePairs,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        cut = CutTensors.of(pairs, query_NGSD, key_NSD, value_NSD)
        output_NGRbD = torch.empty_like(cut.query_NGRbD)
        log_sums_NGRb = torch.empty_like(output_NGRbD[..., 0], dtype=cut.wide)
        for rows, found_NGrbD, log_sums_NGrb in cut.attended(pairs, scaling):
            output_NGRbD[:, :, rows] = found_NGrbD.to(output_NGRbD.dtype)
            log_sums_NGRb[:, :, rows] = log_sums_NGrb
        output_NGSD = pairs.queries.joined(output_NGRbD)
        log_sums_NGS = pairs.queries.joined(log_sums_NGRb[..., None])[..., 0]
        ctx.save_for_backward(query_NGSD, key_NSD, value_NSD, output_NGSD, log_sums_NGS)
        ctx.pairs, ctx.scaling = pairs, scaling
        return output_NGSD, log_sums_NGS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_NGSD, key_NSD, value_NSD, output_NGSD, log_sums_NGS = ctx.saved_tensors
        pairs: TilePairs = ctx.pairs
        cut = CutTensors.of(pairs, query_NGSD, key_NSD, value_NSD)
        upstream_NGSD, of_log_sums_NGS = gradients
        with exact(query_NGSD.device):
            # a score's gradient: weight x (its value above the mean + the log-sum-exp's gradient)
            above_NGS = of_log_sums_NGS - (upstream_NGSD.to(cut.wide) * output_NGSD).sum(-1)
            found = cut.gradients(
                pairs,
                scaling=ctx.scaling,
                upstream_NGRbD=pairs.queries.cut(upstream_NGSD),
                above_NGRb=pairs.queries.cut_sums(above_NGS),
                log_sums_NGRb=pairs.queries.cut_sums(log_sums_NGS),
            )
        tiles = (pairs.queries, pairs.keys, pairs.keys)
        query, key, value = (
            held.joined(each).to(query_NGSD.dtype) for held, each in zip(tiles, found, strict=True)
        )
        return query, key, value, None, None


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: disable autocast, which would round float32 values to 16 bits."""
    return torch.autocast(device.type, enabled=False)


class _Rows(NamedTuple):
    """Some rows of query tiles, and the key tiles that they keep."""

    pairs: TilePairs
    first: int
    """Index of the first row."""
    columns_Mrc: Tensor
    """Indices of each row's key tiles; arbitrary after a row's last entry."""
    is_entry_rc: Tensor

    @property
    def slice(self) -> "slice":
        return slice(self.first, self.first + len(self.is_entry_rc))

    def is_seen(self) -> Tensor:
        """True where a row's token sees a gathered key; Mrbl."""
        pairs, queries, keys = self.pairs, self.pairs.queries, self.pairs.keys
        within_b = torch.arange(queries.size, device=self.columns_Mrc.device)
        token_rb1 = (queries.offsets_R[self.slice, None] + within_b)[..., None]
        key_Mr1l = (keys.offsets_R[self.columns_Mrc][..., None] + within_b).flatten(2)[:, :, None]
        is_key_Mrcb = keys.is_token(self.columns_Mrc)
        is_key_Mr1l = (is_key_Mrcb & self.is_entry_rc[..., None]).flatten(2)[:, :, None]
        seen = is_key_Mr1l & queries.is_token(self.slice)[..., None]
        if pairs.is_causal:
            seen = seen & (key_Mr1l <= token_rb1)
        if pairs.keys_from:
            seen &= key_Mr1l >= pairs.keys_from
        if pairs.keys_below is not None:
            seen &= key_Mr1l < pairs.keys_below
        if pairs.window_tokens is not None:
            seen &= key_Mr1l > token_rb1 - pairs.window_tokens
        return seen


def _rows_at_hand(pairs: TilePairs, heads: int) -> Iterator[_Rows]:
    """Yield all rows in groups, each as large as ``SCORES_AT_HAND`` scores allow."""
    counts = pairs.starts.diff().tolist()
    first = 0
    while first < len(counts):
        stop, most = first, 0
        while stop < len(counts):
            most_then = max(most, counts[stop])
            scores = (stop + 1 - first) * most_then * pairs.queries.size**2 * heads
            if scores > SCORES_AT_HAND and stop > first:
                break
            stop, most = stop + 1, most_then
        yield _rows_from(pairs, first, stop, max(1, most))
        first = stop


def _rows_from(pairs: TilePairs, first: int, stop: int, most: int) -> _Rows:
    device = pairs.columns.device
    starts_r = pairs.starts[first:stop]
    is_entry_rc = torch.arange(most) < pairs.starts.diff()[first:stop, None]
    entries_rc = (starts_r[:, None] + torch.arange(most)).masked_fill(~is_entry_rc, 0)
    if not pairs.columns.shape[1]:
        columns_Mrc = torch.zeros(1, *entries_rc.shape, dtype=torch.int64, device=device)
    else:
        columns_Mrc = pairs.columns[:, entries_rc.to(device)].long()
    return _Rows(pairs, first, columns_Mrc, is_entry_rc.to(device))


class CutTensors(NamedTuple):
    """Queries, keys and values cut into tiles, with attention computed a few rows at a time."""

    query_NGRbD: Tensor
    key_NCbD: Tensor
    value_NCbD: Tensor

    @classmethod
    def of(cls, pairs: TilePairs, query_NGSD: Tensor, key_NSD: Tensor, value_NSD: Tensor) -> Self:
        """Cut queries, keys and values of whole sequences into the tiles of ``pairs``."""
        keys = pairs.keys
        return cls(pairs.queries.cut(query_NGSD), keys.cut(key_NSD), keys.cut(value_NSD))

    @property
    def wide(self) -> torch.dtype:
        """Dtype of all sums: float32 or wider."""
        return torch.promote_types(self.query_NGRbD.dtype, torch.float32)

    def attended(self, pairs: TilePairs, scaling: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield, for some rows of tiles at a time, their slice, their output, NGrbD, and the
        log-sum-exp of each query, NGrb, minus infinity if it sees no key; both in float32 or wider.
        """
        for rows in _rows_at_hand(pairs, self.query_NGRbD.shape[:2].numel()):
            with exact(self.query_NGRbD.device):
                scores_NGrbl, _, value_NrlD = self._scores(rows, scaling)
                log_sums_NGrb = scores_NGrbl.logsumexp(-1)
                weights_NGrbl = _weights(scores_NGrbl, log_sums_NGrb)
                found = torch.einsum("ngrbl,nrld->ngrbd", weights_NGrbl, value_NrlD)
            yield rows.slice, found, log_sums_NGrb

    def gradients(
        self,
        pairs: TilePairs,
        *,
        scaling: float,
        upstream_NGRbD: Tensor,
        above_NGRb: Tensor,
        log_sums_NGRb: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, NGRbD, keys and values, NCbD, from these keys' share of the
        softmax, in the inputs' dtype or wider. ``log_sums`` and ``above`` are over all keys;
        ``above`` is the log-sum-exp's gradient minus the sum of the output times its gradient.
        """
        # contiguous: rows are added in place through views
        query_sum, key_sum, value_sum = (
            torch.zeros_like(each, dtype=self.wide, memory_format=torch.contiguous_format)
            for each in self
        )
        for rows in _rows_at_hand(pairs, self.query_NGRbD.shape[:2].numel()):
            own = rows.slice
            scores_NGrbl, key_NrlD, value_NrlD = self._scores(rows, scaling)
            weights_NGrbl = _weights(scores_NGrbl, log_sums_NGRb[:, :, own])
            upstream_NGrbD = upstream_NGRbD[:, :, own].to(self.wide)
            for_values = torch.einsum("ngrbl,ngrbd->nrld", weights_NGrbl, upstream_NGrbD)
            _add_(value_sum, rows, for_values)
            for_scores = torch.einsum("ngrbd,nrld->ngrbl", upstream_NGrbD, value_NrlD)
            for_scores = (for_scores + above_NGRb[:, :, own, :, None]) * weights_NGrbl * scaling
            query_sum[:, :, own] += torch.einsum("ngrbl,nrld->ngrbd", for_scores, key_NrlD)
            query_NGrbD = self.query_NGRbD[:, :, own].to(self.wide)
            _add_(key_sum, rows, torch.einsum("ngrbl,ngrbd->nrld", for_scores, query_NGrbD))
        return query_sum, key_sum, value_sum

    def _scores(self, rows: _Rows, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, NGrbl, minus infinity for unseen keys; the gathered keys and values, NrlD."""
        groups_N11 = torch.arange(len(self.key_NCbD), device=self.key_NCbD.device)[:, None, None]
        key_NrlD, value_NrlD = (
            each[groups_N11, rows.columns_Mrc].flatten(2, 3).to(self.wide)
            for each in (self.key_NCbD, self.value_NCbD)
        )
        query_NGrbD = self.query_NGRbD[:, :, rows.slice].to(self.wide)
        scores_NGrbl = torch.einsum("ngrbd,nrld->ngrbl", query_NGrbD, key_NrlD) * scaling
        return (scores_NGrbl.masked_fill(~rows.is_seen()[:, None], -math.inf), key_NrlD, value_NrlD)


def _add_(sum_NCbD: Tensor, rows: _Rows, parts_NrlD: Tensor) -> None:
    """Add rows' gradients to the sums of their key tiles, in place; padded entries are 0."""
    groups, tiles = sum_NCbD.shape[:2]
    groups_N11 = torch.arange(groups, device=sum_NCbD.device)[:, None, None]
    tiles_Nrc = rows.columns_Mrc + groups_N11 * tiles
    parts = parts_NrlD.unflatten(2, (tiles_Nrc.shape[2], -1)).flatten(0, 2)
    sum_NCbD.view(-1, *sum_NCbD.shape[2:]).index_add_(0, tiles_Nrc.flatten(), parts)


def _weights(scores_NGrbl: Tensor, log_sums_NGrb: Tensor) -> Tensor:
    """Return the softmax weights; all 0 where a query sees no key."""
    finite = log_sums_NGrb.masked_fill(log_sums_NGrb == -math.inf, 0.0)
    return (scores_NGrbl - finite[..., None]).exp()
