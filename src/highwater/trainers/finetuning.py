"""Supervised fine-tuning as a trainer's configuration needs it, whoever asks for it: a
recommendation that is emitted, or a trial.
"""

from typing import NamedTuple, Self

from highwater.model.model import ModelShape
from highwater.model.rope import Yarn
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell
from highwater.trainers.emitted import shape_here


class FineTuning(NamedTuple):
    """What a trainer is to train."""

    cell: Cell
    length_tokens: int
    model_path: str | None = None
    """The model's directory, or its id on the Hub; None: the command names it."""
    yarn: Yarn | None = None
    """The scaling of the positions that the length needs."""
    shape: ModelShape | None = None
    """The model's layers, which tell whose loss can be fused; None: it is not here."""

    @classmethod
    def of(cls, found: Recommendation, chosen: Candidate, model_path: str | None) -> Self:
        """The training that a recommendation is of."""
        shape = shape_here(found, model_path)
        return cls(chosen.cell, found.length_tokens, model_path, found.yarn, shape)
