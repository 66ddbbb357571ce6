"""The sequence over ranks: packed tokens in one contiguous slice per rank.

The tokens are padded to a multiple of the number of ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """The positions of one rank, from ``start`` up to ``stop``."""

    start: int
    stop: int
    padding: int
    """Tokens added after the last document of the whole, the same number on every rank."""


def slice_of(tokens: int, *, degree: int, rank: int) -> Slice:
    """This rank's positions in ``tokens`` packed tokens shared by ``degree`` ranks.

    All slices have one length.
    """
    each = -(-tokens // degree)
    return Slice(start=rank * each, stop=(rank + 1) * each, padding=each * degree - tokens)


class Part(NamedTuple):
    """A rank's share of one document."""

    document_tokens: int
    """Tokens of the whole document, on all ranks together."""
    tokens: int


def parts_of(document_lengths: Sequence[int], *, start: int, stop: int) -> list[Part]:
    """The documents that overlap positions ``start`` up to ``stop``, in their order.

    ``document_lengths`` are those of the whole row, which these positions are a part of.
    """
    parts: list[Part] = []
    begin = 0
    for length in document_lengths:
        end = begin + length
        if begin < stop and end > start:
            parts.append(Part(length, min(stop, end) - max(start, begin)))
        begin = end
    return parts
