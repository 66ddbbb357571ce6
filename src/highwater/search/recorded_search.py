"""A search with a journal as its memory.

What the journal has is taken from it; the rest is run, and every event is on the disk before
anything follows from it. To resume a search is to ask it again.
"""

from collections.abc import Callable, Iterator
from typing import Any

from highwater.nouns.protocols import Runner
from highwater.nouns.study import Cell, Expectation, Question
from highwater.nouns.trial import TrialResult
from highwater.search.cell_search import NextTrial
from highwater.search.scheduler import search_cells
from highwater.search.search_events import CellAnswered, SearchEvent, TrialFinished, TrialStarted
from highwater.store.journal import Journal


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
