"""Packing: how many tokens a micro-batch has of each length.

A token budget may make that more for a shorter one. As many sequences are packed as the budget
holds: of a budget that memory does not hold, a length that just does not go into it twice leaves
almost half of it empty, and shorter ones fill it.

Pieces: what a memory-only trial's attention runs on in place of whole documents.

Its time is then linear in the length. The kernel's buffers (output, log-sum-exp, gradients, float32
accumulators) hold so many bytes per token and head, whatever document a token is in: the same
tokens cut into a batch of pieces take the same bytes (docs/decisions/006).
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import Device

NOT_MONOTONE = (
    "with a token budget a shorter length may pack more tokens and not fit: an answer is about "
    "its own two lengths, the longest that fit and the next, which did not"
)
"""What a reader of an answer with a token budget should know."""


def packed_tokens(question: Question, cell: Cell, index: int) -> int:
    """Tokens of a micro-batch of the length at ``index`` of the grid."""
    length_tokens = question.grid.length(index)
    return length_tokens * cell.settings.sequences(
        length_tokens, context_degree=cell.layout.context_degree
    )


def least_packed(question: Question, cell: Cell, size: int) -> int:
    """The index in 1..``size`` with the fewest packed tokens; 1 without a token budget.

    Of several it is the highest.
    """
    if cell.settings.token_budget_tokens is None:
        return 1

    def sequences(index: int) -> int:
        length_tokens, degree = question.grid.length(index), cell.layout.context_degree
        return cell.settings.sequences(length_tokens, context_degree=degree)

    def shortest_alike(index: int) -> int:
        """The shortest index of which as many sequences are packed, and so the fewest tokens."""
        # Sequences fall as lengths grow: negated they are in the order that bisect asks for.
        shorter = range(1, index + 1)
        return bisect_left(shorter, -sequences(index), key=lambda other: -sequences(other)) + 1

    alike: list[int] = []
    while size:
        alike.append(shortest_alike(size))
        size = alike[-1] - 1
    return min(alike, key=partial(packed_tokens, question, cell), default=1)


class _PieceRange(NamedTuple):
    """Lengths that a piece may have on a device."""

    shortest: int
    longest: int
    block: int
    """Rows that the kernels round up to in what they allocate."""


_RANGES: Mapping[Device, _PieceRange] = {
    # What is cut has more than 16,384 tokens: even with a single head no kernel then splits keys
    # for want of work.
    "cuda": _PieceRange(4096, 16384, 128),
    # From 768 on PyTorch's scratch does not depend on the length. Source: ATen,
    # FlashAttentionKernel.cpp.
    "cpu": _PieceRange(768, 1535, 1),
}
_MOST_PADDING = 0.005
"""Share by which rounded pieces may take larger buffers than the rounded whole."""


def pieces(tokens: int, device: Device) -> int | None:
    """Equal pieces to cut this many tokens into.

    1 where they are few enough to stay whole, None where they cannot be cut.
    """
    shortest, longest, block = _RANGES[device]
    if tokens <= longest:
        return 1
    counts = range(tokens // shortest, tokens // longest, -1)
    equal = (count for count in counts if tokens % count == 0)
    best = min(equal, key=lambda count: _padded(tokens, count, block), default=None)
    most = (1 + _MOST_PADDING) * _padded(tokens, 1, block)
    return None if best is None or _padded(tokens, best, block) > most else best


def _padded(tokens: int, count: int, block: int) -> int:
    """Rows of the rounded buffers of ``count`` pieces."""
    return count * (-(-tokens // count // block) * block)
