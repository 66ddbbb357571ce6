"""Sequence layout: which tokens of a packed row each of the ranks that share it holds.

A rank of the group is ``ring rank * ulysses_degree + ulysses rank``. Over the ring each document is
cut into ``2 * ring_degree`` equal chunks, of which ring rank r holds chunk r and chunk
``2 * ring_degree - 1 - r``, so that causal attention is as much work for each (the zigzag order of
TransformerEngine's ``thd``). A ring rank's tokens of all documents, one after the other, are cut
into ``ulysses_degree`` equal slices. Without a ring that is one contiguous slice of the row for
each rank.

Documents are padded to lengths that can be cut like this, and a document of padding at the end
makes all shares equally long. Causal attention hides padding, as it comes after what it pads.

Index arrays are NumPy's: on the host, whatever device or mode PyTorch is told to use.

Shapes:  D documents  S tokens of the row  P tokens of the padded row  T tokens that a rank holds
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1
"""Position of a token that is not part of the row."""
Integers = NDArray[np.int64]


class Part(NamedTuple):
    """Which tokens of one document a rank holds, and its padding."""

    document_tokens: int
    """Tokens of the whole document, on all ranks together."""
    tokens: int
    """Tokens of the document that the rank holds, including padding after it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of a row that one rank holds, in the order in which it holds them."""

    positions_T: Integers
    """Position in the row of each token; PADDING for padding."""
    offsets_T: Integers
    """Position in its document of each token; padding counts on."""
    documents_T: Integers
    """Number of each token's document; D for all padding."""
    parts: tuple[Part, ...]
    """Documents of the tokens, in their order; padding at the end counts as one."""

    @property
    def padding_tokens(self) -> int:
        """Number of tokens that are not part of the row."""
        return int(np.count_nonzero(self.positions_T == PADDING))


class Route(NamedTuple):
    """Which of a rank's tokens go to which ranks, and how many it receives from each."""

    leaving_T: Tensor
    """Indices of the rank's tokens, in the order in which they are sent."""
    sent: list[int]
    """Number of tokens that go to each rank."""
    received: list[int]
    """Number of tokens that come from each rank."""
    arriving_T: Tensor
    """Indices of the received tokens, in the order in which the rank then holds them."""


