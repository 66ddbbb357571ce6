"""Outlook: what a search is about to try, and how long that is expected to take, before it starts.

By formula and predicted step times. It orders nothing: whoever starts a search reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.memory.capacity import MemoryLimit, predict_at
from highwater.memory.trainers import formula_of
from highwater.search.proof import FullTrials
from highwater.search.start_length import first_index
from highwater.search.trial_seconds import ran_out_s, trial_s
from highwater.spec.study import Cell, Question

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


def outlook(question: Question) -> tuple[CellOutlook, ...]:
    """What is about to be tried in each cell, in their order."""
    return tuple(_of_cell(question, cell) for cell in question.cells)


def expected_s(cells: Sequence[CellOutlook]) -> float | None:
    """Seconds that cells are expected to take together; None: nobody knows."""
    known = [cell.expected_s for cell in cells if cell.expected_s is not None]
    return sum(known) if len(known) == len(cells) else None


def _of_cell(question: Question, cell: Cell) -> CellOutlook:
    first = first_index(question, cell, []) or 1
    full_trials = FullTrials(question, cell) if question.proof == "memory" else None
    length_tokens = question.grid.length(first)
    memory_only = full_trials is not None and full_trials.exceeds(length_tokens)
    spec = question.trial(cell, length_tokens, memory_only=memory_only)
    fits_s, fails_s = trial_s(question, spec), ran_out_s(question, spec)
    edge_s = None
    if fits_s is not None and fails_s is not None:
        edge_s = TRIALS_AT_AN_EDGE / 2 * (fits_s + fails_s)
        if first == 1 and not _fits(question, cell, length_tokens):
            edge_s = fails_s
    full_tokens = None
    if full_trials is not None and memory_only:
        index = full_trials.next_index(first, question.grid.length)
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
