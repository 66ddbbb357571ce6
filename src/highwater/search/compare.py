"""Compare: how many trials each search method needs for the same answers.

The capacity tables are known. Every method really asks a runner, trial by trial: usually a
simulated one that answers from the table. The published scan is Trinity-RFT's: upwards, one step at
a time, each cell from the longest length that a smaller cell of its rung reached.
"""

from collections.abc import Sequence

import msgspec

from highwater.search.memory_line import unknown_trainer_line
from highwater.search.scheduler import search_cells
from highwater.search.search_events import CellAnswered
from highwater.search.start_length import carried_start
from highwater.spec.codec import Record
from highwater.spec.protocols import Launch, Runner
from highwater.spec.study import Cell, CellAnswer, Method, Question
from highwater.spec.trial import Outcome


class MethodCount(Record, frozen=True, kw_only=True):
    """The trials that one method took."""

    method: str
    trials: int
    trials_by_model: dict[str, int]
    differing_cells: tuple[str, ...]
    """Cells whose capacity is not the one that ``highwater, bisect`` found; empty where all are."""


def compare(questions: Sequence[Question], runner: Runner) -> tuple[MethodCount, ...]:
    """Count the trials of each method for the same questions: the published scan first, ours last.

    ``floor`` runs nothing: an honest answer takes the trial that fits and the one above it that
    does not, or only the latter.
    """
    ours = [_search(question, runner, "bisect") for question in questions]
    scans, carried = (
        [_published_scan(question, runner, carry=carry) for question in questions]
        for carry in (False, True)
    )
    methods = {
        "published scan": scans,
        "published scan, carried start": carried,
        "highwater, linear": [_search(question, runner, "linear") for question in questions],
        "floor": [[_with_fewest_trials(answer) for answer in answers] for answers in ours],
        "highwater, bisect": ours,
    }
    return tuple(_count(method, questions, answers, ours) for method, answers in methods.items())


def _search(question: Question, runner: Runner, method: Method) -> list[CellAnswer]:
    asked = msgspec.structs.replace(question, method=method)
    return [
        event.answer
        for event in search_cells(asked, runner, line_of=unknown_trainer_line)
        if isinstance(event, CellAnswered)
    ]


def _published_scan(question: Question, runner: Runner, *, carry: bool) -> list[CellAnswer]:
    """Run Trinity-RFT's search, which believes its carried start.

    Where that start fails, it reports that nothing fits.
    """
    answers: list[CellAnswer] = []
    for cell in question.cells:
        first = (carried_start(question, cell, answers) if carry else None) or 1
        index = first
        while index <= question.grid.size and _fits(question, cell, index, runner):
            index += 1
        has_failed = index <= question.grid.size
        answers.append(
            CellAnswer(
                cell=cell,
                capacity_tokens=question.grid.length(index - 1) if index > first else 0,
                does_not_fit_tokens=question.grid.length(index) if has_failed else None,
                limit="memory" if has_failed else "ceiling",
                reason="published scan",
                trials=min(index, question.grid.size) - first + 1,
            )
        )
    return answers


def _fits(question: Question, cell: Cell, index: int, runner: Runner) -> bool:
    launch = Launch(spec=question.trial(cell, question.grid.length(index)))
    return runner.submit(launch).result().outcome is Outcome.FIT


def _with_fewest_trials(answer: CellAnswer) -> CellAnswer:
    fewest = bool(answer.capacity_tokens) + (answer.does_not_fit_tokens is not None)
    return msgspec.structs.replace(answer, trials=fewest)


def _count(
    method: str,
    questions: Sequence[Question],
    answers: Sequence[Sequence[CellAnswer]],
    expected: Sequence[Sequence[CellAnswer]],
) -> MethodCount:
    by_model: dict[str, int] = {}
    differing: list[str] = []
    for question, found, right in zip(questions, answers, expected, strict=True):
        name = question.model.name
        by_model[name] = by_model.get(name, 0) + sum(answer.trials for answer in found)
        pairs = zip(found, right, strict=True)
        differing += [
            f"{name}, {a.cell.label}" for a, b in pairs if a.capacity_tokens != b.capacity_tokens
        ]
    return MethodCount(
        method=method,
        trials=sum(by_model.values()),
        trials_by_model=by_model,
        differing_cells=tuple(differing),
    )
