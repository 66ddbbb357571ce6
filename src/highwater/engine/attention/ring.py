"""Ring attention: each rank keeps its queries, keys and values pass from rank to rank.

Every rank holds two chunks of every document, numbers ``r`` and ``2R - 1 - r`` of ``2R``
(``engine/parallel/sequence_layout``). In step s it has the keys and values of rank ``q = r - s``.
Its own are attended causally. Of an earlier rank, the first chunk precedes all its queries and the
second follows them; of a later rank, both precede its second chunk and follow its first. So every
step after the first is half of the row's square, on every rank, without a mask.

Documents of one length are a batch of one kernel call. A row of unlike documents would be a call
and, with cuDNN, a plan for each length: those that are not long share a call of flash attention.

While a step computes, the next keys and values arrive. Outputs of the steps are merged by their
log-sum-exp, in float32 or wider. In the backward pass keys and values pass once more, together with
their gradients, which reach their owner after the last step. A layer that keeps attention outputs
passes nothing in its recomputation (``engine/attention/block_attention``).

In a memory-only trial a step attends within pieces of its documents (docs/decisions/006).

Shapes, per rank:  B 1  S tokens held  H query heads  K key/value heads  D head size  d documents of
                   a run of equal lengths  l tokens held of one of them  q queries of a call
                   R ranks of the ring
Source: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; the merge of partial outputs
        as in Dao et al., FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from highwater.engine.attention.block_attention import Block, VariedBlock, attended, merge_
from highwater.engine.attention.dense import join_sinks_, pieces_of, sink_gradient
from highwater.engine.parallel.collectives import pass_on
from highwater.nouns.hardware import Kernel

LONG_TOKENS = 32_768
"""Fewest tokens held of a document that has a call of its own among documents of other lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """What every step of attention around a ring needs: ranks, lengths, scaling, kernel."""

    held_lengths: tuple[int, ...]
    """Tokens of each document that this rank holds, equal on every rank, and even: its first chunk,
    then its second."""
    scaling: float
    kernel: Kernel
    group: dist.ProcessGroup
    in_pieces: bool = False
    """True in memory-only trials: the kernel runs on the same tokens as a batch of short pieces."""

    @property
    def rank(self) -> int:
        """This rank's number within the ring."""
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Number of ranks in the ring."""
        return dist.get_world_size(self.group)

    def begin_pass(self, tensors: Sequence[Tensor]) -> "Passing":
        """Start sending tensors to the next rank and receiving the previous rank's."""
        # heads lie next to each other for each token, as projections leave them
        sent = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
        return Passing(sent, *pass_on(sent, self.group))


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensors in transit around the ring, BSKD."""

    sent: list[Tensor]
    """Tensors being sent, kept alive until the transfer ends."""
    received: list[Tensor]
    work: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """Wait for the transfers, and return the previous rank's tensors, BKSD."""
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
    """Causal attention of each document over itself, BSHD. ``sinks_H``: all, on every rank."""
    assert sum(ring.held_lengths) == query_BHSD.shape[2], "the documents are all that is held"
    assert not any(length % 2 for length in ring.held_lengths), "two chunks of one length"
    output_BHSD: Tensor = _RingAttention.apply(query_BHSD, key_BKSD, value_BKSD, sinks_H, ring)
    return output_BHSD.transpose(1, 2)


class Pairing(NamedTuple):
    """Which queries and which keys attend in one step around a ring, by document."""

    queries: slice
    keys: slice
    is_causal: bool


def pairing_of(length: int, *, rank: int, source: int) -> Pairing:
    """Return the queries and keys that ``rank`` pairs in the step with the keys of ``source``; both
    hold ``length`` tokens of the document.
    """
    whole, half = slice(0, length), length // 2
    if source == rank:
        return Pairing(whole, whole, is_causal=True)
    if source < rank:
        return Pairing(whole, slice(0, half), is_causal=False)
    return Pairing(slice(half, length), whole, is_causal=False)