@dataclass(frozen=True)
class SequenceLayout:
    """A packed row of documents, cut over the ranks that share it."""

    document_lengths: tuple[int, ...]
    """Tokens of each document, without padding."""
    ulysses_degree: int = 1
    ring_degree: int = 1

    @property
    def degree(self) -> int:
        """Number of ranks that share the row."""
        return self.ulysses_degree * self.ring_degree

    @property
    def tokens(self) -> int:
        """Tokens of the row, without padding."""
        return sum(self.document_lengths)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that each rank holds, with padding."""
        return sum(self.padded_lengths) // self.degree

    @cached_property
    def padded_lengths(self) -> tuple[int, ...]:
        """Tokens of each document with its padding, then of the padding at the end, if any."""
        chunks = 1 if self.ring_degree == 1 else 2 * self.ring_degree
        padded = [-(-length // chunks) * chunks for length in self.document_lengths]
        rest = -sum(padded) % math.lcm(chunks, self.degree)
        return (*padded, rest) if rest else tuple(padded)

    def share_of(self, rank: int) -> Share:
        """Return the share of one rank; cached, because every model of a step calls this."""
        return _kept(self, rank)

    def cut(self, rank: int) -> Share:
        """Compute the share of one rank."""
        each = self.tokens_per_rank
        mine_T = self.order()[rank * each : (rank + 1) * each]
        positions_P = np.full(each * self.degree, PADDING)
        positions_P[self._padded_positions()] = np.arange(self.tokens)
        numbers_T = self._of_each(np.arange(len(self.padded_lengths)))[mine_T]
        positions_T = positions_P[mine_T]
        return Share(
            positions_T=positions_T,
            offsets_T=self._offsets()[mine_T],
            documents_T=np.where(positions_T == PADDING, len(self.document_lengths), numbers_T),
            parts=self._parts(numbers_T),
        )

    def routes_of(self, rank: int, device: torch.device) -> tuple[Route, Route]:
        """Return the route to slices of the padded row in row order, one for each rank in rank
        order, and the route back; cached, because many layers call this.
        """
        return _kept_routes(self, rank, device)

    def restored(self, ranks_PX: Tensor) -> Tensor:
        """Return the row's tokens in order, SX, from all ranks' tokens in rank order, PX."""
        order_P = self.order()
        places_P = np.empty_like(order_P)
        places_P[order_P] = np.arange(len(order_P))
        places_S = torch.from_numpy(places_P[self._padded_positions()])
        return ranks_PX[places_S.to(ranks_PX.device)]

    def _parts(self, numbers_T: Integers) -> tuple[Part, ...]:
        """Split held tokens into runs, each of a single document."""
        starts = np.flatnonzero(np.diff(numbers_T, prepend=-1))
        counts = np.diff(starts, append=len(numbers_T))
        lengths = (*self.document_lengths, self.padded_lengths[-1])
        return tuple(
            Part(lengths[number], count)
            for number, count in zip(numbers_T[starts].tolist(), counts.tolist(), strict=True)
        )

    def order(self) -> Integers:
        """Positions of the padded row in the order in which the ranks hold them; shape P."""
        padded_P = self._of_each(np.array(self.padded_lengths))
        if self.ring_degree == 1:
            return np.arange(len(padded_P))
        offsets_P, half_P = self._offsets(), padded_P // (2 * self.ring_degree)
        chunk_P = offsets_P // half_P
        is_second_P = chunk_P >= self.ring_degree
        ring_P = np.where(is_second_P, 2 * self.ring_degree - 1 - chunk_P, chunk_P)
        each = len(padded_P) // self.ring_degree
        starts_P = (np.arange(len(padded_P)) - offsets_P) // self.ring_degree
        places_P = ring_P * each + starts_P + offsets_P % half_P + is_second_P * half_P
        order_P = np.empty_like(places_P)
        order_P[places_P] = np.arange(len(places_P))
        return order_P

    def _offsets(self) -> Integers:
        """Position in its document of each padded token; shape P."""
        lengths = np.array(self.padded_lengths)
        return np.arange(lengths.sum()) - self._of_each(lengths.cumsum() - lengths)

    def _padded_positions(self) -> Integers:
        """Position in the padded row of each of the row's tokens; shape S."""
        lengths, padded = np.array(self.document_lengths), np.array(self.padded_lengths)
        shift = (padded.cumsum() - padded)[: len(lengths)] - (lengths.cumsum() - lengths)
        return np.arange(self.tokens) + np.repeat(shift, lengths)

    def _of_each(self, values: Integers) -> Integers:
        """Repeat a padded document's value for each of its tokens."""
        return np.repeat(values, self.padded_lengths)


@lru_cache(maxsize=2)
def _kept_routes(layout: SequenceLayout, rank: int, device: torch.device) -> tuple[Route, Route]:
    each, order_P = layout.tokens_per_rank, layout.order()
    held_T = order_P[rank * each : (rank + 1) * each]
    coming_T = np.flatnonzero(order_P // each == rank)  # in the order of the ranks that hold them
    leaving_T, arriving_T = held_T // each, order_P[coming_T]
    sent, received = (
        np.bincount(ranks_T, minlength=layout.degree).tolist()
        for ranks_T in (leaving_T, coming_T // each)
    )
    orders = [np.argsort(places_T, kind="stable") for places_T in (leaving_T, arriving_T)]
    (out, into), (out_back, into_back) = (
        [torch.from_numpy(order_T).to(device) for order_T in both]
        for both in (orders, map(np.argsort, orders[::-1]))
    )
    return Route(out, sent, received, into), Route(out_back, received, sent, into_back)


@lru_cache(maxsize=4)
def _kept(layout: SequenceLayout, rank: int) -> Share:
    return layout.cut(rank)
