"""Supervised fine-tuning as a trainer's configuration needs it, whoever asks for it: a
recommendation that is emitted, or a trial.

Adapter words: what the configurations of trainers with LoRA have in common.
"""

import shlex
from typing import NamedTuple, Self

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.model.rope import Yarn
from highwater.nouns.declaration import words_of
from highwater.nouns.lora import ALL_LINEAR, Lora
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


def whole_alpha(lora: Lora, *, name: str) -> int:
    """Alpha as a whole number; raises UsageError for another."""
    if lora.alpha != int(lora.alpha):
        raise UsageError(
            f"{name}'s lora_alpha is a whole number, and {lora.alpha} is not",
            hint=f"use `--lora-alpha {max(1, round(lora.alpha))}`",
        )
    return int(lora.alpha)


def lora_words(lora: Lora) -> str:
    """The flags that ask for these adapters."""
    words: dict[str, object] = {"lora": lora.rank}
    words |= {} if lora.alpha == 2 * lora.rank else {"lora_alpha": lora.alpha}
    words |= {} if lora.targets == ALL_LINEAR else {"lora_targets": lora.targets}
    return shlex.join(words_of(words))


def one_dtype(*, name: str, field: str) -> str:
    """That a frozen model has its adapters' dtype: a line of a comment."""
    return (
        f"{name} has one dtype for adapters and the frozen model, {field}: float32, which counts "
        "4 bytes for each of its parameters; bf16 would train adapters in bf16"
    )
