"""Budget: the time that a search may take, and what of it is left for the next trial.

A trial starts where it is expected to end in time. One that nobody knows the time of starts while
there is any left, and is ended with it: it then has no result, as after an interruption, and is run
again when the search goes on. A full trial after the edge of a cell leaves the cells that come
later the time for theirs.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile

import msgspec

from highwater.nouns.protocols import Launch, OnPhase, Runner, unheard
from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.search.cell_search import NextTrial
from highwater.search.outlook import expected_s, outlook
from highwater.search.proof import trial_s
from highwater.search.scheduler import BudgetSpentError

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
        """``timeout_s`` bounds a full trial; ``same_timeout``: a memory-only one may take no
        longer, as somebody said.
        """
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
        """Order in which cells are searched: where there may be too little time for all, those that
        are expected to reach furthest come first."""
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
        """Start a trial for as long as it may take.

        Its future raises BudgetSpentError if that is less than it might have otherwise, and too
        little.
        """
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
