"""Ring attention: keys and values pass from rank to rank, each of which keeps its queries.

Every rank holds two chunks of every document, number ``r`` and number ``2R - 1 - r`` of ``2R``
(``parallel/sequence_layout``). In step s it has the keys and values of rank ``q = r - s``. Its own
are attended causally; of an earlier rank the first chunk is before all its queries, and the second
behind them; of a later rank both are before its second chunk, and behind its first. So each step
but the first is half of the row's square, on every rank, without a mask.

While a step computes, the next keys and values arrive. Outputs of the steps are merged by their
log-sum-exp, in float32 at least. Going backward keys and values pass once more, and their gradients
with them: after the last step these are where they belong.

Shapes, per rank:  B 1  S tokens held  H query heads  K key/value heads  D head size  d documents of
                   a run of equal lengths  l tokens held of one of them  R ranks of the ring
Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; the merge of partial outputs
        as in Dao et al., FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

aten: Any = torch.ops.aten


def attend_in_ring(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    held_lengths: Sequence[int],
    scaling: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention of each document over itself, shape BSHD.

    ``held_lengths`` are the tokens that this rank holds of each document, the same on every rank,
    and even: its first chunk, then its second.
    """
    assert sum(held_lengths) == query_BHSD.shape[2], "the documents are all that is held"
    assert not any(length % 2 for length in held_lengths), "two chunks of one length"
    assert query_BHSD.device.type == "cpu", "its kernels on GPUs have run on none yet"
    ring = Ring(tuple(held_lengths), scaling, group)
    output_BHSD: Tensor = _RingAttention.apply(query_BHSD, key_BKSD, value_BKSD, ring)
    return output_BHSD.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Ring:
    """What every step of one attention call has in common."""

    held_lengths: tuple[int, ...]
    scaling: float
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's number in the ring."""
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Ranks of the ring."""
        return dist.get_world_size(self.group)

    def begin_pass(self, tensors: Sequence[Tensor]) -> "Passing":
        """Begin to send tensors to the next rank, and to receive the previous one's."""
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.degree) for step in (1, -1)
        )
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        transfers = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in sent]
        transfers += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        return Passing(sent, received, dist.batch_isend_irecv(transfers))


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensors on their way around the ring."""

    sent: list[Tensor]
    """Kept until they have arrived."""
    received: list[Tensor]
    work: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """The previous rank's tensors, once they are here."""
        for each in self.work:
            each.wait()
        return self.received


class Block(NamedTuple):
    """Queries and keys of one step that see each other: slices of the tokens held of a document."""

    queries: slice
    keys: slice
    is_causal: bool


def block_of(length: int, *, rank: int, source: int) -> Block:
    """What a rank computes with the keys of rank ``source``, of a document of which both hold
    ``length`` tokens.
    """
    whole, half = slice(0, length), length // 2
    if source == rank:
        return Block(whole, whole, is_causal=True)
    if source < rank:
        return Block(whole, slice(0, half), is_causal=False)
    return Block(slice(half, length), whole, is_causal=False)


class Run(NamedTuple):
    """Documents of one length next to each other, and what a step computes of each."""

    start: int
    stop: int
    documents: int
    block: Block

    def of(self, tensor_BXSn: Tensor, part: slice) -> Tensor:
        """A view of some tokens of each of the documents, as a batch: dXl, and whatever follows."""
        row_XSn = tensor_BXSn[0, :, self.start : self.stop]
        return row_XSn.unflatten(1, (self.documents, -1)).transpose(0, 1)[:, :, part]


def _runs(ring: Ring, step: int) -> Iterator[Run]:
    """All documents, in runs, with the keys and values that are at hand in a step."""
    source, start = (ring.rank - step) % ring.degree, 0
    for length, run in groupby(ring.held_lengths):
        documents = len(list(run))
        block = block_of(length, rank=ring.rank, source=source)
        yield Run(start, start + documents * length, documents, block)
        start += documents * length


