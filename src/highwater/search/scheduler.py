"""Scheduler: search several cells at a time, and record every event in a journal.

Each cell has at most one running trial; cells are searched concurrently in their order, as many as
the runner has room for. An event is yielded before and after every trial and after every cell, all
in one thread, so that their record has one order. Every event is on disk before anything follows
from it; resuming a search is asking it again.

``may_start`` is asked before each trial without a recorded result. If it says no to a full trial
after the edge, that trial is skipped; if it says no to a trial at the edge, the cell is given up,
and the search ends with ``BudgetSpentError`` when no other cell is open.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from highwater.nouns.study import Cell, CellAnswer, Expectation, Past, Question, RecordedTrial
from highwater.nouns.trial import TOLD_S, Launch, Runner, TrialResult, kept_result
from highwater.search.cell_outcomes import (
    CellAnswered,
    SearchEvent,
    TrialFinished,
    TrialRuns,
    TrialStarted,
)
from highwater.search.cell_search import CellSearch, MayStart, NextTrial
from highwater.search.start_length import (
    MemoryLineOf,
    carried_start,
    first_index,
    precedes,
    trainer_line,
)
from highwater.store.journal import Journal

_TRIALS_OF_A_CELL = 4
"""Trials that a cell is assumed to need until the first cell is finished."""

Recorded = Callable[[NextTrial], TrialResult | None]
"""Return the recorded result of a launch; None if it has to be run."""


class BudgetSpentError(Exception):
    """The time given to the search is over, or too short for the next trial."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A running trial."""

    search: CellSearch
    asked: NextTrial
    phase: str = "starting"
    future: Future[TrialResult] = field(default_factory=Future[TrialResult])

    def hear(self, phase: str) -> None:
        """Record the trial's current phase; called from another thread."""
        self.phase = phase


def search_cells(
    question: Question,
    runner: Runner,
    *,
    line_of: MemoryLineOf = trainer_line,
    expected: Callable[[Cell], int | None] = lambda _: None,
    past: Callable[[Cell], Past] = lambda _: Past(),
    recorded: Recorded = lambda _: None,
    may_start: MayStart = lambda _: True,
    order: Sequence[Cell] | None = None,
    timeout_s: float | None = None,
    begins_shortest: bool = False,
) -> Iterator[SearchEvent]:
    """Answer every cell of ``question``, in its order or ``order``; the last answer comes last.

    ``line_of`` is the memory line, bytes by tokens, of the trainer that ``runner`` starts;
    ``expected`` is the longest length in tokens that a cell is predicted to train, 0 for none, None
    if unknown. Both only order the trials; answers do not depend on them. ``past`` returns what is
    recorded of a cell, ``recorded`` the result of one launch, which is then not run. ``timeout_s``
    is the longest time of a full trial, if lengths that are predicted to take longer are to be left
    out. With ``begins_shortest`` each cell begins with the shortest length, then jumps to the
    expected edge.

    Raises BudgetSpentError at the end if ``may_start`` left a cell without its edge, or if one of
    its trials raised it. MachineError and other errors of a trial pass through once the trials that
    ended beside it have been reported; closing the runner ends the others.
    """
    search = _Search(
        question, runner, line_of, expected, past, recorded, may_start, timeout_s, begins_shortest
    )
    yield from search.run(question.cells if order is None else order)


