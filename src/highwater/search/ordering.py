"""Ordering: which length to try first in a cell, from the cells that are finished. It orders trials and decides nothing.

The memory of a GPU is taken up by the states (known: 16 bytes a parameter, sharded), by something fixed, and by tokens:

    memory = states + fixed + bytes_per_token x tokens per GPU

The two unknowns start from a rough guess. Each finished cell says that the line reaches the memory between the tokens that
fit and those that did not; where the line does not, it is moved just enough to meet the middle (successive projection,
Agmon and Motzkin, 1954). Cells of the same rung come last and so weigh the most.
The published A100 table takes 247 trials this way, of which 224 are inevitable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from highwater.spec.study import Cell, CellAnswer, Grid, Question

STATE_BYTES_PER_PARAMETER = 16
"""float32: parameter, gradient and both moments of AdamW."""

_FIXED_SHARE = 0.1
"""Guess, as a share of the memory: context, workspaces, gathered weights, what fragmentation loses."""
_FIXED_DOUBT = 0.1
"""How far that may be off, as a share of the memory."""
_TOKEN_DOUBT = 0.3
"""How far the guess of a token's bytes may be off, as a share of it. The doubts only say which of the two to move more."""
_LOGITS_BYTES = (2.0, 12.4)
"""Per token x vocabulary in a loss with whole logits: the engine's own, Hugging Face's (measured on an H200, bf16)."""
_LAYER_INPUTS = (1.0, 4.0)
"""Bytes per token besides the logits, in units of the layer inputs that recomputation keeps (2 bytes x hidden x layers)."""
_PASSES = 3
"""Times that the finished cells are gone through: later ones may undo a little of what earlier ones taught."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes of one GPU, besides the states, as a line over the tokens on it."""

    fixed_bytes: float
    bytes_per_token: float

    def at(self, tokens: float) -> float:
        return self.fixed_bytes + self.bytes_per_token * tokens


def first_index(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """The index of the grid to try first, at least 1; None when the memory is unknown.

    The index i nearest to the expected longest length. After it the bracket tries i + 1 if it fits, else i - 1: the answer
    takes the least, two trials, for a capacity of i and for one of i - 1.
    """
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if memory_bytes is None:
        return None
    usable_bytes = memory_bytes - question.margin_bytes
    line = _learned_line(question, cell, finished, usable_bytes)
    room_bytes = usable_bytes - _states_bytes(question, cell) - line.fixed_bytes
    tokens_per_gpu = room_bytes / line.bytes_per_token
    return _nearest_index(question.grid, tokens_per_gpu / _tokens_per_gpu(cell, 1))


def carried_start(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """Where the published scan starts a cell: the longest capacity of this rung on fewer GPUs at this SP, or at less SP here.

    None when there is none: the scan starts at the start length. Source: Trinity-RFT, search_context_length_capacity.py.
    """
    starts = [answer.capacity_tokens for answer in finished if answer.capacity_tokens and _precedes(answer.cell, cell)]
    return question.grid.index_at_most(max(starts)) if starts else None


def _learned_line(question: Question, cell: Cell, finished: Sequence[CellAnswer], usable_bytes: int) -> _Line:
    """The guess, moved to agree with the finished cells of other rungs where a token costs about the same, then of this rung."""
    line = guess = _guessed_line(question, cell, usable_bytes)
    rung = [answer for answer in finished if answer.cell.settings == cell.settings]
    kin = [answer for answer in finished if answer not in rung and _are_kin(answer.cell, cell)]
    for answers in (kin, rung):
        for answer in _PASSES * answers:
            taken_bytes = usable_bytes - _states_bytes(question, answer.cell)
            line = _moved(line, guess, taken_bytes, answer)
    return line


def _guessed_line(question: Question, cell: Cell, usable_bytes: int) -> _Line:
    """The geometric mean of the least and the most that a token is known to cost."""
    shape = question.model.shape
    vocabulary = shape.vocab_size if cell.settings.loss == "full" else 0
    layer_inputs_bytes = 2 * shape.hidden_size * shape.layers
    least, most = (
        inputs * layer_inputs_bytes + logits_bytes * vocabulary
        for inputs, logits_bytes in zip(_LAYER_INPUTS, _LOGITS_BYTES, strict=True)
    )
    return _Line(_FIXED_SHARE * usable_bytes, (least * most) ** 0.5)


def _moved(line: _Line, guess: _Line, taken_bytes: float, answer: CellAnswer) -> _Line:
    """The line, moved to take ``taken_bytes`` in the middle between what fit and what did not; as it is if it does in between."""
    fit_tokens = _tokens_per_gpu(answer.cell, answer.capacity_tokens or 0)
    failed_tokens = _tokens_per_gpu(answer.cell, answer.does_not_fit_tokens) if answer.does_not_fit_tokens else None
    too_steep = fit_tokens > 0 and line.at(fit_tokens) > taken_bytes
    too_flat = failed_tokens is not None and line.at(failed_tokens) < taken_bytes
    if not (too_steep or too_flat):
        return line
    tokens = fit_tokens if failed_tokens is None else (fit_tokens + failed_tokens) / 2
    missing_bytes = taken_bytes - line.at(tokens)
    fixed_weight = (_FIXED_DOUBT / _FIXED_SHARE * guess.fixed_bytes) ** 2
    token_weight = (_TOKEN_DOUBT * guess.bytes_per_token) ** 2
    step = missing_bytes / (fixed_weight + token_weight * tokens**2)
    # Contradicting cells must not turn the line around: a token always costs something.
    bytes_per_token = max(line.bytes_per_token + step * token_weight * tokens, guess.bytes_per_token / 10)
    return _Line(line.fixed_bytes + step * fixed_weight, bytes_per_token)


def _are_kin(one: Cell, other: Cell) -> bool:
    """A token costs about the same in both: the allocator and where the states live change it little."""
    return (one.settings.loss, one.settings.recompute) == (other.settings.loss, other.settings.recompute)


def _states_bytes(question: Question, cell: Cell) -> float:
    if cell.settings.offload:
        return 0
    return STATE_BYTES_PER_PARAMETER * question.model.shape.parameters / cell.layout.shard_degree


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
