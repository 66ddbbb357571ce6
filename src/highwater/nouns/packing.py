"""Packing: how many tokens a micro-batch has of each length.

A token budget may make that more for a shorter one. As many sequences are packed as the budget
holds: of a budget that memory does not hold, a length that just does not go into it twice leaves
almost half of it empty, and shorter ones fill it.
"""

from bisect import bisect_left
from functools import partial

from highwater.nouns.study import Cell, Question

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