@dataclass(slots=True, eq=False)
class _Search:
    """A search of several cells: those waiting, those being searched and those answered."""

    _question: Question
    _runner: Runner
    _line_of: MemoryLineOf
    _expected: Callable[[Cell], int | None]
    _past: Callable[[Cell], Past]
    _recorded: Recorded
    _has_time: MayStart
    _timeout_s: float | None
    _begins_shortest: bool
    _is_cut: bool = False
    """True once a trial ran out of budget: no other trial is started after it."""
    _is_spent: bool = False
    """True if a cell was left without its answer."""
    _waiting: list[Cell] = field(default_factory=list[Cell])
    _open: list[CellSearch] = field(default_factory=list[CellSearch])
    """Searches that have begun and have no answer yet, in the order of their start."""
    _in_flight: list[_InFlight] = field(default_factory=list[_InFlight])
    _finished: list[CellAnswer] = field(default_factory=list[CellAnswer])

    def run(self, cells: Sequence[Cell]) -> Iterator[SearchEvent]:
        """Search cells until each has its answer or the time is over."""
        self._waiting = list(cells)
        while self._waiting or self._open:
            if ended := [flight for flight in self._in_flight if flight.future.done()]:
                yield from self._finish(ended)
            elif (search := self._movable()) is not None:
                yield from self._move(search)
            elif (cell := next(filter(self._can_begin, self._waiting), None)) is not None:
                yield from self._begin(cell)
            else:
                yield from self._await()
        if self._is_spent:
            raise BudgetSpentError

    def _movable(self) -> CellSearch | None:
        """Return the first open search with a trial that can start now; None if there is none."""
        flying = {id(flight.search) for flight in self._in_flight}
        for search in self._open:
            if id(search) not in flying:
                asked = search.ask()
                if asked is None or self._recorded(asked) is not None:
                    return search
                if self._runner.has_room(asked.spec):
                    return search
        return None

    def _move(self, search: CellSearch) -> Iterator[SearchEvent]:
        """Advance a search: close it if finished, else record its next trial or start that."""
        asked = search.ask()
        if asked is None:
            self._open.remove(search)
            if search.has_no_time:
                self._is_spent = True
                return
            self._finished.append(search.answer())
            yield CellAnswered(answer=self._finished[-1])
        elif (result := self._recorded(asked)) is not None:
            yield _finished(asked, asked.cell, result, is_recorded=True)
            search.tell(result)
        else:
            yield from self._start(search, asked)

    def _start(self, search: CellSearch, asked: NextTrial) -> Iterator[TrialStarted]:
        yield TrialStarted(
            cell=asked.cell,
            spec=asked.spec,
            attempt=asked.attempt,
            repeat=asked.repeat,
            trials_left=self._trials_left(search),
        )
        flight = _InFlight(search, asked)
        launch = Launch(spec=asked.spec, attempt=asked.attempt, repeat=asked.repeat)
        flight.future = self._runner.submit(launch, on_phase=flight.hear)
        self._in_flight.append(flight)

    def _finish(self, ended: Sequence[_InFlight]) -> Iterator[TrialFinished]:
        """Yield the trials that ended, then raise the error of one of them, if any."""
        failure: BaseException | None = None
        for flight in ended:
            self._in_flight.remove(flight)
            error = flight.future.exception()
            if error is None:
                # Secrets are hidden before a result is told to anybody, never afterwards.
                result = kept_result(flight.future.result())
                asked = flight.asked
                yield _finished(asked, asked.cell, result, is_recorded=False)
                flight.search.tell(result)
            elif isinstance(error, BudgetSpentError):
                flight.search.give_up()
                self._is_cut = True
            else:
                failure = failure or error
        if failure is not None:
            raise failure

    def _can_begin(self, cell: Cell) -> bool:
        """True if the cell already has an answer, or the runner has room for its search."""
        if self._past(cell).answer is not None:
            return True
        shortest = self._question.trial(cell, self._question.grid.start_tokens)
        return not self._is_carried(cell) and self._runner.has_room(shortest)

    def _is_carried(self, cell: Cell) -> bool:
        """True if the published scan takes this cell's start from a cell that has no answer yet."""
        if self._question.method != "linear":
            return False
        before = self._waiting[: self._waiting.index(cell)]
        unanswered = [*(search.cell for search in self._open), *before]
        return any(precedes(other, cell) for other in unanswered)

    def _begin(self, cell: Cell) -> Iterator[SearchEvent]:
        """Start the search of a cell, or take its recorded answer."""
        self._waiting.remove(cell)
        known = self._past(cell)
        if known.answer is None:
            first = self._first_index(cell)
            search = CellSearch(
                *(self._question, cell, first, known, self._may_start, self._timeout_s),
                begins_shortest=self._begins_shortest,
            )
            self._open.append(search)
            return
        for trial in known.trials:  # listeners still hear of every recorded trial
            if trial.result is not None:
                yield _finished(trial, cell, trial.result, is_recorded=True)
        self._finished.append(known.answer)
        yield CellAnswered(answer=known.answer)

    def _may_start(self, asked: NextTrial) -> bool:
        """True if a launch has a recorded result, or enough time is left for it."""
        if self._recorded(asked) is not None:
            return True
        return not self._is_cut and self._has_time(asked)

    def _first_index(self, cell: Cell) -> int | None:
        """Return the grid index at which a cell's search begins; None: the shortest length."""
        question, expected_tokens = self._question, self._expected(cell)
        if question.method == "linear":
            return carried_start(question, cell, self._finished)
        if expected_tokens is not None:
            return question.grid.index_at_most(expected_tokens)
        return first_index(question, cell, self._finished, self._line_of)

    def _await(self) -> Iterator[TrialRuns]:
        """Wait until a trial ends; on timeout yield the phase of each running trial instead."""
        assert self._in_flight, "a runner has room for a trial where none runs"  # noqa: S101
        futures = [flight.future for flight in self._in_flight]
        if wait(futures, timeout=TOLD_S, return_when=FIRST_COMPLETED).done:
            return
        for flight in self._in_flight:
            asked = flight.asked
            yield TrialRuns(cell=asked.cell, spec=asked.spec, phase=flight.phase)

    def _trials_left(self, started: CellSearch) -> int:
        """Estimated number of trials until all cells are answered, without the running ones."""
        flying = {id(flight.search) for flight in self._in_flight} | {id(started)}
        here = (
            max(0, search.trials_left - 1) if id(search) in flying else search.trials_left
            for search in self._open
        )
        done = [answer.trials for answer in self._finished]
        usual = _TRIALS_OF_A_CELL + 3 * self._question.confirm
        each = sum(done) / len(done) if done else usual
        return sum(here) + round(len(self._waiting) * each)


