"""What a search is about to try, before it starts: where each cell begins, whether in full or
memory-only, and how long that is expected to take.
"""

from collections.abc import Sequence

from highwater.nouns.plan import Plan
from highwater.nouns.study import Question
from highwater.pages.text import plain
from highwater.search.outlook import CellOutlook, expected_s, outlook
from highwater.units import format_seconds, format_tokens

_MOST_LINES = 12
"""Cells that are told one by one."""
_LONGER = 4
"""Times the budget that is offered where more is wanted."""


def outlook_lines(planned: Plan, *, is_resumed: bool) -> tuple[str, ...]:
    """What is about to be tried; nothing of a search that trains nothing and takes no time.

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
