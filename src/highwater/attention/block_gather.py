"""Block-gather attention: block-sparse attention in plain PyTorch, forward and backward, in any
dtype and on any device.

Rows of blocks are computed some at a time: the keys and values that they keep are gathered, and one
softmax is over all of them. What is at hand is bounded, whatever the length, so that memory is
linear in it. Scores and sums are in float32 at least.

Shapes:  N groups of heads, of all sequences: B K  G query heads of a group  S tokens  D head size
         R blocks of the sequence  r rows at hand  c entries of the fullest of them  b tokens of a
         block  l = c b keys at hand of a row  M 1, or N: tables
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.attention.block_table import BlockTable, block_tables, kept_share, top_k_table
from highwater.spec.sparse_pattern import SparsePatternConfig

SCORES_AT_HAND = 2**24
"""Scores that are computed at once, of all heads; one row of blocks at the least."""


class SparseAttention(NamedTuple):
    """What attention returns."""

    output_BHSD: Tensor
    log_sums_BHS: Tensor
    """Logarithm of each query's sum of exponentials, in float32 or wider."""
    kept_share: float
    """Share of the causal pairs of tokens that were kept, by element."""


def block_sparse_attention(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    pattern: SparsePatternConfig,
    scaling: float,
) -> SparseAttention:
    """Causal attention of each sequence over the keys that a pattern keeps: one softmax over all of
    them, differentiable through output and log-sum-exp.

    Query head h reads key and value head ``h // (H / K)``. Raises UsageError for a ratio that the
    pattern's window contradicts.
    """
    batch, kv_heads = key_BKSD.shape[:2]
    query_NGSD = query_BHSD.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    key_NSD, value_NSD = key_BKSD.flatten(0, 1), value_BKSD.flatten(0, 1)
    if pattern.follows_content:
        with torch.no_grad():
            tables = (top_k_table(pattern, query_NGSD.mean(1), key_NSD),)
    else:
        tables = block_tables(pattern, query_BHSD.shape[2], query_BHSD.device)
    passes = [
        _BlockGather.apply(query_NGSD, key_NSD, value_NSD, table, scaling) for table in tables
    ]
    output_NGSD, log_sums_NGS = merged(passes)
    heads = (batch, kv_heads)
    return SparseAttention(
        output_NGSD.unflatten(0, heads).flatten(1, 2),
        log_sums_NGS.unflatten(0, heads).flatten(1, 2),
        kept_share(tables),
    )


