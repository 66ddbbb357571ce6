"""Packing: how many tokens a micro-batch has of each length, which a token budget may make more for a shorter one.

As many sequences are packed as the budget holds: of a budget that memory does not hold, a length that just does not go into it
twice leaves almost half of it empty, and shorter ones fill it.
"""

from functools import partial

from highwater.spec.study import Cell, Question


def packed_tokens(question: Question, cell: Cell, index: int) -> int:
    """Tokens of a micro-batch of the length at ``index`` of the grid."""
    length_tokens = question.grid.length(index)
    return length_tokens * cell.settings.sequences(length_tokens, context_degree=cell.layout.context_degree)


def least_packed(question: Question, cell: Cell, size: int) -> int:
    """The index in 1..``size`` with the fewest packed tokens, the highest of several; 1 without a token budget."""
    if cell.settings.token_budget_tokens is None:
        return 1
    return min(range(size, 0, -1), key=partial(packed_tokens, question, cell), default=1)
