"""Memory lines: what a token costs on a GPU before any trial has told.

Of a trainer with a formula a line is what that says; there is one for a script with Hugging Face's
loss, and one for a trainer that nobody knows. A line orders trials and decides nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from highwater.memory.capacity import MemoryLimit, predict_cell
from highwater.memory.formula.formula import Formula
from highwater.memory.trainers import formula_of
from highwater.model.footprint import device_state_bytes, layer_input_bytes
from highwater.nouns.study import Cell, Question

_HF_LOGITS_BYTES = 12.4
"""Bytes of Hugging Face's loss per token x vocabulary, measured on an H200 in bf16."""
_FIXED_SHARE = 0.1
"""Share of the memory that a trainer nobody knows takes whatever the length."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes of one GPU, besides the states, as a line over the tokens on it."""

    fixed_bytes: float
    bytes_per_token: float

    def at(self, tokens: float) -> float:
        """Bytes at this many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens


MemoryLineOf = Callable[[Question, Cell, int], MemoryLine]
"""The line of a trainer in a cell before any trial: question, cell, usable bytes of a GPU."""


def predicted_line(
    question: Question, cell: Cell, usable_bytes: int, formula: Formula
) -> MemoryLine:
    """The line of a trainer whose formula is known, through two predictions.

    They are at the predicted capacity and at twice that length.
    """
    memory_limit = MemoryLimit(device_bytes=usable_bytes)
    predicted = predict_cell(question, cell, memory_limit, formula)
    length_tokens = predicted.likely_edge_tokens or question.grid.length(1)
    shape, settings, layout = question.model.shape, cell.settings, cell.layout
    at, beyond = (
        formula(shape, settings, layout, length_tokens=length, device=question.device).needed_bytes
        for length in (length_tokens, 2 * length_tokens)
    )
    tokens = length_tokens * settings.sequences_per_micro_batch / layout.context_degree
    bytes_per_token = (beyond - at) / tokens
    states = device_state_bytes(shape, settings, device=question.device) / layout.shard_degree
    return MemoryLine(at - states - bytes_per_token * tokens, bytes_per_token)


def trainer_line(question: Question, cell: Cell, usable_bytes: int) -> MemoryLine:
    """The line of the trainer that a question is asked of."""
    formula, foreign = formula_of(question), question.foreign
    if formula is not None:
        return predicted_line(question, cell, usable_bytes, formula)
    assert foreign is not None, "our engine has a formula"  # noqa: S101
    return _LINES[foreign.trainer](question, cell, usable_bytes)


def hugging_face_line(question: Question, _: Cell, usable_bytes: int) -> MemoryLine:
    """The line of a script with Hugging Face's own loss, whose logits are whole, and recomputation;
    fixed: as of any trainer.
    """
    shape = question.model.shape
    of_token = layer_input_bytes(shape) + _HF_LOGITS_BYTES * shape.vocab_size
    return MemoryLine(_FIXED_SHARE * usable_bytes, of_token)


def unknown_trainer_line(question: Question, cell: Cell, usable_bytes: int) -> MemoryLine:
    """The line of another trainer: the geometric mean of the least and the most a token costs.

    Per token x vocabulary 2 bytes (ours) to 12.4 (Hugging Face's loss); besides the logits, 1 to 4
    times the layer inputs that recomputation keeps. Fixed: a tenth of the memory.
    """
    shape = question.model.shape
    vocabulary = shape.vocab_size if cell.settings.loss == "full" else 0
    least, most = (
        inputs * layer_input_bytes(shape) + logits * vocabulary
        for inputs, logits in ((1, 2.0), (4, _HF_LOGITS_BYTES))
    )
    return MemoryLine(_FIXED_SHARE * usable_bytes, (least * most) ** 0.5)


_LINES: Mapping[str, MemoryLineOf] = {
    "accelerate": hugging_face_line,
    "llamafactory": hugging_face_line,
    "axolotl": hugging_face_line,
    "ms-swift": hugging_face_line,
    "command": unknown_trainer_line,
}
"""Lines of trainers that no formula knows; what accelerate launches, and the trainers for
supervised fine-tuning, mostly have Hugging Face's loss."""
