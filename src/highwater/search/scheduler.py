"""Searches of cells, several at a time, with a journal as their memory.

Each cell has one trial at a time, and cells are searched side by side as far as the runner has
room, in their order. An event is yielded before and after every trial and after every cell, all in
one thread, so that a record of them has one order: every event is on the disk before anything
follows from it, and to resume a search is to ask it again.

``may_start`` is asked before each trial that is not recorded. A full trial after the edge is left
out where it says no; a cell whose edge is still to be found is left, and the search ends with
``BudgetSpentError`` when no other cell is open.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from highwater.nouns.protocols import TOLD_S, Launch, Runner
from highwater.nouns.study import Cell, CellAnswer, Expectation, Past, Question, RecordedTrial
from highwater.nouns.trial import TrialResult, kept_result
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
"""Trials that a cell is taken to need while none is finished."""

Recorded = Callable[[NextTrial], TrialResult | None]
"""The result of a launch that is recorded; None for one that has to be run."""


class BudgetSpentError(Exception):
    """The time that the search was given is over, or too short for the next trial."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A trial that runs."""

    search: CellSearch
    asked: NextTrial
    phase: str = "starting"
    future: Future[TrialResult] = field(default_factory=Future[TrialResult])

    def hear(self, phase: str) -> None:
        """Keep what it is doing, which another thread tells."""
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
    """Answer every cell of ``question``, begun in its order or in another; ends with the answer of
    the last one.

    ``line_of`` is the memory line of the trainer that ``runner`` starts. ``expected`` is the
    longest length in tokens that a cell is predicted to train, 0 for none, None where nobody knows.
    Both order the trials and decide nothing. ``past`` is what is recorded of a cell, and
    ``recorded`` the result of one launch, which is then not run. ``timeout_s`` is the longest time
    of a full trial, where lengths that are predicted to take longer are to be left out.
    ``begins_shortest``: each cell begins with the shortest length, and goes on where it is expected
    to end.

    Raises BudgetSpentError at the end where ``may_start`` left a cell without its edge, or where a
    trial of it raised that. MachineError and whatever else a trial raises pass through, when those
    that ended beside it have been told; who closes the runner ends the others.
    """
    search = _Search(
        question, runner, line_of, expected, past, recorded, may_start, timeout_s, begins_shortest
    )
    yield from search.run(question.cells if order is None else order)


@dataclass(slots=True, eq=False)
class _Search:
    """The cells of a question: those that wait, those that are open, and those that are done."""

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
    """Whether the time of a trial was too short: no other is started after it."""
    _is_spent: bool = False
    """Whether a cell was left without its answer."""
    _waiting: list[Cell] = field(default_factory=list[Cell])
    _open: list[CellSearch] = field(default_factory=list[CellSearch])
    """Searches that began and have no answer, in the order in which they began."""
    _in_flight: list[_InFlight] = field(default_factory=list[_InFlight])
    _finished: list[CellAnswer] = field(default_factory=list[CellAnswer])

    def run(self, cells: Sequence[Cell]) -> Iterator[SearchEvent]:
        """Search cells until each has its answer, or no time for one."""
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
        """The first open search that can go on now."""
        flying = {id(flight.search) for flight in self._in_flight}
        idle = (search for search in self._open if id(search) not in flying)
        return next(filter(self._can_move, idle), None)

    def _can_move(self, search: CellSearch) -> bool:
        asked = search.ask()
        if asked is None or self._recorded(asked) is not None:
            return True
        return self._runner.has_room(asked.spec)

    def _move(self, search: CellSearch) -> Iterator[SearchEvent]:
        """Close a search that is done, or take its next trial: recorded, or started."""
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
        """Tell of the trials that ended; what one of them raised is raised after that."""
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
        """Whether a cell is answered already, or its search would find room."""
        if self._past(cell).answer is not None:
            return True
        shortest = self._question.trial(cell, self._question.grid.start_tokens)
        return not self._is_carried(cell) and self._runner.has_room(shortest)

    def _is_carried(self, cell: Cell) -> bool:
        """Whether the published scan begins a cell with the answer of one that is still open."""
        if self._question.method != "linear":
            return False
        before = self._waiting[: self._waiting.index(cell)]
        unanswered = [*(search.cell for search in self._open), *before]
        return any(precedes(other, cell) for other in unanswered)

    def _begin(self, cell: Cell) -> Iterator[SearchEvent]:
        """Open the search of a cell, or take its answer as it is recorded."""
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
        for trial in known.trials:  # for whoever listens
            if trial.result is not None:
                yield _finished(trial, cell, trial.result, is_recorded=True)
        self._finished.append(known.answer)
        yield CellAnswered(answer=known.answer)

    def _may_start(self, asked: NextTrial) -> bool:
        """Whether a launch is recorded, or there is time for it."""
        if self._recorded(asked) is not None:
            return True
        return not self._is_cut and self._has_time(asked)

    def _first_index(self, cell: Cell) -> int | None:
        """The index at which the search of a cell begins; None for the shortest length."""
        question, expected_tokens = self._question, self._expected(cell)
        if question.method == "linear":
            return carried_start(question, cell, self._finished)
        if expected_tokens is not None:
            return question.grid.index_at_most(expected_tokens)
        return first_index(question, cell, self._finished, self._line_of)

    def _await(self) -> Iterator[TrialRuns]:
        """Wait for the end of a trial, and tell what those that run are doing."""
        assert self._in_flight, "a runner has room for a trial where none runs"  # noqa: S101
        futures = [flight.future for flight in self._in_flight]
        if wait(futures, timeout=TOLD_S, return_when=FIRST_COMPLETED).done:
            return
        for flight in self._in_flight:
            asked = flight.asked
            yield TrialRuns(cell=asked.cell, spec=asked.spec, phase=flight.phase)

    def _trials_left(self, started: CellSearch) -> int:
        """About how many trials the question takes besides those that run."""
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
    """Search as ``search_cells`` does, with its arguments, and record each event before it is told;
    before the first trial of a cell also what is predicted of it.

    Where the search is interrupted the journal keeps the start of a trial without an end, and it is
    run again on resume. Raises MachineError when the disk is full.
    """

    def recorded(asked: NextTrial) -> TrialResult | None:
        return journal.recorded(asked.spec, attempt=asked.attempt, repeat=asked.repeat)

    known: dict[str, Any] = {"past": journal.past, "recorded": recorded}
    for event in search_cells(question, runner, **(known | named)):
        if isinstance(event, TrialStarted) and journal.takes_expectation(event.cell):
            predicted = expectation(event.cell)
            if predicted is not None:
                journal.cell_expected(predicted)
        _record(event, journal)
        yield event


def _record(event: SearchEvent, journal: Journal) -> None:
    match event:
        case TrialStarted():
            # On the disk before the trial begins: a crash of the machine leaves its name.
            journal.trial_started(event.spec, attempt=event.attempt, repeat=event.repeat)
        case TrialFinished(is_recorded=False):
            journal.trial_finished(
                event.spec, attempt=event.attempt, repeat=event.repeat, result=event.result
            )
        case CellAnswered():
            journal.cell_answered(event.answer)
        case _:
            return
