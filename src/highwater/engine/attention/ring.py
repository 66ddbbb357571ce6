"""Ring attention: keys and values pass from rank to rank, each of which keeps its queries.

Every rank holds two chunks of every document, number ``r`` and number ``2R - 1 - r`` of ``2R``
(``engine/parallel/sequence_layout``). In step s it has the keys and values of rank ``q = r - s``.
Its own are attended causally; of an earlier rank the first chunk is before all its queries, and the
second behind them; of a later rank both are before its second chunk, and behind its first. So each
step but the first is half of the row's square, on every rank, without a mask.

While a step computes, the next keys and values arrive. Outputs of the steps are merged by their
log-sum-exp, in float32 at least. Going backward keys and values pass once more, and their gradients
with them: after the last step these are where they belong. A layer that is recomputed and keeps
what was attended passes nothing in its recomputation (``engine/attention/kept``).

In a memory-only trial a step attends within pieces of what it would (docs/decisions/006).

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

from highwater.engine.attention.block_attention import Block, merge_
from highwater.engine.attention.dense import join_sinks_, sink_gradient
from highwater.engine.attention.kept import attended
from highwater.engine.parallel.collectives import pass_on
from highwater.nouns.corpus import pieces
from highwater.nouns.hardware import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """What every step of one attention call has in common."""

    held_lengths: tuple[int, ...]
    """Tokens that this rank holds of each document, the same on every rank, and even: its first
    chunk, then its second."""
    scaling: float
    kernel: Kernel
    group: dist.ProcessGroup
    in_pieces: bool = False
    """For memory alone: the kernel runs on the same tokens as a batch of short pieces."""

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
        # heads lie next to each other for each token, as projections leave them
        sent = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
        return Passing(sent, *pass_on(sent, self.group))


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensors on their way around the ring, BSKD."""

    sent: list[Tensor]
    """Kept until they have arrived."""
    received: list[Tensor]
    work: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """The previous rank's tensors, BKSD, once they are here."""
        for each in self.work:
            each.wait()
        self.sent.clear()
        return [tensor.transpose(1, 2) for tensor in self.received]


