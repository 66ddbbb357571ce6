"""Branch attention: dilated attention, block-sparse attention, or both, of sequences held whole or
shared by a ring of ranks; exact, forward and backward, in plain PyTorch.

Every rank keeps its queries. In step s it receives from rank ``r - s`` only those keys and values
that its queries see (``branches``), while it computes with those of step s - 1. Outputs are merged
by their log-sum-exp, in float32 or wider. In the backward pass the same keys and values are sent
again, and their gradients are sent back to the rank that owns them.

Shapes, per rank:  B sequences  H query heads  h those of a branch  K key/value heads  k those that
         it reads  T tokens held  D head size  n groups of a sequence's heads  N those of all
         sequences  G query heads of a group  R tiles of queries  b tokens of a tile  t tokens sent
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from highwater.engine.attention.block_gather import CutTensors, exact
from highwater.engine.attention.block_table import Tiles
from highwater.engine.attention.branches import Branch, Exchange, exchange, refuse_content
from highwater.engine.attention.flex_tiles import FlexTensors
from highwater.engine.parallel.collectives import swap
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.sparse_pattern import SparsePatternConfig


class BranchHeads(NamedTuple):
    """Query heads of a branch, and the key/value heads that they attend to."""

    of_queries: slice
    sent_k: Tensor
    """Indices of the key/value heads that are read, each once."""
    read_n: Tensor
    """For each group of query heads, its key/value head as an index into ``sent_k``."""
    are_all: bool
    """True if all key/value heads are read, each by one group of query heads."""

    @classmethod
    def of(cls, branch: Branch, query_BHTD: Tensor, key_BKTD: Tensor) -> "BranchHeads":
        """Find the branch's query heads and key/value heads, for tensors of these shapes."""
        heads, kv_heads = query_BHTD.shape[1], key_BKTD.shape[1]
        queries_h = torch.arange(heads)[branch.heads]
        sent_k, read_n = (queries_h // (heads // kv_heads)).unique(return_inverse=True)
        groups = len(queries_h) // len(sent_k)
        in_groups = read_n.view(-1, groups) if groups * len(sent_k) == len(queries_h) else None
        is_grouped = in_groups is not None and bool((in_groups == in_groups[:, :1]).all())
        if in_groups is not None and is_grouped:
            read_n = in_groups[:, 0]
        device = query_BHTD.device
        are_all = is_grouped and len(sent_k) == kv_heads
        return cls(branch.heads, sent_k.to(device), read_n.to(device), are_all)

    def grouped(self, tensor_BHTX: Tensor) -> Tensor:
        """Select the branch's heads of a tensor with query heads, in groups; NGTX."""
        own_BhTX = tensor_BHTX[:, self.of_queries]
        return own_BhTX.unflatten(1, (len(self.read_n), -1)).flatten(0, 1)

    def ungrouped(self, tensor_NGTX: Tensor, batch: int) -> Tensor:
        """Put grouped heads, NGTX, back side by side as the branch's heads; BhTX."""
        return tensor_NGTX.unflatten(0, (batch, -1)).flatten(1, 2)

    def sent(self, tensor_BKTD: Tensor) -> Tensor:
        """Select the key/value heads that are read; BkTD."""
        return tensor_BKTD if self.are_all else tensor_BKTD[:, self.sent_k]

    def read(self, tensor_BkTD: Tensor) -> Tensor:
        """Return keys or values by group of query heads, repeated where groups share; NTD."""
        return (tensor_BkTD if self.are_all else tensor_BkTD[:, self.read_n]).flatten(0, 1)

    def add_read_(self, sum_BkTD: Tensor, gradients_NTD: Tensor) -> None:
        """Add gradients by group of query heads to those of their key/value heads, in place."""
        gradients_BnTD = gradients_NTD.unflatten(0, (len(sum_BkTD), -1)).to(sum_BkTD.dtype)
        if self.are_all:
            sum_BkTD += gradients_BnTD
        else:
            sum_BkTD.index_add_(1, self.read_n, gradients_BnTD)


_QUERIES_AT_HAND = 2**28
"""Query elements attended at once, which bounds the wide sums over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Settings that all branches of one attention call have in common."""

    layout: SequenceLayout
    """Layout that says which tokens each rank holds."""
    branches: tuple[Branch, ...]
    pattern: SparsePatternConfig | None
    """Sparse pattern within each row of a branch; None: the row is attended in full."""
    scaling: float
    is_causal: bool = True
    group: dist.ProcessGroup | None = None
    """Ranks that share each sequence; None: this rank holds it whole."""
    by_flex: bool = False
    """True to compute by FlexAttention (``branch_kernel``), False to gather keys."""

    @property
    def tensors(self) -> type[CutTensors]:
        """Class of tiled tensors that computes attention: by FlexAttention, or by gathered keys."""
        return FlexTensors if self.by_flex else CutTensors

    @property
    def rank(self) -> int:
        """This rank's number in the group; 0 without a group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def branch_attention(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, sharing: Sharing
) -> tuple[Tensor, Tensor]:
    """Attention of each document over itself, BHTD, and the log-sum-exp of each query, BHT; both
    differentiable. Queries in no branch get zeros and minus infinity.

    Raises UsageError for a pattern that follows content, and for a ratio that a window contradicts.
    """
    assert sharing.layout.degree == sharing.degree, "each rank has a share"
    assert sharing.layout.tokens_per_rank == query_BHTD.shape[2], "the share is what is held"
    refuse_content(sharing.pattern, "a branch")
    return _BranchAttention.apply(query_BHTD, key_BKTD, value_BKTD, sharing)


class _Step(NamedTuple):
    """One step of a branch: keys and values of one rank, and the tile pairs to compute."""

    exchange: Exchange
    source: int
    keys_and_values_2BktD: Tensor


class _Ring:
    """One branch of attention on this rank, and its exchanges of keys with other ranks."""

    def __init__(self, branch: Branch, sharing: Sharing, own: Sequence[Tensor]) -> None:
        self.sharing, self.branch = sharing, branch
        query_BHTD, *keys_and_values = own
        self.device = query_BHTD.device
        self.heads = BranchHeads.of(branch, query_BHTD, keys_and_values[0])
        self.own_2BkTD = torch.stack([self.heads.sent(each) for each in keys_and_values])

    def exchange(self, rank: int, source: int) -> Exchange:
        """Return what ``rank`` computes with the keys of ``source``, and the tokens to send."""
        shared, pair = self.sharing, {"rank": rank, "source": source}
        own = (shared.layout, self.branch, shared.pattern)
        return exchange(*own, is_causal=shared.is_causal, **pair, device=self.device)

    @property
    def queries(self) -> Tiles | None:
        """Tiles of this rank's queries; None if it has none in the branch."""
        rank = self.sharing.rank
        pairs = self.exchange(rank, rank).pairs
        return pairs[0].queries if pairs and len(pairs[0].queries) else None

    def steps(self) -> Iterator[_Step]:
        """Yield a step for this rank's own keys, then a step for each preceding rank's keys."""
        rank, degree, group = self.sharing.rank, self.sharing.degree, self.sharing.group
        own = _Step(self.exchange(rank, rank), rank, self.own_2BkTD)
        coming: list[tuple[_Step, list[dist.Work], Tensor | None]] = [(own, [], None)]
        for step in range(1, degree + 1):
            if step < degree:
                assert group is not None
                to, source = (rank + step) % degree, (rank - step) % degree
                there, here = self.exchange(to, rank), self.exchange(rank, source)
                sent = self.own_2BkTD[:, :, :, there.sent_T] if there.tokens else None
                shape = (*self.own_2BkTD.shape[:3], here.tokens, self.own_2BkTD.shape[-1])
                received = self.own_2BkTD.new_empty(shape)
                out = None if sent is None else sent.contiguous()
                into = received if here.tokens else None
                work = swap(out, into, to=to, source=source, group=group)
                coming.append((_Step(here, source, received), work, sent))
            at_hand, work, _ = coming.pop(0)
            for each in work:
                each.wait()
            yield at_hand

    def send_home_(self, step: _Step, gradients_2BktD: Tensor, sums_2BkTD: Tensor) -> None:
        """Send the gradients of a step's keys and values to their rank, and add to this rank's sums
        the gradients that another rank computed from this rank's keys in the same step.
        """
        rank, degree, group = self.sharing.rank, self.sharing.degree, self.sharing.group
        if step.source == rank:
            sums_2BkTD += gradients_2BktD
            return
        assert group is not None
        away = (2 * rank - step.source) % degree
        there = self.exchange(away, rank)
        shape = (*sums_2BkTD.shape[:3], there.tokens, sums_2BkTD.shape[-1])
        received = gradients_2BktD.new_empty(shape)
        out = gradients_2BktD if step.exchange.tokens else None
        into = received if there.tokens else None
        work = swap(out, into, to=step.source, source=away, group=group)
        for each in work:
            each.wait()
        if there.tokens:
            assert there.sent_T is not None
            sums_2BkTD.index_add_(3, there.sent_T, received.to(sums_2BkTD.dtype))


class _BranchAttention(torch.autograd.Function):
    """Autograd function over all branches and steps together: no step keeps a graph."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, sharing: Sharing
    ) -> tuple[Tensor, Tensor]:
        own = (query_BHTD, key_BKTD, value_BKTD)
        wide = torch.promote_types(query_BHTD.dtype, torch.float32)
        output_BHTD = torch.empty_like(query_BHTD)
        log_sums_BHT = torch.empty_like(query_BHTD[..., 0], dtype=wide)
        with exact(query_BHTD.device):
            for heads in _heads_at_hand(sharing, query_BHTD, key_BKTD):
                found, its_sums = _forward(sharing, heads.of(own), wide)
                output_BHTD[:, heads.of_queries] = found
                log_sums_BHT[:, heads.of_queries] = its_sums
        ctx.save_for_backward(*own, output_BHTD, log_sums_BHT)
        ctx.sharing = sharing
        return output_BHTD, log_sums_BHT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *own, output_BHTD, log_sums_BHT = ctx.saved_tensors
        query, key, value = found = [torch.empty_like(each) for each in own]
        with exact(output_BHTD.device):
            for heads in _heads_at_hand(ctx.sharing, own[0], own[1]):
                of_all = (*gradients, output_BHTD, log_sums_BHT)
                for_queries = [each[:, heads.of_queries] for each in of_all]
                sums = _backward(ctx.sharing, heads.of(own), for_queries)
                for whole, part in zip(heads.of(found), sums, strict=True):
                    whole.copy_(part)
        return query, key, value, None


class _HeadsAtHand(NamedTuple):
    """Some key/value heads, and the query heads that attend to them."""

    of_queries: slice
    of_keys: slice

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Select these heads from queries, keys and values, shaped BHTD and BKTD."""
        query, key, value = tensors
        return [query[:, self.of_queries], key[:, self.of_keys], value[:, self.of_keys]]


def _heads_at_hand(
    sharing: Sharing, query_BHTD: Tensor, key_BKTD: Tensor
) -> Iterator[_HeadsAtHand]:
    """Yield all heads in groups that fit in memory; all at once if any rate is above 1."""
    kv_heads, groups = key_BKTD.shape[1], query_BHTD.shape[1] // key_BKTD.shape[1]
    room = _QUERIES_AT_HAND // max(1, query_BHTD[:, :groups].numel())
    at_once = max(1, room) if all(each.rate == 1 for each in sharing.branches) else kv_heads
    for first in range(0, kv_heads, at_once):
        stop = min(kv_heads, first + at_once)
        yield _HeadsAtHand(slice(first * groups, stop * groups), slice(first, stop))


def _present(sharing: Sharing, query_BHTD: Tensor) -> Iterator[Branch]:
    """Return the branches that at least one query head uses."""
    return (each for each in sharing.branches if each.offset < query_BHTD.shape[1])


def _forward(sharing: Sharing, own: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention output over all branches, BHTD, and log-sum-exps, BHT; in float32 or wider."""
    query_BHTD = own[0]
    output_BHTD = torch.zeros_like(query_BHTD, dtype=wide)
    log_sums_BHT1 = torch.full_like(query_BHTD[..., :1], -torch.inf, dtype=wide)
    is_alone = len(sharing.branches) == 1
    for branch in _present(sharing, query_BHTD):
        ring = _Ring(branch, sharing, own)
        found = _attended(ring, query_BHTD)
        if found is not None:
            _put_branch_(ring, output_BHTD, log_sums_BHT1, found, is_alone=is_alone)
    return output_BHTD, log_sums_BHT1[..., 0]


def _attended(ring: _Ring, query_BHTD: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output of one branch, NGRbD, and log-sum-exps, NGRb; None if no query here is in it."""
    tiles, grouped_NGTD = ring.queries, ring.heads.grouped(query_BHTD)
    output_NGRbD = log_sums_NGRb = None
    for step in ring.steps():
        keys_and_values = [ring.heads.read(each) for each in step.keys_and_values_2BktD]
        for pairs in step.exchange.pairs:
            cut = ring.sharing.tensors.of(pairs, grouped_NGTD, *keys_and_values)
            for rows, found, its_sums in cut.attended(pairs, ring.sharing.scaling):
                if output_NGRbD is None and found.shape == cut.query_NGRbD.shape:
                    output_NGRbD, log_sums_NGRb = found.to(cut.wide), its_sums
                    continue
                if output_NGRbD is None:
                    output_NGRbD = torch.zeros_like(cut.query_NGRbD, dtype=cut.wide)
                    log_sums_NGRb = torch.full_like(output_NGRbD[..., 0], -torch.inf)
                assert log_sums_NGRb is not None
                _merge_(output_NGRbD[:, :, rows], log_sums_NGRb[:, :, rows], found, its_sums)
    if tiles is None or output_NGRbD is None or log_sums_NGRb is None:
        return None
    return output_NGRbD, log_sums_NGRb


def _put_branch_(
    ring: _Ring,
    output_BHTD: Tensor,
    log_sums_BHT1: Tensor,
    found: tuple[Tensor, Tensor],
    *,
    is_alone: bool,
) -> None:
    """Merge a branch's output into the total, in place; the only branch overwrites it."""
    tiles, heads, batch = ring.queries, ring.heads, len(output_BHTD)
    assert tiles is not None
    output_NGRbD, log_sums_NGRb = found
    if not is_alone:
        output_NGRbD = tiles.cut(heads.grouped(output_BHTD))
        log_sums_NGRb = tiles.cut(heads.grouped(log_sums_BHT1))[..., 0]
        _merge_(output_NGRbD, log_sums_NGRb, *found)
    for whole, merged in ((output_BHTD, output_NGRbD), (log_sums_BHT1, log_sums_NGRb[..., None])):
        of_heads = heads.grouped(whole)
        tiles.put_(of_heads, merged)
        if of_heads.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            whole[:, heads.of_queries] = heads.ungrouped(of_heads, batch)


def _merge_(output_XD: Tensor, log_sums_X: Tensor, found_XD: Tensor, its_sums_X: Tensor) -> None:
    """Merge the output over further keys into an output, in place; either may be over no key."""
    both_X = torch.logaddexp(log_sums_X, its_sums_X)
    finite_X = both_X.masked_fill(both_X == -torch.inf, 0.0)
    output_XD.mul_((log_sums_X - finite_X).exp()[..., None])
    output_XD.addcmul_(found_XD, (its_sums_X - finite_X).exp()[..., None])
    log_sums_X.copy_(both_X)


def _backward(
    sharing: Sharing, own: Sequence[Tensor], for_queries: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values over all branches, in float32 or wider."""
    upstream_BHTD, of_log_sums_BHT, output_BHTD, log_sums_BHT = for_queries
    wide = log_sums_BHT.dtype
    above_BHT = of_log_sums_BHT - (upstream_BHTD.to(wide) * output_BHTD).sum(-1)
    at_hand = (upstream_BHTD, above_BHT[..., None], log_sums_BHT[..., None])
    query_sum_BHTD = torch.zeros_like(own[0], dtype=wide)
    sums_2BKTD = own[1].new_zeros((2, *own[1].shape), dtype=wide)
    for branch in _present(sharing, own[0]):
        ring = _Ring(branch, sharing, own)
        if ring.heads.are_all:
            _add_gradients_(ring, own[0], at_hand, query_sum_BHTD, sums_2BKTD)
            continue
        of_branch_2BkTD = torch.zeros_like(ring.own_2BkTD, dtype=wide)
        _add_gradients_(ring, own[0], at_hand, query_sum_BHTD, of_branch_2BkTD)
        sums_2BKTD.index_add_(2, ring.heads.sent_k, of_branch_2BkTD)
    return query_sum_BHTD, sums_2BKTD[0], sums_2BKTD[1]


def _add_gradients_(
    ring: _Ring,
    query_BHTD: Tensor,
    for_queries: Sequence[Tensor],
    query_sum_BHTD: Tensor,
    sums_2BkTD: Tensor,
) -> None:
    """Add a branch's gradients to this rank's sums for queries, keys and values, in place."""
    heads, sharing, batch = ring.heads, ring.sharing, len(query_BHTD)
    grouped_NGTD = heads.grouped(query_BHTD)
    upstream_NGTD, above_NGT1, log_sums_NGT1 = (heads.grouped(each) for each in for_queries)
    for step in ring.steps():
        keys_and_values_2BktD = step.keys_and_values_2BktD
        # FlexAttention's gradients are already rounded to the inputs' dtype
        dtype = keys_and_values_2BktD.dtype if sharing.by_flex else sums_2BkTD.dtype
        gradients_2BktD = torch.zeros_like(keys_and_values_2BktD, dtype=dtype)
        keys_and_values = [heads.read(each) for each in keys_and_values_2BktD]
        for pairs in step.exchange.pairs:
            cut = sharing.tensors.of(pairs, grouped_NGTD, *keys_and_values)
            found = cut.gradients(
                pairs,
                scaling=sharing.scaling,
                upstream_NGRbD=pairs.queries.cut(upstream_NGTD),
                above_NGRb=pairs.queries.cut(above_NGT1)[..., 0],
                log_sums_NGRb=pairs.queries.cut(log_sums_NGT1)[..., 0],
            )
            of_queries_NGTD = pairs.queries.joined(found[0])
            query_sum_BHTD[:, heads.of_queries] += heads.ungrouped(of_queries_NGTD, batch)
            for sum_BktD, part in zip(gradients_2BktD, found[1:], strict=True):
                heads.add_read_(sum_BktD, pairs.keys.joined(part))
        ring.send_home_(step, gradients_2BktD, sums_2BkTD)
