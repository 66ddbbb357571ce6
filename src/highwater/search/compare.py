"""Compare: how many trials each search method needs for the same answers, on capacity tables that are known.

Every method really asks a runner, trial by trial: usually a simulated one that answers from the table. The published scan is
Trinity-RFT's: upwards, one step at a time, each cell from the longest length that a smaller cell of its rung reached.
"""

from collections.abc import Sequence

import msgspec

from highwater.search.campaign import CellAnswered, campaign
from highwater.search.guess import unknown_trainer_guess
from highwater.search.ordering import carried_start
from highwater.spec.codec import Noun
from highwater.spec.protocols import Runner
from highwater.spec.study import Cell, CellAnswer, Method, Question
from highwater.spec.trial import Outcome


class MethodCount(Noun, frozen=True, kw_only=True):
    """What one method took."""

    method: str
    trials: int
    trials_by_model: dict[str, int]
    differing_cells: tuple[str, ...]
    """Cells whose capacity is not the one that ``highwater, bisect`` found; empty when the methods agree."""


def compare(questions: Sequence[Question], runner: Runner) -> tuple[MethodCount, ...]:
    """The trials that each method takes for the same questions: the published scan's first, ours last.

    ``floor`` runs nothing: an honest answer takes the trial that fits and the one above it that does not, or only the latter.
    """
    ours = [_search(question, runner, "bisect") for question in questions]
    methods = {
        "published scan": [_published_scan(question, runner, carry=False) for question in questions],
        "published scan, carried start": [_published_scan(question, runner, carry=True) for question in questions],
        "highwater, linear": [_search(question, runner, "linear") for question in questions],
        "floor": [[_with_fewest_trials(answer) for answer in answers] for answers in ours],
        "highwater, bisect": ours,
    }
    return tuple(_count(method, questions, answers, ours) for method, answers in methods.items())


def _search(question: Question, runner: Runner, method: Method) -> list[CellAnswer]:
    asked = msgspec.structs.replace(question, method=method)
    return [event.answer for event in campaign(asked, runner, guess=unknown_trainer_guess) if isinstance(event, CellAnswered)]


def _published_scan(question: Question, runner: Runner, *, carry: bool) -> list[CellAnswer]:
    """Trinity-RFT's search, which believes its carried start: where that fails, it reports that nothing fits."""
    answers: list[CellAnswer] = []
    for cell in question.cells:
        first = (carried_start(question, cell, answers) if carry else None) or 1
        index = first
        while index <= question.grid.size and _fits(question, cell, index, runner):
            index += 1
        answers.append(
            CellAnswer(
                cell=cell,
                capacity_tokens=question.grid.length(index - 1) if index > first else 0,
                does_not_fit_tokens=question.grid.length(index) if index <= question.grid.size else None,
                limit="memory" if index <= question.grid.size else "ceiling",
                reason="published scan",
                trials=min(index, question.grid.size) - first + 1,
            )
        )
    return answers


def _fits(question: Question, cell: Cell, index: int, runner: Runner) -> bool:
    return runner.run(question.trial(cell, question.grid.length(index))).outcome is Outcome.FIT


def _with_fewest_trials(answer: CellAnswer) -> CellAnswer:
    fewest = bool(answer.capacity_tokens) + (answer.does_not_fit_tokens is not None)
    return msgspec.structs.replace(answer, trials=fewest)


def _count(
    method: str, questions: Sequence[Question], answers: Sequence[Sequence[CellAnswer]], expected: Sequence[Sequence[CellAnswer]]
) -> MethodCount:
    by_model: dict[str, int] = {}
    differing: list[str] = []
    for question, found, right in zip(questions, answers, expected, strict=True):
        name = question.model.name
        by_model[name] = by_model.get(name, 0) + sum(answer.trials for answer in found)
        pairs = zip(found, right, strict=True)
        differing += [f"{name}, {a.cell.label}" for a, b in pairs if a.capacity_tokens != b.capacity_tokens]
    return MethodCount(method=method, trials=sum(by_model.values()), trials_by_model=by_model, differing_cells=tuple(differing))
