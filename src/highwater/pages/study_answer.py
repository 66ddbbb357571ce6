"""The answer of a study in a sentence or two, before its table: how long, where, with which
settings, what is left, how fast; and, before a search starts, what it is about to try.
"""

from collections.abc import Sequence
from functools import partial

from highwater.model.footprint import host_state_bytes
from highwater.nouns.plan import Plan
from highwater.nouns.settings import settings_in_words
from highwater.nouns.study import RANK_WORDS, Cell, CellAnswer, Question, Study
from highwater.pages.text import plain
from highwater.search.budget import CellOutlook, expected_s, outlook
from highwater.units import format_bytes, format_seconds, format_tokens


def study_answer(study: Study) -> str:
    """How far the model trains, by what trials found so far."""
    question = study.question
    answer = max(study.answers, key=_reach, default=None)
    unanswered = [cell for cell in question.cells if study.answer_of(cell) is None]
    so_far = {cell: study.longest_fit_tokens(cell, None) or 0 for cell in unanswered}
    unfinished = max(unanswered, key=lambda cell: so_far[cell], default=None)
    if unfinished is not None and so_far[unfinished] > (0 if answer is None else _reach(answer)):
        return _at_least(study, unfinished, so_far[unfinished])
    if answer is None or answer.reach_tokens is None:
        return f"Not known yet: no trial of {plain(question.model.name)} told what fits."
    if answer.reach_tokens == 0:
        return _nothing(study)
    return f"{_found(question, answer)}{_simplest(study, answer)}"


def _found(question: Question, answer: CellAnswer) -> str:
    """The longest length, what proves it, and what is known of it."""
    model, reach = plain(question.model.name), answer.reach_tokens or 0
    where = f"on {_place(question, answer.cell)}, {question.figures}"
    how = _how(question, answer.cell, reach)
    proof, end, left = answer.memory_only, _end(answer), partial(_left, question)
    if proof is None:
        more = _sentence(left(answer.headroom_bytes), _speed(answer), end)
        return f"{model} trains up to {format_tokens(reach)} tokens {where}, with {how}.{more}"
    trained = "no length was trained in full"
    if answer.capacity_tokens:
        trained = f"trained in full was {format_tokens(answer.capacity_tokens)}"
        trained += f", at {_speed(answer)}" if _speed(answer) else ""
    return (
        f"Memory holds {model} at {format_tokens(reach)} tokens {where} by memory-only trials, "
        f"with {how}; {trained}.{_sentence(left(proof.headroom_bytes), end)}"
    )


def _nothing(study: Study) -> str:
    question = study.question
    cell = question.cells[-1]
    shortest = format_tokens(question.grid.length(1))
    left = len(question.cells) - len(study.answers)
    others = f" {left} of {len(question.cells)} searches are not finished." if left else ""
    return (
        f"No: {plain(question.model.name)} does not train at {shortest} tokens on "
        f"{_place(question, cell)}, {question.figures}, with any of the settings tried."
        f"{others}"
    )


def _at_least(study: Study, cell: Cell, length_tokens: int) -> str:
    question = study.question
    failed = (
        trial.spec.length_tokens
        for trial in study.trials_of(cell)
        if trial.result is not None and trial.result.outcome.is_memory
    )
    above = min((length for length in failed if length > length_tokens), default=None)
    end = "" if above is None else f", and does not at {format_tokens(above)}"
    return (
        f"{plain(question.model.name)} fits at {format_tokens(length_tokens)} tokens{end}, on "
        f"{_place(question, cell)}, {question.figures}, with "
        f"{_how(question, cell, length_tokens)}; the search in between is not finished."
    )


def _simplest(study: Study, best: CellAnswer) -> str:
    """Say what the simplest settings reach in the same layout, where that is less."""
    for cell in study.question.cells:
        plainest = study.answer_of(cell)
        if cell.layout == best.cell.layout and plainest is not None and plainest.reach_tokens:
            if cell == best.cell or plainest.reach_tokens >= (best.reach_tokens or 0):
                return ""
            how = settings_in_words(cell.settings, cell.layout)
            return f" With {how} {format_tokens(plainest.reach_tokens)}."
    return ""


