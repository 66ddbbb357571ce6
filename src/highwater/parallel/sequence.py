"""The sequence over ranks: packed tokens, padded to a multiple of the degree, one contiguous slice per rank."""

from collections.abc import Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """The positions of one rank."""

    start: int
    stop: int
    padding: int
    """Tokens added after the last document of the whole, the same on every rank."""


def slice_of(tokens: int, *, degree: int, rank: int) -> Slice:
    """This rank's positions in ``tokens`` packed tokens shared by ``degree`` ranks; all slices have one length."""
    each = -(-tokens // degree)
    return Slice(start=rank * each, stop=(rank + 1) * each, padding=each * degree - tokens)


class Part(NamedTuple):
    """What a rank has of one document."""

    document_tokens: int
    """Of the whole document, on whichever ranks."""
    tokens: int


def parts_of(document_lengths: Sequence[int], *, start: int, stop: int) -> list[Part]:
    """The documents that positions from ``start`` up to ``stop`` are of, in their order; the lengths are those of the whole row."""
    parts: list[Part] = []
    begin = 0
    for length in document_lengths:
        end = begin + length
        if begin < stop and end > start:
            parts.append(Part(length, min(stop, end) - max(start, begin)))
        begin = end
    return parts
