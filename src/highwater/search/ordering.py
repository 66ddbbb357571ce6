"""Ordering: which length to try first in a cell, from the cells that are finished. It orders trials and decides nothing.

What is known without a trial: parameters, gradients and optimizer states take 16 bytes a parameter, sharded over the GPUs.
What the finished cells tell: the bytes that one more token costs. Where a length fit, a token cost at most the room left by
the states over the tokens of that length; where the next one did not, at least the room over its tokens. The first guess
is the geometric mean of these bounds. The published A100 table takes 259 trials this way, of which 224 are inevitable.
"""

from collections.abc import Iterable, Sequence

from highwater.spec.model import ModelShape
from highwater.spec.study import Cell, CellAnswer, Grid, Question

STATE_BYTES_PER_PARAMETER = 16
"""float32: parameter, gradient and both moments of AdamW."""

_FIXED_SHARE = 0.1
"""Share of the memory that grows with neither tokens nor parameters per GPU: context, workspaces, gathered weights. Rough."""
_LOGITS_BYTES = (2.0, 12.4)
"""Per token x vocabulary in a loss with whole logits: the engine's own, Hugging Face's (measured on an H200, bf16)."""
_LAYER_INPUTS = (1.0, 4.0)
"""Bytes per token besides the logits, in units of the layer inputs that recomputation keeps (2 bytes x hidden x layers)."""


def first_index(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """The index of the grid to try first, at least 1; None when the memory is unknown.

    The index i nearest to the expected longest length. After it the bracket tries i + 1 if it fits, else i - 1: the answer
    takes the least, two trials, for a capacity of i and for one of i - 1.
    """
    room_bytes = _room_bytes(question, cell)
    if room_bytes is None:
        return None
    if room_bytes <= 0:
        return 1
    tokens_per_gpu = room_bytes / _bytes_per_token(question, cell, finished)
    length_tokens = tokens_per_gpu * cell.layout.context_degree / cell.settings.sequences_per_micro_batch
    return _nearest_index(question.grid, length_tokens)


def carried_start(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """Where the published scan starts a cell: the longest capacity of this rung on fewer GPUs at this SP, or at less SP here.

    None when there is none: the scan starts at the start length. Source: Trinity-RFT, search_context_length_capacity.py.
    """
    starts = [answer.capacity_tokens for answer in finished if answer.capacity_tokens and _precedes(answer.cell, cell)]
    return question.grid.index_at_most(max(starts)) if starts else None


def _room_bytes(question: Question, cell: Cell) -> float | None:
    """Memory of one GPU that is left for tokens; None when the memory is unknown."""
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if memory_bytes is None:
        return None
    states_bytes = STATE_BYTES_PER_PARAMETER * question.model.shape.parameters / cell.layout.shard_degree
    if cell.settings.offload:
        states_bytes = 0
    return memory_bytes * (1 - _FIXED_SHARE) - question.margin_bytes - states_bytes


def _bytes_per_token(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> float:
    """What one token on one GPU is expected to cost: a bound each way from this rung, else from its kin, else a guess."""
    rung = [answer for answer in finished if answer.cell.settings == cell.settings]
    kin = [answer for answer in finished if _are_kin(answer.cell, cell)]
    guess_low, guess_high = _guess(question.model.shape, whole_logits=cell.settings.loss == "full")
    low = _largest_lower_bound(question, rung) or _largest_lower_bound(question, kin) or guess_low
    high = _smallest_upper_bound(question, rung) or _smallest_upper_bound(question, kin) or guess_high
    return (low * high) ** 0.5


def _are_kin(one: Cell, other: Cell) -> bool:
    """A token costs about the same in both: the allocator and where the states live change it little."""
    return (one.settings.loss, one.settings.recompute) == (other.settings.loss, other.settings.recompute)


def _guess(shape: ModelShape, *, whole_logits: bool) -> tuple[float, float]:
    layer_inputs_bytes = 2 * shape.hidden_size * shape.layers
    low, high = (factor * layer_inputs_bytes for factor in _LAYER_INPUTS)
    if whole_logits:
        low, high = low + _LOGITS_BYTES[0] * shape.vocab_size, high + _LOGITS_BYTES[1] * shape.vocab_size
    return low, high


def _largest_lower_bound(question: Question, answers: Iterable[CellAnswer]) -> float | None:
    """A length that did not fit: its tokens took all of the room, or more."""
    bounds = [_room_per_token(question, answer.cell, answer.does_not_fit_tokens) for answer in answers]
    return max((bound for bound in bounds if bound is not None), default=None)


def _smallest_upper_bound(question: Question, answers: Iterable[CellAnswer]) -> float | None:
    """A length that fit: its tokens took the room, or less."""
    bounds = [_room_per_token(question, answer.cell, answer.capacity_tokens) for answer in answers]
    return min((bound for bound in bounds if bound is not None), default=None)


def _room_per_token(question: Question, cell: Cell, length_tokens: int | None) -> float | None:
    """None where there is no such length, or no room by this reckoning: neither says what a token costs."""
    room_bytes = _room_bytes(question, cell)
    if not length_tokens or room_bytes is None or room_bytes <= 0:
        return None
    return room_bytes * cell.layout.context_degree / (length_tokens * cell.settings.sequences_per_micro_batch)


def _nearest_index(grid: Grid, length_tokens: float) -> int:
    below = min(grid.index_at_most(int(length_tokens)), grid.size)
    if below == 0:
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
