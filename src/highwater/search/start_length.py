"""Start lengths: which length to try first in a cell, from the cells that are finished.

A start length orders trials and decides nothing. The memory of a GPU is taken up by the states
(known: 16 bytes a parameter, sharded), by something fixed, and by tokens:

    memory = states + fixed + bytes_per_token x tokens per GPU

The two unknowns start from the trainer's line. Each finished cell says that the line reaches the
memory between the tokens that fit and those that did not; where it does not, it is moved just
enough to meet the middle (successive projection, Agmon and Motzkin, 1954). Cells of the same rung
come last and so weigh the most. The published A100 table takes 246 trials this way, of which 224
are inevitable.
"""

from collections.abc import Sequence

from highwater.model.footprint import device_state_bytes
from highwater.nouns.grid import Grid
from highwater.nouns.study import Cell, CellAnswer, Question
from highwater.search.memory_line import MemoryLine, MemoryLineOf, trainer_line

_FIXED_DOUBT = 0.1
"""How far the fixed part of a line may be off at first, as a share of the memory."""
_TOKEN_DOUBT = 0.3
"""How far a token's bytes may be off at first, as a share of them.

The two doubts only say which of the two to move more.
"""
_PASSES = 3
"""Times that the finished cells are gone through.

Later ones may undo a little of what earlier ones taught.
"""


def first_index(
    question: Question,
    cell: Cell,
    finished: Sequence[CellAnswer],
    line_of: MemoryLineOf = trainer_line,
) -> int | None:
    """The index of the grid to try first, at least 1; None when the memory is unknown.

    It is the index i nearest to the expected longest length. After it the bracket tries i + 1 if it
    fits, else i - 1: the answer takes the least, two trials, for a capacity of i and for one of i -
    1.
    """
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if cell.settings.token_budget_tokens is not None:
        return question.size_of(cell)  # whatever the length, a micro-batch has about as many tokens
    if memory_bytes is None:
        return None
    usable_bytes = memory_bytes - question.margin_bytes
    line = _learned_line(question, cell, finished, usable_bytes, line_of)
    room_bytes = usable_bytes - _states_bytes(question, cell) - line.fixed_bytes
    tokens_per_gpu = room_bytes / line.bytes_per_token
    return _nearest_index(question.grid, tokens_per_gpu / _tokens_per_gpu(cell, 1))


def carried_start(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """The index at which the published scan starts a cell.

    It is the longest capacity of this rung on fewer GPUs at this SP, or at less SP on as many; None
    when there is none: the scan starts at the start length. Source: Trinity-RFT,
    search_context_length_capacity.py.
    """
    smaller = (answer.reach_tokens or 0 for answer in finished if precedes(answer.cell, cell))
    longest = max(smaller, default=0)
    return question.grid.index_at_most(longest) if longest else None


def _learned_line(
    question: Question,
    cell: Cell,
    finished: Sequence[CellAnswer],
    usable_bytes: int,
    line_of: MemoryLineOf,
) -> MemoryLine:
    """The trainer's line, moved to agree with the finished cells.

    First come the cells of other rungs where a token costs the same, then those of this rung.
    """
    line = before = line_of(question, cell, usable_bytes)
    rung = [answer for answer in finished if answer.cell.settings == cell.settings]
    kin = [
        answer
        for answer in finished
        if answer not in rung
        and _are_kin(answer.cell, cell)
        and line_of(question, answer.cell, usable_bytes) == before
    ]
    for answers in (kin, rung):
        for answer in _PASSES * answers:
            taken_bytes = usable_bytes - _states_bytes(question, answer.cell)
            line = _moved(line, before, taken_bytes, usable_bytes, answer)
    return line


def _moved(
    line: MemoryLine, line_of: MemoryLine, taken_bytes: float, usable_bytes: int, answer: CellAnswer
) -> MemoryLine:
    """The line, moved to take ``taken_bytes`` in the middle between what fit and what did not.

    A line that does so anywhere in between stays as it is.
    """
    fit_tokens = _tokens_per_gpu(answer.cell, answer.reach_tokens or 0)
    failed_tokens = None
    if answer.does_not_fit_tokens:
        failed_tokens = _tokens_per_gpu(answer.cell, answer.does_not_fit_tokens)
    too_steep = fit_tokens > 0 and line.at(fit_tokens) > taken_bytes
    too_flat = failed_tokens is not None and line.at(failed_tokens) < taken_bytes
    if not (too_steep or too_flat):
        return line
    tokens = fit_tokens if failed_tokens is None else (fit_tokens + failed_tokens) / 2
    missing_bytes = taken_bytes - line.at(tokens)
    fixed_weight = (_FIXED_DOUBT * usable_bytes) ** 2
    token_weight = (_TOKEN_DOUBT * line_of.bytes_per_token) ** 2
    step = missing_bytes / (fixed_weight + token_weight * tokens**2)
    # Contradicting cells must not turn the line around: a token always costs something.
    moved = line.bytes_per_token + step * token_weight * tokens
    bytes_per_token = max(moved, line_of.bytes_per_token / 10)
    return MemoryLine(line.fixed_bytes + step * fixed_weight, bytes_per_token)


def _are_kin(one: Cell, other: Cell) -> bool:
    """Whether a token costs about the same in both cells, as far as no line tells otherwise.

    Where the states live changes it little.
    """
    mine, theirs = one.settings, other.settings
    return (mine.holds_logits, mine.recompute) == (theirs.holds_logits, theirs.recompute)


def _states_bytes(question: Question, cell: Cell) -> float:
    states = device_state_bytes(question.model.shape, cell.settings, device=question.device)
    return states / cell.layout.shard_degree


def _tokens_per_gpu(cell: Cell, length_tokens: int) -> float:
    return length_tokens * cell.settings.sequences_per_micro_batch / cell.layout.context_degree


def _nearest_index(grid: Grid, length_tokens: float) -> int:
    below = min(grid.index_at_most(int(length_tokens)), grid.size)
    if below < 1:
        return 1
    nearer_to_next = length_tokens - grid.length(below) >= grid.length(below + 1) - length_tokens
    return min(below + nearer_to_next, grid.size)


def precedes(earlier: Cell, cell: Cell) -> bool:
    """Whether, as the published scan believes, ``earlier`` never has the longer capacity.

    Its answer is where ``cell`` begins.
    """
    if earlier.settings != cell.settings:
        return False
    sp, gpus = earlier.layout.context_degree, earlier.layout.gpus
    fewer_gpus = sp == cell.layout.context_degree and gpus < cell.layout.gpus
    less_sp = gpus == cell.layout.gpus and sp < cell.layout.context_degree
    return fewer_gpus or less_sp