class Run(NamedTuple):
    """Neighbouring documents of one length, and the pairing that one step computes for each."""

    ring: Ring
    start: int
    stop: int
    documents: int
    pairing: Pairing

    def forward(self, query_BHSD: Tensor, at_hand: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return output, dHlD, and log-sum-exps, dHl, of this step's queries."""
        return self._block(query_BHSD, at_hand).forward()

    def backward(
        self, query_BHSD: Tensor, at_hand: Sequence[Tensor], of_queries: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of q, k and v from the output's gradient, output and log-sum-exps."""
        return self._block(query_BHSD, at_hand).backward(*of_queries)

    def _block(self, query_BHSD: Tensor, at_hand: Sequence[Tensor]) -> Block:
        key, value = (self.of(tensor, self.pairing.keys) for tensor in at_hand)
        query = self.of(query_BHSD, self.pairing.queries)
        return Block(query, key, value, self.pairing.is_causal, self.ring.scaling, self.ring.kernel)

    def put(self, tensor_BXSn: Tensor, chunks: slice, part: Tensor) -> None:
        """Do nothing: ``of`` returns views of the tensor."""

    def of(self, tensor_BXSn: Tensor, tokens: slice) -> Tensor:
        """View a tensor's queries or keys of this pairing: dXl, then further dimensions."""
        row_XSn = tensor_BXSn[0, :, self.start : self.stop]
        documents_dXln = row_XSn.unflatten(1, (self.documents, -1)).transpose(0, 1)
        return documents_dXln[:, :, tokens]


class VariedRun(NamedTuple):
    """Neighbouring documents of different lengths, which one step computes in one call."""

    ring: Ring
    start: int
    lengths: tuple[int, ...]
    pairing: Pairing
    """Pairing as for a document of two tokens, so that its slices count chunks."""

    def forward(self, query_BHSD: Tensor, at_hand: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return output, qHD, and log-sum-exps, qH, of this step's queries."""
        output_qHD, log_sums = self._block(query_BHSD, at_hand).forward()
        return output_qHD, log_sums.flatten(0, -2).t()

    def backward(
        self, query_BHSD: Tensor, at_hand: Sequence[Tensor], of_queries: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, keys and values; see ``Run``."""
        gradient_qHD, output_qHD, log_sums_qH = of_queries
        block = self._block(query_BHSD, at_hand)
        return block.backward(gradient_qHD, output_qHD, log_sums_qH.t().contiguous())

    def _block(self, query_BHSD: Tensor, at_hand: Sequence[Tensor]) -> VariedBlock:
        key, value = (self.of(tensor, self.pairing.keys) for tensor in at_hand)
        return VariedBlock(
            self.of(query_BHSD, self.pairing.queries),
            key,
            value,
            self._lengths(self.pairing.queries),
            self._lengths(self.pairing.keys),
            self.ring.scaling,
            self.pairing.is_causal,
        )

    def _lengths(self, chunks: slice) -> tuple[int, ...]:
        count = chunks.stop - chunks.start
        return tuple(length // 2 * count for length in self.lengths)

    def of(self, tensor_BXSn: Tensor, chunks: slice) -> Tensor:
        """Return queries or keys that take part, qX and the remaining dimensions: a view for whole
        documents, a copy for one chunk of each.
        """
        return _row_of(tensor_BXSn)[self._tokens(chunks, tensor_BXSn.device)]

    def put(self, tensor_BXSn: Tensor, chunks: slice, part: Tensor) -> None:
        """Write ``part``, a copy that ``of`` returned, back to its chunks; a view needs none."""
        tokens = self._tokens(chunks, tensor_BXSn.device)
        if not isinstance(tokens, slice):
            _row_of(tensor_BXSn)[tokens] = part

    def _tokens(self, chunks: slice, device: torch.device) -> slice | Tensor:
        if chunks == slice(0, 2):
            return slice(self.start, self.start + sum(self.lengths))
        return _tokens_of_chunks(self.start, self.lengths, chunks.start, device)


@lru_cache(maxsize=64)
def _tokens_of_chunks(
    start: int, lengths: tuple[int, ...], chunk: int, device: torch.device
) -> Tensor:
    """Indices in the row of the first (0) or second (1) chunk of each document."""
    borders = pairwise(accumulate(lengths, initial=start))
    halves = [
        (first + chunk * ((last - first) // 2), (last - first) // 2) for first, last in borders
    ]
    return torch.cat([torch.arange(first, first + count) for first, count in halves]).to(device)


def _row_of(tensor_BXSn: Tensor) -> Tensor:
    """View one row by its tokens: SX and the remaining dimensions."""
    return tensor_BXSn[0].transpose(0, 1)


def _runs(ring: Ring, step: int, device: torch.device) -> Iterator[Run | VariedRun]:
    """Yield all documents in runs, each paired with the keys and values that the step holds."""
    source, start = (ring.rank - step) % ring.degree, 0
    is_alike = len(set(ring.held_lengths)) == 1
    for length, run in groupby(
        ring.held_lengths, lambda held: held if is_alike or held >= LONG_TOKENS else None
    ):
        lengths = tuple(run)
        stop = start + sum(lengths)
        if length is None:
            pairing = pairing_of(2, rank=ring.rank, source=source)
            yield VariedRun(ring, start, lengths, pairing)
        else:
            documents = len(lengths)
            if ring.in_pieces:
                found = pieces_of(stop - start, documents, device)
                if (stop - start) // found % 2 == 0:  # a piece has two equal chunks
                    documents, length = found, (stop - start) // found
            pairing = pairing_of(length, rank=ring.rank, source=source)
            yield Run(ring, start, stop, documents, pairing)
        start = stop


class _RingAttention(torch.autograd.Function):
    """Autograd function over the whole ring: no step keeps a graph of its own."""

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
        of_sinks = sink_gradient(gradient, attended_BHSD, log_sums_BHS, sinks_H)
        return (*found, of_sinks, None)


def _pass_forward(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, sinks_H: Tensor | None, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Attention output, BHSD, and the log-sum-exp of each query, BHS."""
    wide = torch.promote_types(query_BHSD.dtype, torch.float32)
    output_BHSD = torch.empty_like(query_BHSD, dtype=wide)
    log_sums_BHS = torch.empty(query_BHSD.shape[:-1], dtype=wide, device=query_BHSD.device)
    at_hand: list[Tensor] = [key_BKSD, value_BKSD]
    for step in range(ring.degree):
        passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
        for run in _runs(ring, step, query_BHSD.device):
            queries = run.pairing.queries
            output, log_sums = run.of(output_BHSD, queries), run.of(log_sums_BHS, queries)
            found = run.forward(query_BHSD, at_hand)
            merge_(output, log_sums, found, is_first=step == 0)  # own keys pair with all queries
            run.put(output_BHSD, queries, output)
            run.put(log_sums_BHS, queries, log_sums)
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
    """Return gradients of this rank's own queries, keys and values.

    Each rank adds its contribution to the gradients of the keys and values it holds, and sends them
    to the next rank, one step after those keys and values.
    """
    query_BHSD, *keys_and_values = own
    query_gradient = torch.empty_like(query_BHSD, dtype=log_sums_BHS.dtype)
    at_hand = keys_and_values
    homewards: Passing | None = None
    for step in range(ring.degree):
        passing = ring.begin_pass(at_hand) if step + 1 < ring.degree else None
        # unnamed on purpose: a name would keep a step's gradients while the next one computes
        homewards = _send_on(
            [
                (
                    run,
                    _backward(
                        run,
                        (query_BHSD, at_hand),
                        (gradient_BHSD, attended_BHSD, log_sums_BHS),
                        query_gradient,
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
    run: Run | VariedRun,
    inputs: tuple[Tensor, Sequence[Tensor]],
    of_queries: Sequence[Tensor],
    sum_BHSD: Tensor,
    *,
    is_first: bool,
) -> tuple[Tensor, Tensor]:
    """Return gradients of a run's keys and values; add those of its queries to ``sum_BHSD``."""
    mine = [run.of(tensor, run.pairing.queries) for tensor in of_queries]
    gradient, key_gradient, value_gradient = run.backward(*inputs, mine)
    sum_ = run.of(sum_BHSD, run.pairing.queries)
    sum_.copy_(gradient) if is_first else sum_.add_(gradient)
    run.put(sum_BHSD, run.pairing.queries, sum_)
    return key_gradient, value_gradient


def _send_on(
    parts: Sequence[tuple[Run | VariedRun, tuple[Tensor, Tensor]]],
    homewards: Passing | None,
    own: Sequence[Tensor],
    ring: Ring,
) -> Passing:
    """Add a step's gradients of keys and values to those received, and send the sums."""
    if homewards is None:  # the first step has gradients of all of this rank's own keys
        wide = torch.promote_types(own[0].dtype, torch.float32)
        travelling = [torch.empty_like(tensor, dtype=wide) for tensor in own]
    else:
        travelling = homewards.wait()
    for run, gradients in parts:
        for sum_, gradient in zip(travelling, gradients, strict=True):
            mine = run.of(sum_, run.pairing.keys)
            mine.copy_(gradient) if homewards is None else mine.add_(gradient)
            run.put(sum_, run.pairing.keys, mine)
    return ring.begin_pass(travelling)