def merged(passes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention of several over keys that are different ones: each output weighs as the
    exponentials it summed. Differentiable; a query may have no key in some, but not in all.
    """
    if len(passes) == 1:
        return passes[0]
    log_sums = torch.stack([log_sums for _, log_sums in passes]).logsumexp(0)
    output = sum(part * (sums - log_sums).exp()[..., None].to(part.dtype) for part, sums in passes)
    assert isinstance(output, Tensor)
    return output, log_sums


class _Rows(NamedTuple):
    """Some rows of blocks, and what they keep."""

    table: BlockTable
    first: int
    """Number of the first row."""
    columns_Mrc: Tensor
    """Blocks of keys of each, some number where a row has fewer."""
    is_entry_rc: Tensor

    @property
    def stop(self) -> int:
        return self.first + len(self.is_entry_rc)

    def is_seen(self, *, by_table: Tensor) -> Tensor:
        """Whether a token of a row sees a key at hand; Mrbl."""
        size = self.table.block_size
        within_b = torch.arange(size, device=by_table.device)
        rows_r = torch.arange(self.first, self.stop, device=by_table.device)
        token_rb = rows_r[:, None] * size + within_b
        key_Mrl = (by_table[..., None] * size + within_b).flatten(2)
        token_rb1, key_Mr1l = token_rb[..., None], key_Mrl[:, :, None]
        seen = (key_Mr1l <= token_rb1) & (key_Mr1l >= self.table.keys_from)
        below = self.table.length_tokens
        if self.table.keys_below is not None:
            below = min(below, self.table.keys_below)
        seen &= key_Mr1l < below
        if self.table.window_tokens is not None:
            seen &= key_Mr1l > token_rb1 - self.table.window_tokens
        return seen & self.is_entry_rc.repeat_interleave(size, 1)[:, None]


def _rows_at_hand(table: BlockTable, heads: int) -> Iterator[_Rows]:
    """All rows, as many at a time as their scores have room."""
    counts_R = table.starts.diff()
    first = 0
    while first < table.rows:
        stop, most = first, 0
        while stop < table.rows:
            most_then = max(most, int(counts_R[stop]))
            scores = (stop + 1 - first) * most_then * table.block_size**2 * heads
            if scores > SCORES_AT_HAND and stop > first:
                break
            stop, most = stop + 1, most_then
        yield _rows_from(table, first, stop, max(1, most))
        first = stop


def _rows_from(table: BlockTable, first: int, stop: int, most: int) -> _Rows:
    device = table.columns.device
    starts_r = table.starts[first:stop]
    is_entry_rc = torch.arange(most) < table.starts.diff()[first:stop, None]
    entries_rc = (starts_r[:, None] + torch.arange(most)).masked_fill(~is_entry_rc, 0)
    if not table.kept_blocks:
        columns_Mrc = torch.zeros(1, *entries_rc.shape, dtype=torch.int64, device=device)
    else:
        columns_Mrc = table.columns[:, entries_rc.to(device)].long()
    return _Rows(table, first, columns_Mrc, is_entry_rc.to(device))


class _BlockGather(torch.autograd.Function):
    """One pass over a table: no row of scores outlives the next."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NGSD: Tensor,
        key_NSD: Tensor,
        value_NSD: Tensor,
        table: BlockTable,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        blocks = _CutTensors(table, query_NGSD, key_NSD, value_NSD)
        output_NGRbD = torch.empty_like(blocks.query_NGRbD)
        log_sums_NGRb = torch.empty_like(output_NGRbD[..., 0], dtype=blocks.wide)
        for rows in _rows_at_hand(table, query_NGSD.shape[:2].numel()):
            scores_NGrbl, _, value_NrlD = blocks.scores(rows, scaling)
            log_sums_NGrb = scores_NGrbl.logsumexp(-1)
            weights_NGrbl = _weights(scores_NGrbl, log_sums_NGrb)
            found = torch.einsum("ngrbl,nrld->ngrbd", weights_NGrbl, value_NrlD)
            output_NGRbD[:, :, rows.first : rows.stop] = found.to(output_NGRbD.dtype)
            log_sums_NGRb[:, :, rows.first : rows.stop] = log_sums_NGrb
        length = table.length_tokens
        output_NGSD = output_NGRbD.flatten(2, 3)[:, :, :length]
        log_sums_NGS = log_sums_NGRb.flatten(2, 3)[:, :, :length]
        ctx.save_for_backward(query_NGSD, key_NSD, value_NSD, output_NGSD, log_sums_NGS)
        ctx.table, ctx.scaling = table, scaling
        return output_NGSD, log_sums_NGS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_NGSD, key_NSD, value_NSD, output_NGSD, log_sums_NGS = ctx.saved_tensors
        table: BlockTable = ctx.table
        blocks = _CutTensors(table, query_NGSD, key_NSD, value_NSD)
        upstream_NGSD, of_log_sums_NGS = (gradient.to(blocks.wide) for gradient in gradients)
        # a score's gradient is its weight times what its value is above the mean, and the sum's
        above_NGS = of_log_sums_NGS - (upstream_NGSD * output_NGSD).sum(-1)
        upstream_NGRbD = _in_blocks(upstream_NGSD, table)
        above_NGRb, log_sums_NGRb = (
            _in_blocks(each[..., None], table)[..., 0] for each in (above_NGS, log_sums_NGS)
        )
        query_gradient = torch.empty_like(blocks.query_NGRbD, dtype=blocks.wide)
        key_gradient = torch.zeros_like(blocks.key_NRbD, dtype=blocks.wide)
        value_gradient = torch.zeros_like(key_gradient)
        for rows in _rows_at_hand(table, query_NGSD.shape[:2].numel()):
            own = slice(rows.first, rows.stop)
            scores_NGrbl, key_NrlD, value_NrlD = blocks.scores(rows, ctx.scaling)
            weights_NGrbl = _weights(scores_NGrbl, log_sums_NGRb[:, :, own])
            upstream_NGrbD = upstream_NGRbD[:, :, own]
            blocks.add(
                value_gradient,
                rows,
                torch.einsum("ngrbl,ngrbd->nrld", weights_NGrbl, upstream_NGrbD),
            )
            for_scores = torch.einsum("ngrbd,nrld->ngrbl", upstream_NGrbD, value_NrlD)
            for_scores = (for_scores + above_NGRb[:, :, own, :, None]) * weights_NGrbl * ctx.scaling
            query_gradient[:, :, own] = torch.einsum("ngrbl,nrld->ngrbd", for_scores, key_NrlD)
            query_NGrbD = blocks.query_NGRbD[:, :, own].to(blocks.wide)
            blocks.add(
                key_gradient, rows, torch.einsum("ngrbl,ngrbd->nrld", for_scores, query_NGrbD)
            )
        length, dtype = table.length_tokens, query_NGSD.dtype
        return (
            query_gradient.flatten(2, 3)[:, :, :length].to(dtype),
            key_gradient.flatten(1, 2)[:, :length].to(dtype),
            value_gradient.flatten(1, 2)[:, :length].to(dtype),
            None,
            None,
        )


class _CutTensors:
    """Queries, keys and values in blocks, of which some rows are at hand."""

    def __init__(
        self, table: BlockTable, query_NGSD: Tensor, key_NSD: Tensor, value_NSD: Tensor
    ) -> None:
        self.wide = torch.promote_types(query_NGSD.dtype, torch.float32)
        self.query_NGRbD = _in_blocks(query_NGSD, table)
        self.key_NRbD = _in_blocks(key_NSD, table)
        self.value_NRbD = _in_blocks(value_NSD, table)
        self._group_N11 = torch.arange(len(key_NSD), device=key_NSD.device)[:, None, None]

    def scores(self, rows: _Rows, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the rows, NGrbl, minus infinity where a token does not see a key; and the keys
        and values at hand, NrlD.
        """
        key_NrlD, value_NrlD = (
            each[self._group_N11, rows.columns_Mrc].flatten(2, 3).to(self.wide)
            for each in (self.key_NRbD, self.value_NRbD)
        )
        query_NGrbD = self.query_NGRbD[:, :, rows.first : rows.stop].to(self.wide)
        scores_NGrbl = torch.einsum("ngrbd,nrld->ngrbl", query_NGrbD, key_NrlD) * scaling
        seen_Mrbl = rows.is_seen(by_table=rows.columns_Mrc)
        return scores_NGrbl.masked_fill_(~seen_Mrbl[:, None], -math.inf), key_NrlD, value_NrlD

    def add(self, sum_NRbD: Tensor, rows: _Rows, parts_NrlD: Tensor) -> None:
        """Add what rows have for the keys at hand, in place. What is at hand of no entry is 0."""
        blocks_Nrc = rows.columns_Mrc + self._group_N11 * sum_NRbD.shape[1]
        parts = parts_NrlD.unflatten(2, (blocks_Nrc.shape[2], -1)).flatten(0, 2)
        sum_NRbD.flatten(0, 1).index_add_(0, blocks_Nrc.flatten(), parts)


def _in_blocks(tensor_XSD: Tensor, table: BlockTable) -> Tensor:
    """Cut into blocks, the last one filled up with zeros; XRbD."""
    rest = table.rows * table.block_size - table.length_tokens
    return F.pad(tensor_XSD, (0, 0, 0, rest)).unflatten(-2, (table.rows, table.block_size))


def _weights(scores_NGrbl: Tensor, log_sums_NGrb: Tensor) -> Tensor:
    """Weights of the softmax; all 0 where a query sees no key."""
    finite = log_sums_NGrb.masked_fill(log_sums_NGrb == -math.inf, 0.0)
    return (scores_NGrbl - finite[..., None]).exp()
