"""Adapter words: what the configurations of trainers with LoRA have in common."""

import shlex

from highwater.errors import UsageError
from highwater.nouns.declaration import words_of
from highwater.nouns.lora import ALL_LINEAR, Lora


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