def attend_in_ring(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    ring: Ring,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of each document over itself, shape BSHD; beside keys over sinks, of which
    every rank has all.
    """
    assert sum(ring.held_lengths) == query_BHSD.shape[2], "the documents are all that is held"
    assert not any(length % 2 for length in ring.held_lengths), "two chunks of one length"
    output_BHSD: Tensor = _RingAttention.apply(query_BHSD, key_BKSD, value_BKSD, sinks_H, ring)
    return output_BHSD.transpose(1, 2)


class Pairing(NamedTuple):
    """Queries and keys of one step that see each other: slices of the tokens held of a document."""

    queries: slice
    keys: slice
    is_causal: bool


def pairing_of(length: int, *, rank: int, source: int) -> Pairing:
    """What a rank computes with the keys of rank ``source``, of a document of which both hold
    ``length`` tokens.
    """
    whole, half = slice(0, length), length // 2
    if source == rank:
        return Pairing(whole, whole, is_causal=True)
    if source < rank:
        return Pairing(whole, slice(0, half), is_causal=False)
    return Pairing(slice(half, length), whole, is_causal=False)


class Run(NamedTuple):
    """Documents of one length next to each other, and what a step computes of each."""

    ring: Ring
    start: int
    stop: int
    documents: int
    pairing: Pairing

    def block(self, query_BHSD: Tensor, at_hand: Sequence[Tensor]) -> Block:
        """The block of attention that is computed, of the keys and values at hand."""
        key, value = (self.keys_of(tensor) for tensor in at_hand)
        query = self.queries_of(query_BHSD)
        return Block(query, key, value, self.pairing.is_causal, self.ring.scaling, self.ring.kernel)

    def queries_of(self, tensor_BXSn: Tensor) -> Tensor:
        """A view of the tokens whose queries are in it, dXl and whatever follows."""
        return self._of(tensor_BXSn, self.pairing.queries)

    def keys_of(self, tensor_BXSn: Tensor) -> Tensor:
        """A view of the tokens whose keys are in it, dXl and whatever follows."""
        return self._of(tensor_BXSn, self.pairing.keys)

    def _of(self, tensor_BXSn: Tensor, tokens: slice) -> Tensor:
        row_XSn = tensor_BXSn[0, :, self.start : self.stop]
        documents_dXln = row_XSn.unflatten(1, (self.documents, -1)).transpose(0, 1)
        return documents_dXln[:, :, tokens]


def _runs(ring: Ring, step: int, device: torch.device) -> Iterator[Run]:
    """All documents, in runs, with the keys and values that are at hand in a step."""
    source, start = (ring.rank - step) % ring.degree, 0
    for length, run in groupby(ring.held_lengths):
        documents = len(list(run))
        stop = start + documents * length
        if ring.in_pieces:
            documents, length = _pieces(stop - start, documents, device)
        pairing = pairing_of(length, rank=ring.rank, source=source)
        yield Run(ring, start, stop, documents, pairing)
        start = stop


def _pieces(tokens: int, documents: int, device: torch.device) -> tuple[int, int]:
    """How many pieces of which length stand for a run of documents: two chunks each."""
    assert device.type in ("cuda", "cpu")
    count = pieces(tokens, device.type) or 1
    if count <= documents or tokens // count % 2:
        count = documents
    return count, tokens // count


class _RingAttention(torch.autograd.Function):
    """The whole ring, forward and backward: a step has no graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        sinks_H: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        attended_BHSD, log_sums_BHS = attended(
            lambda: _pass_forward(query_BHSD, key_BKSD, value_BKSD, sinks_H, ring)
        )
        ctx.save_for_backward(
            query_BHSD, key_BKSD, value_BKSD, sinks_H, attended_BHSD, log_sums_BHS
        )
        ctx.ring = ring
        return attended_BHSD

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query_BHSD, key_BKSD, value_BKSD, sinks_H, attended_BHSD, log_sums_BHS = ctx.saved_tensors
        own, gradient = (query_BHSD, key_BKSD, value_BKSD), gradients[0]
        found = _pass_backward(gradient, own, attended_BHSD, log_sums_BHS, ctx.ring)
        of_sinks = (
            None
            if sinks_H is None
            else sink_gradient(gradient, attended_BHSD, log_sums_BHS, sinks_H)
        )
        return (*found, of_sinks, None)


def _pass_forward(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, sinks_H: Tensor | None, ring: Ring
) -> tuple[Tensor, Tensor]:
    """What is attended, BHSD, and the logarithm of each query's sum of exponentials, BHS."""
    wide = torch.promote_types(query_BHSD.dtype, torch.float32)
    output_BHSD = torch.empty_like(query_BHSD, dtype=wide)
    log_sums_BHS = torch.empty(query_BHSD.shape[:-1], dtype=wide, device=query_BHSD.device)
    at_hand: list[Tensor] = [key_BKSD, value_BKSD]
    for step in range(ring.degree):
        passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
        for run in _runs(ring, step, query_BHSD.device):
            merge_(
                run.queries_of(output_BHSD),
                run.queries_of(log_sums_BHS),
                run.block(query_BHSD, at_hand).forward(),
                is_first=step == 0,  # a rank's own, over which it has every query
            )
        if passing is not None:
            at_hand = passing.wait()
    if sinks_H is not None:
        log_sums_BHS = join_sinks_(output_BHSD, log_sums_BHS, sinks_H)
    return output_BHSD.to(query_BHSD.dtype), log_sums_BHS


def _pass_backward(
    gradient_BHSD: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    attended_BHSD: Tensor,
    log_sums_BHS: Tensor,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's own queries, keys and values.

    A rank adds its part to the gradients of the keys and values at hand, and sends them on: they
    come one step behind these.
    """
    query_BHSD, *keys_and_values = own
    query_gradient = torch.empty_like(query_BHSD, dtype=log_sums_BHS.dtype)
    at_hand = keys_and_values
    homewards: Passing | None = None
    for step in range(ring.degree):
        passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
        # a step's gradients have no name here: they would be kept while the next step computes
        homewards = _send_on(
            [
                (
                    run,
                    _backward(
                        run.block(query_BHSD, at_hand),
                        [run.queries_of(t) for t in (gradient_BHSD, attended_BHSD, log_sums_BHS)],
                        run.queries_of(query_gradient),
                        is_first=step == 0,
                    ),
                )
                for run in _runs(ring, step, query_BHSD.device)
            ],
            homewards,
            keys_and_values,
            ring,
        )
        if passing is not None:
            at_hand = passing.wait()
    assert homewards is not None
    dtype = query_BHSD.dtype
    key_gradient, value_gradient = homewards.wait()
    return query_gradient.to(dtype), key_gradient.to(dtype), value_gradient.to(dtype)


def _backward(
    block: Block, of_queries: Sequence[Tensor], sum_: Tensor, *, is_first: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of a block's keys and values; that of its queries is added to the sum, in place."""
    gradient, key_gradient, value_gradient = block.backward(*of_queries)
    sum_.copy_(gradient) if is_first else sum_.add_(gradient)
    return key_gradient, value_gradient


def _send_on(
    parts: Sequence[tuple[Run, tuple[Tensor, Tensor]]],
    homewards: Passing | None,
    own: Sequence[Tensor],
    ring: Ring,
) -> Passing:
    """Add a step's parts to the gradients that came, of keys and of values, and send these on."""
    if homewards is None:  # the first step's are of all of this rank's own keys
        wide = torch.promote_types(own[0].dtype, torch.float32)
        travelling = [torch.empty_like(tensor, dtype=wide) for tensor in own]
    else:
        travelling = homewards.wait()
    for run, gradients in parts:
        for sum_, gradient in zip(travelling, gradients, strict=True):
            mine = run.keys_of(sum_)
            mine.copy_(gradient) if homewards is None else mine.add_(gradient)
    return ring.begin_pass(travelling)
