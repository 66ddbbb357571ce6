"""Documents of exactly a length: texts that a tokenizer makes into so many tokens.

Words are taken that are one token each, behind another word, in this tokenizer; how many is found
by tokenising the whole text as a trainer does, with what it adds of its own. A tokenizer without
such words has its text made of single letters.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from highwater.errors import ModelError

_LOOKED_AT = 20_000
"""Tokens of a vocabulary that are looked at for words."""
_WORDS = 2_000
"""Words that texts are made of: different ones, so that experts get different tokens."""
_ROUNDS = 30
"""Times that a text is made longer or shorter: one is enough where every word is one token."""
_LETTERS = ("a", "b", "c", "d")


def exact_texts(
    tokenizer: Any, *, length_tokens: int, count: int, seed: int, end: str
) -> list[str]:
    """``count`` different texts of exactly so many tokens, with ``end``, which a trainer puts
    behind each.

    Raises ModelError where no text of that length is found.
    """
    words, between = single_words(tokenizer, seed=seed), " "
    if not words:
        words, between = list(_LETTERS), ""

    def tokens(chosen: Sequence[str]) -> int:
        return len(tokenizer(text=between.join(chosen) + end)["input_ids"])

    return [
        between.join(_exact(words, tokens, length_tokens, random.Random(f"{seed} {number}")))
        for number in range(count)
    ]


def single_words(tokenizer: Any, *, seed: int) -> list[str]:
    """Words that are one token each, behind a space too; none where every letter is a token."""
    vocabulary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    random.Random(seed).shuffle(vocabulary)
    words: list[str] = []
    for number in vocabulary[:_LOOKED_AT]:
        word = tokenizer.decode([number]).strip()
        if word.isascii() and word.isalnum() and _is_one_token(tokenizer, word):
            words.append(word)
        if len(words) == _WORDS:
            break
    return words


def _is_one_token(tokenizer: Any, word: str) -> bool:
    together = tokenizer(text=f"{word} {word}", add_special_tokens=False)["input_ids"]
    return len(together) == 2


def _exact(
    words: Sequence[str],
    tokens: Callable[[Sequence[str]], int],
    length_tokens: int,
    numbers: random.Random,
) -> list[str]:
    """Words that are so many tokens together, with what the tokenizer adds."""
    chosen = numbers.choices(words, k=max(1, length_tokens))
    tried: set[int] = set()
    for _ in range(_ROUNDS):
        missing = length_tokens - tokens(chosen)
        if missing == 0:
            return chosen
        count = len(chosen) + missing
        if count < 1 or count in tried:
            break
        tried.add(count)
        chosen = chosen[:count] + numbers.choices(words, k=max(0, missing))
    raise ModelError(
        f"no text of exactly {length_tokens} tokens was found with the model's tokenizer",
        hint="use another length: one of a few tokens more, as a rule",
    )