def _how(question: Question, cell: Cell, length_tokens: int) -> str:
    """Settings and degrees in words, and YaRN where positions are scaled."""
    on_host = host_state_bytes(question.model.shape, cell.settings, layout=cell.layout)
    is_ours = question.foreign is None  # another trainer scales positions as it likes
    is_scaled = is_ours and length_tokens > question.model.shape.native_length_tokens
    return settings_in_words(cell.settings, cell.layout, host_bytes=on_host, is_scaled=is_scaled)


def _place(question: Question, cell: Cell) -> str:
    count, budget_bytes = cell.layout.gpus, question.memory_budget_bytes
    if question.device == "cpu":
        where = f"{count} {RANK_WORDS['cpu'][count != 1]} on the CPU"
    else:
        where = f"{count} x {plain(question.device_name)}"
    if budget_bytes is not None:
        where += f" with {format_bytes(budget_bytes)}"
    return where if question.foreign is None else f"{where} by {question.foreign.title}"


def _left(question: Question, headroom_bytes: int | None) -> str:
    each = RANK_WORDS[question.device][0]
    if headroom_bytes is None:
        return ""
    if headroom_bytes < 0:  # of a trainer that is bounded in part
        over = f"{format_bytes(-headroom_bytes)} more of each {each} was taken"
        return f"{over} than it was given, outside PyTorch's allocator"
    return f"{format_bytes(headroom_bytes)} of each {each} is left"


def _speed(answer: CellAnswer) -> str:
    return "" if answer.tokens_per_s is None else f"{answer.tokens_per_s:,.0f} tokens/s"


def _end(answer: CellAnswer) -> str:
    """Say what ended the search above the longest length."""
    if answer.does_not_fit_tokens is not None:
        return f"{format_tokens(answer.does_not_fit_tokens)} ran out of memory"
    return {
        "ceiling": "no longer length was tried",
        "time": "longer ones take too long to tell",
    }.get(answer.limit, "trials of longer ones only crashed")


def _sentence(*parts: str) -> str:
    said = "; ".join(part for part in parts if part)
    return f" {said[0].upper()}{said[1:]}." if said else ""


def _reach(answer: CellAnswer) -> int:
    return -1 if answer.reach_tokens is None else answer.reach_tokens


_MOST_LINES = 12
"""Cells that are told one by one."""
_LONGER = 4
"""Times the budget that is offered where more is wanted."""


def outlook_lines(planned: Plan, *, is_resumed: bool) -> tuple[str, ...]:
    """Say what is about to be tried; nothing for a search that trains nothing and takes no time.
    ``is_resumed``: recorded trials take no time, and are counted here all the same.
    """
    question = planned.question
    if question.simulated:
        return ()
    cells = outlook(question, planned.timeout_s)
    lines = [f"{_begun(planned, cells)}{' (less what is recorded)' if is_resumed else ''}"]
    lines += [f"  {_of_cell(question, cell)}" for cell in cells[:_MOST_LINES]]
    more = len(cells) - _MOST_LINES
    return (*lines, *([f"  and {more} more"] if more > 0 else []))


def _begun(planned: Plan, cells: Sequence[CellOutlook]) -> str:
    """How many searches there are, how long they take, and how long they may."""
    what, in_all_s = f"{len(cells)} search{'' if len(cells) == 1 else 'es'}", expected_s(cells)
    takes = (
        f"nobody knows beforehand how long a trial takes on {plain(planned.question.device_name)}"
        if in_all_s is None
        else f"about {format_seconds(in_all_s)} in all"
    )
    in_full = ""
    if planned.question.proof == "memory":
        in_full = (
            f"; a length whose trial would take more than {format_seconds(planned.timeout_s)} in "
            "full is proven by a memory-only trial"
        )
    if planned.budget_s is None:
        return f"{what}, {takes}{in_full}"
    more = f"`--budget {_LONGER * planned.budget_s / 60:.0f}m` gives more"
    ends = f"ends after {format_seconds(planned.budget_s)} at the latest, {more}"
    return f"{what}, {takes}; {ends}{in_full}"


def _of_cell(question: Question, cell: CellOutlook) -> str:
    how = ""
    if question.proof == "memory" and cell.edge_s is not None:
        how = ", memory-only" if cell.memory_only else ", in full"
    full = "" if cell.full_tokens is None else f", then {format_tokens(cell.full_tokens)} in full"
    takes = "" if cell.expected_s is None else f": about {format_seconds(cell.expected_s)}"
    name = cell.cell.label_on(question.device)
    return f"{name}: from {format_tokens(cell.first_tokens)} tokens{how}{full}{takes}"
