"""Ordering: which length to try first in a cell, from the cells that are finished. It orders trials and decides nothing.

The memory of a GPU is taken up by the states (known: 16 bytes a parameter, sharded), by something fixed, and by tokens:

    memory = states + fixed + bytes_per_token x tokens per GPU

The two unknowns start from the trainer's guess. Each finished cell says that the line reaches the memory between the tokens that
fit and those that did not; where the line does not, it is moved just enough to meet the middle (successive projection,
Agmon and Motzkin, 1954). Cells of the same rung come last and so weigh the most.
The published A100 table takes 246 trials this way, of which 224 are inevitable.
"""

from collections.abc import Sequence

from highwater.search.guess import Guess, Line, engine_guess
from highwater.spec.footprint import device_state_bytes
from highwater.spec.study import Cell, CellAnswer, Grid, Question

_FIXED_DOUBT = 0.1
"""How far the guess of what is fixed may be off, as a share of the memory."""
_TOKEN_DOUBT = 0.3
"""How far the guess of a token's bytes may be off, as a share of it. The doubts only say which of the two to move more."""
_PASSES = 3
"""Times that the finished cells are gone through: later ones may undo a little of what earlier ones taught."""


def first_index(question: Question, cell: Cell, finished: Sequence[CellAnswer], guess: Guess = engine_guess) -> int | None:
    """The index of the grid to try first, at least 1; None when the memory is unknown.

    The index i nearest to the expected longest length. After it the bracket tries i + 1 if it fits, else i - 1: the answer
    takes the least, two trials, for a capacity of i and for one of i - 1.
    """
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if cell.settings.token_budget_tokens is not None:
        return question.size_of(cell)  # whatever the length, a micro-batch has about as many tokens
    if memory_bytes is None:
        return None
    usable_bytes = memory_bytes - question.margin_bytes
    line = _learned_line(question, cell, finished, usable_bytes, guess)
    room_bytes = usable_bytes - _states_bytes(question, cell) - line.fixed_bytes
    tokens_per_gpu = room_bytes / line.bytes_per_token
    return _nearest_index(question.grid, tokens_per_gpu / _tokens_per_gpu(cell, 1))


def carried_start(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """Where the published scan starts a cell: the longest capacity of this rung on fewer GPUs at this SP, or at less SP here.

    None when there is none: the scan starts at the start length. Source: Trinity-RFT, search_context_length_capacity.py.
    """
    starts = [answer.reach_tokens for answer in finished if answer.reach_tokens and _precedes(answer.cell, cell)]
    return question.grid.index_at_most(max(starts)) if starts else None


def _learned_line(question: Question, cell: Cell, finished: Sequence[CellAnswer], usable_bytes: int, guess: Guess) -> Line:
    """The guess, moved to agree with the finished cells of other rungs where a token costs the same, then of this rung."""
    line = guessed = guess(question, cell, usable_bytes)
    rung = [answer for answer in finished if answer.cell.settings == cell.settings]
    kin = [
        answer
        for answer in finished
        if answer not in rung and _are_kin(answer.cell, cell) and guess(question, answer.cell, usable_bytes) == guessed
    ]
    for answers in (kin, rung):
        for answer in _PASSES * answers:
            taken_bytes = usable_bytes - _states_bytes(question, answer.cell)
            line = _moved(line, guessed, taken_bytes, usable_bytes, answer)
    return line


def _moved(line: Line, guess: Line, taken_bytes: float, usable_bytes: int, answer: CellAnswer) -> Line:
    """The line, moved to take ``taken_bytes`` in the middle between what fit and what did not; as it is if it does in between."""
    fit_tokens = _tokens_per_gpu(answer.cell, answer.reach_tokens or 0)
    failed_tokens = _tokens_per_gpu(answer.cell, answer.does_not_fit_tokens) if answer.does_not_fit_tokens else None
    too_steep = fit_tokens > 0 and line.at(fit_tokens) > taken_bytes
    too_flat = failed_tokens is not None and line.at(failed_tokens) < taken_bytes
    if not (too_steep or too_flat):
        return line
    tokens = fit_tokens if failed_tokens is None else (fit_tokens + failed_tokens) / 2
    missing_bytes = taken_bytes - line.at(tokens)
    fixed_weight = (_FIXED_DOUBT * usable_bytes) ** 2
    token_weight = (_TOKEN_DOUBT * guess.bytes_per_token) ** 2
    step = missing_bytes / (fixed_weight + token_weight * tokens**2)
    # Contradicting cells must not turn the line around: a token always costs something.
    bytes_per_token = max(line.bytes_per_token + step * token_weight * tokens, guess.bytes_per_token / 10)
    return Line(line.fixed_bytes + step * fixed_weight, bytes_per_token)


def _are_kin(one: Cell, other: Cell) -> bool:
    """A token costs about the same in both, unless the guess tells them apart: where the states live changes it little."""
    return (one.settings.holds_logits, one.settings.recompute) == (other.settings.holds_logits, other.settings.recompute)


def _states_bytes(question: Question, cell: Cell) -> float:
    return device_state_bytes(question.model.shape, cell.settings, device=question.device) / cell.layout.shard_degree


def _tokens_per_gpu(cell: Cell, length_tokens: int) -> float:
    return length_tokens * cell.settings.sequences_per_micro_batch / cell.layout.context_degree


def _nearest_index(grid: Grid, length_tokens: float) -> int:
    below = min(grid.index_at_most(int(length_tokens)), grid.size)
    if below < 1:
        return 1
    nearer_to_next = length_tokens - grid.length(below) >= grid.length(below + 1) - length_tokens
    return min(below + nearer_to_next, grid.size)


def _precedes(earlier: Cell, cell: Cell) -> bool:
    """By the published scan's belief, ``earlier`` never has the longer capacity of the two."""
    if earlier.settings != cell.settings:
        return False
    sp, gpus = earlier.layout.context_degree, earlier.layout.gpus
    fewer_gpus = sp == cell.layout.context_degree and gpus < cell.layout.gpus
    less_sp = gpus == cell.layout.gpus and sp < cell.layout.context_degree
    return fewer_gpus or less_sp
