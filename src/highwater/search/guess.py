"""Guess: what a token costs on a GPU before any trial has told, for our engine and for a trainer that nobody knows.

It orders trials and decides nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from highwater.spec.footprint import (
    ENGINE_LOGITS_BYTES,
    FIXED_BYTES,
    gathered_bytes,
    layer_backward_bytes,
    layer_bytes,
    layer_input_bytes,
)
from highwater.spec.model import ModelShape
from highwater.spec.settings import Settings
from highwater.spec.study import Cell, Question

_HEAD_INPUT_BYTES = 10
"""Per token x hidden in either loss: the last layer's output, normalised and not, and their gradients."""
_UNTILED_LAYER_PEAK = 1.4
"""Working set of one layer in its backward pass, in units of what its forward pass makes, where its MLP goes in one piece."""
_LOGITS_LOST = 0.04
"""Share of the logits' bytes that the native allocator holds a second time, in blocks that nothing else fits: 0 to 0.25."""


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of one GPU, besides the states, as a line over the tokens on it."""

    fixed_bytes: float
    bytes_per_token: float

    def at(self, tokens: float) -> float:
        """Bytes of this many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens


Guess = Callable[[Question, Cell, int], Line]
"""What a trainer takes in a cell, before any trial has told: question, cell, usable bytes of a GPU -> line."""


def engine_guess(question: Question, cell: Cell, usable_bytes: int) -> Line:  # noqa: ARG001 (a Guess is told)
    """Our engine. Source: the trials on an H200 in docs/results/find: two steps of 8,192 tokens off at most."""
    shape, settings = question.model.shape, cell.settings
    logits = ENGINE_LOGITS_BYTES * shape.vocab_size if settings.holds_logits else 0.0
    if question.device == "cuda" and settings.allocator == "native":
        logits *= 1 + _LOGITS_LOST
    kept = layer_input_bytes(shape) if settings.recompute == "layer" else layer_bytes(shape) * shape.layers
    bytes_per_token = kept + _HEAD_INPUT_BYTES * shape.hidden_size + max(logits, _working_set_bytes(shape, settings))
    return Line(FIXED_BYTES[question.device] + gathered_bytes(shape), bytes_per_token)


def unknown_trainer_guess(question: Question, cell: Cell, usable_bytes: int) -> Line:
    """Another trainer: the geometric mean of the least and the most that a token is known to cost.

    Per token x vocabulary 2 bytes (ours) to 12.4 (Hugging Face's loss, measured on an H200 in bf16); besides the logits, 1 to
    4 times the layer inputs that recomputation keeps. Fixed: a tenth of the memory.
    """
    shape = question.model.shape
    vocabulary = shape.vocab_size if cell.settings.loss == "full" else 0
    least, most = (inputs * layer_input_bytes(shape) + logits * vocabulary for inputs, logits in ((1, 2.0), (4, 12.4)))
    return Line(0.1 * usable_bytes, (least * most) ** 0.5)


def _working_set_bytes(shape: ModelShape, settings: Settings) -> float:
    """Per token: one layer's recomputation and backward pass. Experts go in no tiles."""
    in_tiles = settings.recompute == "layer" and settings.mlp_tiles != 1 and shape.experts == 1
    return layer_backward_bytes(shape) if in_tiles else _UNTILED_LAYER_PEAK * layer_bytes(shape)