class _RingAttention(torch.autograd.Function):
    """The whole ring, forward and backward: a step has no graph of its own."""

    @staticmethod
    def forward(
        ctx: Any, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, ring: Ring
    ) -> Tensor:
        wide = torch.promote_types(query_BHSD.dtype, torch.float32)
        output_BHSD = torch.zeros(query_BHSD.shape, dtype=wide, device=query_BHSD.device)
        log_sums_BHS = torch.full_like(output_BHSD[..., 0], -torch.inf)
        at_hand: list[Tensor] = [key_BKSD, value_BKSD]
        for step in range(ring.degree):
            passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
            for run in _runs(ring, step):
                queries, keys = run.block.queries, run.block.keys
                key, value = (run.of(tensor, keys) for tensor in at_hand)
                partial_dHlD, log_sums_dHl = _forward(
                    run.of(query_BHSD, queries),
                    key,
                    value,
                    is_causal=run.block.is_causal,
                    scaling=ring.scaling,
                )
                _merge(
                    run.of(output_BHSD, queries),
                    run.of(log_sums_BHS, queries),
                    partial_dHlD,
                    log_sums_dHl,
                )
            if passing is not None:
                at_hand = passing.wait()
        attended_BHSD = output_BHSD.to(query_BHSD.dtype)
        ctx.save_for_backward(query_BHSD, key_BKSD, value_BKSD, attended_BHSD, log_sums_BHS)
        ctx.ring = ring
        return attended_BHSD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BHSD, key_BKSD, value_BKSD, attended_BHSD, log_sums_BHS = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide = log_sums_BHS.dtype
        query_gradient = torch.zeros_like(query_BHSD, dtype=wide)
        travelling = [torch.zeros_like(t, dtype=wide) for t in (key_BKSD, value_BKSD)]
        at_hand, homewards = [key_BKSD, value_BKSD], None
        for step in range(ring.degree):
            passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
            own = [torch.zeros_like(t) for t in travelling]
            for run in _runs(ring, step):
                queries, keys = run.block.queries, run.block.keys
                key, value = (run.of(tensor, keys) for tensor in at_hand)
                found = _backward(
                    run.of(gradients[0], queries),
                    run.of(query_BHSD, queries),
                    key,
                    value,
                    run.of(attended_BHSD, queries),
                    run.of(log_sums_BHS, queries),
                    is_causal=run.block.is_causal,
                    scaling=ring.scaling,
                )
                run.of(query_gradient, queries).add_(found[0])
                for mine, gradient in zip(own, found[1:], strict=True):
                    run.of(mine, keys).add_(gradient)
            if homewards is not None:
                travelling = homewards.wait()
            for there, mine in zip(travelling, own, strict=True):
                there.add_(mine)
            if ring.degree > 1:
                homewards = ring.begin_pass(travelling)
            if passing is not None:
                at_hand = passing.wait()
        if homewards is not None:
            travelling = homewards.wait()
        dtype = query_BHSD.dtype
        return query_gradient.to(dtype), travelling[0].to(dtype), travelling[1].to(dtype), None


def _merge(output_dHlD: Tensor, log_sums_dHl: Tensor, partial: Tensor, its_sums: Tensor) -> None:
    """Add what more keys give to an output, in place: each weighs as the exponentials it summed."""
    both = torch.logaddexp(log_sums_dHl, its_sums)
    output_dHlD.mul_((log_sums_dHl - both).exp()[..., None])
    output_dHlD.add_(partial * (its_sums - both).exp()[..., None])
    log_sums_dHl.copy_(both)


def _forward(
    query_dHlD: Tensor, key_dKlD: Tensor, value_dKlD: Tensor, *, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention over the keys at hand, and the logarithm of each query's sum of exponentials."""
    repeats = query_dHlD.shape[1] // key_dKlD.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key_dKlD, value_dKlD))
    output, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(
        query_dHlD, key, value, 0.0, is_causal, scale=scaling
    )
    return output, log_sums


def _backward(
    gradient_dHlD: Tensor,
    query_dHlD: Tensor,
    key_dKlD: Tensor,
    value_dKlD: Tensor,
    output_dHlD: Tensor,
    log_sums_dHl: Tensor,
    *,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, of what these keys are of the whole output."""
    heads = key_dKlD.shape[1]
    repeats = query_dHlD.shape[1] // heads
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key_dKlD, value_dKlD))
    query_gradient, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(gradient_dHlD, query_dHlD, key, value, output_dHlD, log_sums_dHl),
        *(0.0, is_causal),
        scale=scaling,
    )
    key_gradient, value_gradient = (t.unflatten(1, (heads, -1)).sum(dim=2) for t in others)
    return query_gradient, key_gradient, value_gradient