def _finished(
    launched: NextTrial | RecordedTrial, cell: Cell, result: TrialResult, *, is_recorded: bool
) -> TrialFinished:
    return TrialFinished(
        cell=cell,
        spec=launched.spec,
        attempt=launched.attempt,
        repeat=launched.repeat,
        result=result,
        is_recorded=is_recorded,
    )


def recorded_search(
    question: Question,
    runner: Runner,
    journal: Journal,
    *,
    expectation: Callable[[Cell], Expectation | None] = lambda _: None,
    **named: Any,
) -> Iterator[SearchEvent]:
    """Search like ``search_cells``, with the same arguments, and write each event to the journal
    before it is yielded; before a cell's first trial also its predicted length.

    If the search is interrupted, the journal has the start of a trial without its end, and that
    trial runs again on resume. Raises MachineError when the disk is full.
    """

    def recorded(asked: NextTrial) -> TrialResult | None:
        return journal.recorded(asked.spec, attempt=asked.attempt, repeat=asked.repeat)

    known: dict[str, Any] = {"past": journal.past, "recorded": recorded}
    for event in search_cells(question, runner, **(known | named)):
        if isinstance(event, TrialStarted) and journal.takes_expectation(event.cell):
            predicted = expectation(event.cell)
            if predicted is not None:
                journal.cell_expected(predicted)
        match event:
            case TrialStarted():
                # Written before the trial begins: if it crashes the machine, the journal names it.
                journal.trial_started(event.spec, attempt=event.attempt, repeat=event.repeat)
            case TrialFinished(is_recorded=False):
                journal.trial_finished(
                    event.spec, attempt=event.attempt, repeat=event.repeat, result=event.result
                )
            case CellAnswered():
                journal.cell_answered(event.answer)
            case _:
                pass
        yield event
