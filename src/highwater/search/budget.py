"""Budget: the trials that a search is about to run, their expected time, and whether the time left
is enough for the next trial.

A trial starts only if it is expected to end in time. A trial of unknown time starts while any time
is left, is stopped when the budget ends, and runs again when the search is resumed. A full trial
after a cell's edge leaves the later cells enough time to find their edges.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile

from highwater.memory.trainers import formula_of_trials
from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import Launch, OnPhase, Outcome, Runner, TrialResult, TrialSpec, unheard
from highwater.search.cell_search import NextTrial
from highwater.search.proof import full_trials, ran_out_s, trial_s
from highwater.search.scheduler import BudgetSpentError
from highwater.search.start_length import first_index
from highwater.units import format_tokens

TRIALS_AT_AN_EDGE = 2.5
"""Trials assumed to find the edge of a cell; two are enough if the prediction is within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutlook:
    """Next trials of one cell (settings on a layout), and the seconds that they should take."""

    cell: Cell
    first_tokens: int
    """Length that is tried first: the predicted edge."""
    memory_only: bool
    """True if trials at that length are memory-only, because a full one would take too long."""
    edge_s: float | None
    """Seconds that the trials at the edge are expected to take; None if nobody can predict it."""
    full_tokens: int | None
    """Longest length to train in full once the edge is known; None if there is no such trial."""
    full_s: float | None
    """Seconds that the full trial of that length is expected to take."""

    @property
    def expected_s(self) -> float | None:
        """Seconds that the whole cell is expected to take; None if that cannot be predicted."""
        return None if self.edge_s is None else self.edge_s + (self.full_s or 0.0)


def outlook(question: Question, timeout_s: float | None = None) -> tuple[CellOutlook, ...]:
    """Return each cell's next trials; ``timeout_s``: most seconds that a full trial may take."""
    limit_s = timeout_s if question.timeout_s is None else question.timeout_s
    return tuple(_of_cell(question, cell, limit_s) for cell in question.cells)


def time_notes(question: Question, timeout_s: float) -> tuple[str, ...]:
    """Return a note, if any, on the first cell whose predicted length takes too long to train."""
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
    """Seconds that all cells are expected to take together; None if any of them is unknown."""
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
    """True if a length is predicted to fit, or if that cannot be predicted."""
    if question.memory_bytes is None:
        return True
    predictor = formula_of_trials(question, cell, question.memory_bytes)
    room_bytes = question.memory_bytes - question.margin_bytes
    return predictor is None or predictor.at(length_tokens, room_bytes).fits


_ABOUT = 1.1
"""A search ends within this multiple of its budget: predicted times are off by some per cent."""
_SURELY_ENOUGH = 0.6
"""Cells keep their order if they are expected to take at most this share of the budget."""
_TIMES_PREDICTED = 3.0
"""Multiple of its predicted time that a memory-only trial may take: a host may be busy."""


class Budget:
    """The time that a search may take, from now on; a runner that ends trials in time."""

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
        """``timeout_s`` limits a full trial; with ``same_timeout`` also a memory-only trial."""
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
        """Order of the cells; if time may be too short for all, longest predicted first."""
        in_all_s = expected_s(cells)
        is_short = in_all_s is not None and in_all_s > _SURELY_ENOUGH * budget_s
        if is_short and question.method == "bisect":
            furthest = sorted(cells, key=lambda each: -each.first_tokens)
            self.order = tuple(each.cell for each in furthest)

    @property
    def left_s(self) -> float:
        """Seconds until the search must have ended."""
        return self._ends_at - self._clock()

    def allows(self, trial: NextTrial) -> bool:
        """True if enough time is left for a trial whose result is not recorded yet."""
        kept_s, needed_s = 0.0, trial_s(self._question, trial.spec) or 0.0
        if trial.after_edge:  # the cells after this one are to find their edges
            later = takewhile(lambda other: other != trial.cell, reversed(self.order))
            kept_s = sum(self._edges_s[other] for other in later)
        return self.left_s - kept_s > needed_s

    def has_room(self, spec: TrialSpec) -> bool:
        """True if the runner has room for this trial now; see ``Runner``."""
        return self._runner.has_room(spec)

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial; if the budget ends it, its future raises BudgetSpentError."""
        own_s, left_s = self._limit_s(launch.spec), max(0.0, self.left_s)
        timed = launch.replace(timeout_s=min(own_s, left_s))
        future = self._runner.submit(timed, on_phase=on_phase)
        return _cut_short(future) if left_s < own_s else future

    def close(self) -> None:
        """End all running trials; see ``Runner``."""
        self._runner.close()

    def _limit_s(self, spec: TrialSpec) -> float:
        """Time limit of a trial in seconds if the budget were unlimited."""
        if self._same_timeout or not spec.is_memory_only:
            return self._timeout_s
        predicted_s = trial_s(self._question, spec)
        most_s = self._budget_s / 2 if predicted_s is None else _TIMES_PREDICTED * predicted_s
        return max(self._timeout_s, most_s)


def _cut_short(trial: Future[TrialResult]) -> Future[TrialResult]:
    """Wrap the future of a trial with shortened time: a timeout then raises BudgetSpentError."""
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
