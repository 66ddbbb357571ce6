"""Budget: what a search is about to try, how long that is expected to take, and what is left for
the next trial.

A trial starts where it is expected to end in time. One that nobody knows the time of starts while
there is any left, and is ended with it: it is run again when the search goes on. A full trial after
the edge of a cell leaves the cells that come later the time for theirs.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from highwater.memory.capacity import MemoryLimit
from highwater.memory.trainers import predictor_of
from highwater.nouns.protocols import Launch, OnPhase, Runner, unheard
from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.search.cell_search import NextTrial
from highwater.search.proof import full_trials, ran_out_s, trial_s
from highwater.search.scheduler import BudgetSpentError
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
    """Longest length to be trained in full after the edge is known; None where nothing is to be."""
    full_s: float | None
    """Seconds that the full trial of that length is expected to take."""

    @property
    def expected_s(self) -> float | None:
        """Seconds that the cell is expected to take; None: nobody knows."""
        return None if self.edge_s is None else self.edge_s + (self.full_s or 0.0)


def outlook(question: Question, timeout_s: float | None = None) -> tuple[CellOutlook, ...]:
    """What is about to be tried in each cell; ``timeout_s`` is how long a full trial may take."""
    limit_s = timeout_s if question.timeout_s is None else question.timeout_s
    return tuple(_of_cell(question, cell, limit_s) for cell in question.cells)


def time_notes(question: Question, timeout_s: float) -> tuple[str, ...]:
    """A note on the first length that memory would hold and whose full trial would be late."""
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
    full_tokens = full_s = None
    if in_full is not None and memory_only:
        index = in_full.next_index(first, question.grid.length)
        if index is not None:
            full_tokens = question.grid.length(index)
            full_s = trial_s(question, question.trial(cell, full_tokens))
    return CellOutlook(
        cell=cell,
        first_tokens=length_tokens,
        memory_only=memory_only,
        edge_s=edge_s,
        full_tokens=full_tokens,
        full_s=full_s,
    )


def _fits(question: Question, cell: Cell, length_tokens: int) -> bool:
    """Whether a length is predicted to fit; so it is where nobody knows memory or formula."""
    if question.memory_bytes is None:
        return True
    limit = MemoryLimit(device_bytes=question.memory_bytes)
    predictor = predictor_of(question, cell, limit)
    room_bytes = question.memory_bytes - question.margin_bytes
    return predictor is None or predictor.at(length_tokens, room_bytes).fits


_ABOUT = 1.1
"""Times the budget by which a search has ended: predicted times are some per cent off."""
_SURELY_ENOUGH = 0.6
"""Share of the budget that all cells may be expected to take to be answered in their own order."""
_TIMES_PREDICTED = 3.0
"""Times its predicted time that a memory-only trial may take: a host may be busy."""


class Budget:
    """The budget of one search, from now on; a runner whose trials end with it."""

    def __init__(
        self,
        question: Question,
        runner: Runner,
        budget_s: float,
        *,
        timeout_s: float,
        same_timeout: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout_s`` bounds a full trial; with ``same_timeout`` a memory-only one too."""
        self._question = question
        self._runner = runner
        self._timeout_s = timeout_s
        self._same_timeout = same_timeout
        self._clock = clock
        self._ends_at = clock() + _ABOUT * budget_s
        self._budget_s = budget_s
        cells = outlook(question, timeout_s)
        self._edges_s = {each.cell: each.edge_s or 0.0 for each in cells}
        self.order: Sequence[Cell] = question.cells
        """Order of the cells: where time may be too short for all, the furthest-reaching first."""
        in_all_s = expected_s(cells)
        is_short = in_all_s is not None and in_all_s > _SURELY_ENOUGH * budget_s
        if is_short and question.method == "bisect":
            furthest = sorted(cells, key=lambda each: -each.first_tokens)
            self.order = tuple(each.cell for each in furthest)

    @property
    def left_s(self) -> float:
        """Seconds until the search has to have ended."""
        return self._ends_at - self._clock()

    def allows(self, trial: NextTrial) -> bool:
        """Whether there is time for a trial that is not recorded."""
        kept_s = self._edges_after(trial.cell) if trial.after_edge else 0.0
        needed_s = trial_s(self._question, trial.spec) or 0.0
        return self.left_s - kept_s > needed_s

    def has_room(self, spec: TrialSpec) -> bool:
        """Whether the runner has, as ``Runner`` says."""
        return self._runner.has_room(spec)

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial for as long as it may take; BudgetSpentError, if that was too little."""
        own_s, left_s = self._limit_s(launch.spec), max(0.0, self.left_s)
        timed = msgspec.structs.replace(launch, timeout_s=min(own_s, left_s))
        future = self._runner.submit(timed, on_phase=on_phase)
        return _cut_short(future) if left_s < own_s else future

    def close(self) -> None:
        """End whatever runs, as ``Runner`` says."""
        self._runner.close()

    def _limit_s(self, spec: TrialSpec) -> float:
        """Seconds that a trial may take, were there time without end."""
        if self._same_timeout or not spec.is_memory_only:
            return self._timeout_s
        predicted_s = trial_s(self._question, spec)
        most_s = self._budget_s / 2 if predicted_s is None else _TIMES_PREDICTED * predicted_s
        return max(self._timeout_s, most_s)

    def _edges_after(self, cell: Cell) -> float:
        """Seconds that the edges of the cells after this one are expected to take."""
        later = takewhile(lambda other: other != cell, reversed(self.order))
        return sum(self._edges_s[other] for other in later)


def _cut_short(trial: Future[TrialResult]) -> Future[TrialResult]:
    """The future of a trial whose time was cut: running out of it says that the budget is spent."""
    told: Future[TrialResult] = Future()

    def pass_on(ended: Future[TrialResult]) -> None:
        error = ended.exception()
        if error is not None:
            told.set_exception(error)
        elif ended.result().outcome is Outcome.TIMEOUT:
            told.set_exception(BudgetSpentError())
        else:
            told.set_result(ended.result())

    trial.add_done_callback(pass_on)
    return told
