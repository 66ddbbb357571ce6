"""Outlook: what a search is about to try, and how long that is expected to take, before it starts.

By formula and predicted step times. It orders nothing: whoever starts a search reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.memory.capacity import MemoryLimit, predict_at
from highwater.memory.trainers import formula_of
from highwater.nouns.study import Cell, Question
from highwater.search.proof import full_trials, ran_out_s, trial_s
from highwater.search.start_length import first_index
from highwater.units import format_tokens

TRIALS_AT_AN_EDGE = 2.5
"""Trials that the edge of a cell is taken to need: two where the prediction is within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutlook:
    """What the search of one cell is about to try."""

    cell: Cell
    first_tokens: int
    """Length that is tried first: where the edge is predicted."""
    memory_only: bool
    """Whether trials there are memory-only: one in full would take longer than its share."""
    edge_s: float | None
    """Seconds that the trials at the edge are expected to take; None: nobody knows."""
    full_tokens: int | None
    """Longest length to be trained in full after the edge is known; None where the edge itself is
    trained in full, where no length can be in time, and where nobody knows.
    """
    full_s: float | None
    """Seconds that the full trial of that length is expected to take."""

    @property
    def expected_s(self) -> float | None:
        """Seconds that the cell is expected to take; None: nobody knows."""
        return None if self.edge_s is None else self.edge_s + (self.full_s or 0.0)


def outlook(question: Question, timeout_s: float | None = None) -> tuple[CellOutlook, ...]:
    """What is about to be tried in each cell, in their order.

    ``timeout_s`` is how long a full trial may take, as of ``search_cells``.
    """
    limit_s = timeout_s if question.timeout_s is None else question.timeout_s
    return tuple(_of_cell(question, cell, limit_s) for cell in question.cells)


def time_notes(question: Question, timeout_s: float) -> tuple[str, ...]:
    """A note that names the first length that memory is predicted to hold, and whose full trial is
    predicted to take longer than it may; none where each is in time, or told by a memory-only one.
    """
    for cell in question.cells if question.proof == "full" else ():
        in_full = full_trials(question, cell, timeout_s)
        length_tokens = question.grid.length(first_index(question, cell, []) or 1)
        if in_full is not None and in_full.exceeds(length_tokens):
            return (
                f"memory is predicted to hold {format_tokens(length_tokens)} tokens with "
                f"{cell.label_on(question.device)}: {in_full.why_not(length_tokens)}; lengths that "
                "are predicted to take longer are left out, and time limits the answer: a longer "
                "`--timeout` goes further",
            )
    return ()


def expected_s(cells: Sequence[CellOutlook]) -> float | None:
    """Seconds that cells are expected to take together; None: nobody knows."""
    known = [cell.expected_s for cell in cells if cell.expected_s is not None]
    return sum(known) if len(known) == len(cells) else None


def _of_cell(question: Question, cell: Cell, limit_s: float | None) -> CellOutlook:
    first = first_index(question, cell, []) or 1
    in_full = full_trials(question, cell, limit_s)
    if in_full is not None and question.proof == "full":
        first = in_full.longest(0, first, question.grid.length) or 1
    length_tokens = question.grid.length(first)
    memory_only = (
        question.proof == "memory" and in_full is not None and in_full.exceeds(length_tokens)
    )
    spec = question.trial(cell, length_tokens, memory_only=memory_only)
    fits_s, fails_s = trial_s(question, spec), ran_out_s(question, spec)
    edge_s = None
    if fits_s is not None and fails_s is not None:
        edge_s = TRIALS_AT_AN_EDGE / 2 * (fits_s + fails_s)
        if first == 1 and not _fits(question, cell, length_tokens):
            edge_s = fails_s
    full_tokens = None
    if in_full is not None and memory_only:
        index = in_full.next_index(first, question.grid.length)
        full_tokens = None if index is None else question.grid.length(index)
    full = None if full_tokens is None else question.trial(cell, full_tokens)
    return CellOutlook(
        cell=cell,
        first_tokens=length_tokens,
        memory_only=memory_only,
        edge_s=edge_s,
        full_tokens=full_tokens,
        full_s=None if full is None else trial_s(question, full),
    )


def _fits(question: Question, cell: Cell, length_tokens: int) -> bool:
    """Whether a length is predicted to fit; so it is where nobody knows memory or formula."""
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if memory_bytes is None:
        return True
    limit = MemoryLimit(device_bytes=memory_bytes)
    formula = formula_of(question)
    if formula is None:
        return True
    found = predict_at(question, cell, limit, formula, length_tokens)
    return found.capacity_tokens > 0
