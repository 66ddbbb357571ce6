"""Searches of cells: answer a question cell by cell, by trials.

A search asks the bracket, runs the trial, and tells the bracket. An event is yielded before and
after every trial and after every cell, so that whoever listens can show and record them. The order
of trials depends only on the question and on the results: the same results, the same search.

With the proof ``memory`` a length whose full trial is expected to exceed the time limit, or did,
gets a memory-only trial. When the edge is known, full trials go up to the longest length that they
can be expected to reach in time. Where nobody can predict the time of a trial, a cell begins with a
full trial of the shortest length, by whose time the others are judged.

What a study has recorded of a cell is taken before anything new is run but that first full trial,
also where it was found in another order: under another time limit, or after the answer of an
earlier cell that has changed since (docs/decisions/025).

A search may be given less time than it takes: ``may_start`` is asked before each trial that is not
recorded. A full trial after the edge is left out where it says no; a cell whose edge is still to be
found is left, and the search ends with ``BudgetSpentError`` when no other cell is open.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from highwater.search.bracket import Bracket
from highwater.search.cell_outcomes import CellOutcomes
from highwater.search.memory_line import MemoryLineOf, engine_line
from highwater.search.proof import FullTrials
from highwater.search.recorded_trials import (
    MAX_ATTEMPTS,
    WantedTrial,
    allowed_timeouts,
    recorded_trials,
)
from highwater.search.start_length import carried_start, first_index
from highwater.spec.packing import least_packed
from highwater.spec.pieces import pieces
from highwater.spec.protocols import Runner
from highwater.spec.study import Cell, CellAnswer, Past, Question
from highwater.spec.trial import Outcome, TrialResult, TrialSpec

_MOST_FULL_TRIALS = 4
"""Full trials after the edge is known: each reaches further by the time of the one before."""
_NEAR = 4
"""Steps by which a trial may be moved to a length that takes far less time."""
_TRIALS_OF_A_CELL = 4
"""Trials that a cell is taken to need while none is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial is about to be launched."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    trials_left: int
    """About how many more trials the whole question takes after this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial has ended."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    result: TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAnswered:
    """A cell is finished."""

    answer: CellAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRuns:
    """The trial that was started last is running; told about twice a second."""

    cell: Cell
    spec: TrialSpec
    phase: str
    """What its first rank is doing: ``step 1 of 2``."""


SearchEvent = TrialStarted | TrialRuns | TrialFinished | CellAnswered


class BudgetSpentError(Exception):
    """The time that the search was given is over, or too short for the next trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """A trial that a search is about to start."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    after_edge: bool
    """Whether the cell is answered without it."""


MayStart = Callable[[NextTrial], bool]
"""Whether there is time for a trial; one that is recorded takes none."""


def search_cells(
    question: Question,
    runner: Runner,
    *,
    line_of: MemoryLineOf = engine_line,
    expected: Callable[[Cell], int | None] = lambda _: None,
    past: Callable[[Cell], Past] = lambda _: Past(),
    may_start: MayStart = lambda _: True,
    order: Sequence[Cell] | None = None,
) -> Iterator[SearchEvent]:
    """Answer every cell of ``question``, in its order or in another; ends with the answer of the
    last one.

    ``line_of`` is the memory line of the trainer that ``runner`` starts. ``expected`` is the
    longest length in tokens that a cell is predicted to train, 0 for none, None where nobody knows.
    Both order the trials and decide nothing. ``past`` is what is recorded of a cell, whose trials
    ``runner`` answers without running them.

    Raises BudgetSpentError at the end where ``may_start`` left a cell without its edge, or where
    ``runner`` raises it. MachineError, KeyboardInterrupt and
    whatever else ``runner`` raises pass through.
    """
    finished: list[CellAnswer] = []
    is_spent = False
    for cell in question.cells if order is None else order:
        known = past(cell)
        if known.answer is not None:
            yield from _recorded_ends(cell, known)
            finished.append(known.answer)
        else:
            first = _first_index(question, cell, finished, line_of, expected(cell))
            search = _CellSearch(question, cell, runner, finished, first, known, may_start)
            yield from search.run()
            if search.has_no_time:
                is_spent = True
                continue
            finished.append(search.answer())
        yield CellAnswered(answer=finished[-1])
    if is_spent:
        raise BudgetSpentError


def _recorded_ends(cell: Cell, known: Past) -> Iterator[TrialFinished]:
    """Events of the trials of a cell that is not searched again, for whoever listens."""
    for trial in known.trials:
        if trial.result is not None:
            yield TrialFinished(
                cell=cell,
                spec=trial.spec,
                attempt=trial.attempt,
                repeat=trial.repeat,
                result=trial.result,
            )


def _first_index(
    question: Question,
    cell: Cell,
    finished: list[CellAnswer],
    line_of: MemoryLineOf,
    expected_tokens: int | None,
) -> int | None:
    """The index at which the search of a cell begins; None for the shortest length."""
    if question.method == "linear":
        return carried_start(question, cell, finished)
    if expected_tokens is not None:
        return question.grid.index_at_most(expected_tokens)
    return first_index(question, cell, finished, line_of)


class _CellSearch:
    """The search of one cell: which trial comes next, and how often it is launched."""

    def __init__(
        self,
        question: Question,
        cell: Cell,
        runner: Runner,
        finished: list[CellAnswer],
        first: int | None,
        known: Past,
        may_start: MayStart,
    ) -> None:
        self._question = question
        self._cell = cell
        self._runner = runner
        self._finished = finished
        size = question.size_of(cell)
        packed = least_packed(question, cell, size)
        self._bracket = Bracket(size, first, question.method, least_packed=packed)
        self._outcomes = CellOutcomes(question, cell, self._bracket)
        self._recorded = recorded_trials(question, known)
        """Recorded trials that were not asked for yet, in their order."""
        self._may_start = may_start
        self.has_no_time = False
        """Whether the search ended because a trial at the edge was not to start."""
        self._full_trials = FullTrials(question, cell) if question.proof == "memory" else None
        self._begins_in_full = self._full_trials is not None and not self._full_trials.foresees

    def run(self) -> Iterator[SearchEvent]:
        """Run trials until the cell has an answer, or a trial that only crashes."""
        while self._outcomes.crashed is None and (asked := self._next()) is not None:
            if not asked.after_edge and not self._may_start(self._as_launched(asked, attempt=1)):
                self.has_no_time = True
                return
            result = yield from self._try(asked)
            if not asked.memory_only and self._full_trials is not None:
                self._full_trials.tell(self._question.grid.length(asked.index), result)
            self._outcomes.take_in(asked, result)
        # A first full trial that only crashed undoes nothing that is recorded.
        for asked in self._recorded:
            self._outcomes.take_in(asked, (yield from self._try(asked)))

    def answer(self) -> CellAnswer:
        """The answer that the trials so far prove."""
        return self._outcomes.answer()

    def _next(self) -> WantedTrial | None:
        """The next trial; None when the cell is answered.

        Before a new one that is not the first in full, and before the end, all that is recorded is
        taken in.
        """
        asked = self._wanted()
        recorded = None if asked is None else self._as_recorded(asked)
        if self._begins_in_full:
            self._begins_in_full = False
        elif recorded is None and self._recorded:
            asked = recorded = self._recorded[0]
        if recorded is None:
            return asked
        self._recorded.remove(recorded)
        return replace(recorded, after_edge=asked is not None and asked.after_edge)

    def _as_recorded(self, asked: WantedTrial) -> WantedTrial | None:
        """The same trial as it was recorded; None where it was not.

        A memory-only one counts too while the edge is still to be found.
        """
        in_full = self._begins_in_full or asked.after_edge
        place = (asked.index, asked.repeat)
        same = (each for each in self._recorded if (each.index, each.repeat) == place)
        return next((each for each in same if not (in_full and each.memory_only)), None)

    def _wanted(self) -> WantedTrial | None:
        """The trial that the bracket asks for, else one that confirms its answer, else a full one.

        Full trials after the edge only say how much of it is trained.
        """
        if self._begins_in_full and self._question.method == "bisect":
            return WantedTrial(1)
        index = self._bracket.ask()
        if index is not None:
            if self._is_too_long(index):
                index = self._near_in_pieces(index)
            return WantedTrial(index, memory_only=self._is_too_long(index))
        for index, repeat in self._confirmations_left():
            memory_only = index in self._outcomes.memory_only or self._is_too_long(index)
            return WantedTrial(index, repeat, memory_only=memory_only)
        return self._next_in_full()

    def _next_in_full(self) -> WantedTrial | None:
        """A full trial of what memory-only trials proved, if it may be expected to end in time."""
        outcomes = self._outcomes
        if self._full_trials is None or outcomes.untold or outcomes.after_edge == _MOST_FULL_TRIALS:
            return None
        index = self._full_trials.next_index(self._bracket.fits, self._question.grid.length)
        if index is None:
            return None
        asked = WantedTrial(index, after_edge=True)
        return asked if self._may_start(self._as_launched(asked, attempt=1)) else None

    def _is_too_long(self, index: int) -> bool:
        """Whether full trials so far say that one of this length would not end in time."""
        full_trials, length_tokens = self._full_trials, self._question.grid.length(index)
        return full_trials is not None and full_trials.exceeds(length_tokens)

    def _near_in_pieces(self, index: int) -> int:
        """The index itself, or one beside it within the bracket whose tokens can be cut into equal
        pieces: others take a memory-only trial as long as a full one.
        """
        between = range(self._bracket.fits + 1, self._bracket.end)
        near = sorted(
            (each for each in between if abs(each - index) <= _NEAR),
            key=lambda each: abs(each - index),
        )
        return next(filter(self._has_pieces, near), index)

    def _has_pieces(self, index: int) -> bool:
        spec = self._spec_of(WantedTrial(index))
        return pieces(spec.length_tokens * spec.sequences, spec.device) is not None

    def _confirmations_left(self) -> list[tuple[int, int]]:
        """Both sides of the edge again, then the lengths above it, as index and repeat.

        An edge that moves is confirmed anew.
        """
        fits, times = self._bracket.fits, self._question.confirm
        edge = [fits] if fits else []
        above = range(0)
        if self._bracket.is_proven:
            edge.append(fits + 1)
            above = range(fits + 2, min(fits + 1 + times, self._question.size_of(self._cell)) + 1)
        wanted = [(index, repeat) for repeat in range(1, times + 1) for index in edge]
        wanted += [(index, 0) for index in above]
        tried = {(index, repeat) for index, repeat, _ in self._outcomes.results}
        return [asked for asked in wanted if asked not in tried]

    def _try(self, asked: WantedTrial) -> Generator[SearchEvent, None, TrialResult]:
        """Launch a trial until an attempt tells whether the length fits, as often as is allowed.

        Returns the last result.
        """
        cell, repeat, spec = self._cell, asked.repeat, self._spec_of(asked)
        timeouts, attempt = 0, 1
        while True:
            yield TrialStarted(
                cell=cell,
                spec=spec,
                attempt=attempt,
                repeat=repeat,
                trials_left=self._trials_left(),
            )
            self._outcomes.launches += 1
            result = self._runner.run(spec, attempt=attempt, repeat=repeat)
            yield TrialFinished(cell=cell, spec=spec, attempt=attempt, repeat=repeat, result=result)
            timeouts += result.outcome is Outcome.TIMEOUT
            is_late = timeouts == allowed_timeouts(self._question, asked)
            attempt += 1
            is_last = result.outcome.tells or attempt > MAX_ATTEMPTS or is_late
            if is_last or not self._may_start(self._as_launched(asked, attempt=attempt)):
                return result

    def _spec_of(self, asked: WantedTrial) -> TrialSpec:
        length_tokens = self._question.grid.length(asked.index)
        return self._question.trial(self._cell, length_tokens, memory_only=asked.memory_only)

    def _as_launched(self, asked: WantedTrial, *, attempt: int) -> NextTrial:
        return NextTrial(
            cell=self._cell,
            spec=self._spec_of(asked),
            attempt=attempt,
            repeat=asked.repeat,
            after_edge=asked.after_edge,
        )

    def _trials_left(self) -> int:
        """About how many trials the question takes after the next one, by the cells so far."""
        here = self._bracket.trials_left or len(self._confirmations_left())
        done = [answer.trials for answer in self._finished]
        each = sum(done) / len(done) if done else _TRIALS_OF_A_CELL + 3 * self._question.confirm
        cells = len(self._question.cells) - len(done) - 1
        return max(0, here - 1) + round(cells * each)
