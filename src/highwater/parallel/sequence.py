"""The sequence over ranks: packed tokens, padded to a multiple of the degree, one contiguous slice per rank."""

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
