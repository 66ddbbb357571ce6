"""Text to token ids, by a tokenizer of a local directory, else byte by byte; also texts of an exact
number of tokens. No text is truncated, as a tokenizer may do silently.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, NamedTuple

from transformers import AutoTokenizer

from highwater.engine.data.conversations import ChatTemplate
from highwater.errors import ModelError, UsageError

BYTE_END_ID = 256
"""Id that ends a document of bytes: the first that is no byte."""
BYTE_VOCABULARY = BYTE_END_ID + 1
_PROBE = "a"
_ALL_THAT_IS_SAID = (
    "{{ tools | tojson if tools else '' }}{% for each in messages %}{% generation %}"
    "{{ each.reasoning_content }}{{ each.content if each.content else '' }}"
    "{{ each.tool_calls | tojson if each.tool_calls else '' }}{% endgeneration %}{% endfor %}"
)


class Bytes:
    """Tokens that are the bytes of UTF-8; a document ends with ``BYTE_END_ID``."""

    name = "bytes"
    start_ids: tuple[int, ...] = ()
    """Tokens before a text that is not from a chat template."""
    end_id = BYTE_END_ID
    """End-of-text token."""
    chat: ChatTemplate | None = None
    """Template for conversations; None if there is none."""
    chat_template = _ALL_THAT_IS_SAID
    """Stand-in for a template, used if only lengths are asked for."""
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_chat_template(self, *_: object) -> str:
        """Return the stand-in template, with or without tools."""
        return self.chat_template

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes, without ``BYTE_END_ID``."""
        return bytes(number for number in ids if number != BYTE_END_ID).decode("utf-8", "replace")


class Tokenizer:
    """A transformers tokenizer from a local directory; custom code in it is not run."""

    def __init__(self, directory: Path) -> None:
        """Open the tokenizer; UsageError if this fails, or it has no end-of-text token."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            said = " ".join(str(error).split())
            raise UsageError(
                f"no tokenizer can be opened in {directory}: {said[:300]}",
                hint="save the model's tokenizer there anew, with `tokenizer.save_pretrained`",
            ) from error
        self.name = type(self._tokenizer).__name__
        if self._tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {directory} has no end-of-text token",
                hint=f"name one as `eos_token` in {quote(str(directory))}/tokenizer_config.json",
            )
        self.end_id = int(self._tokenizer.eos_token_id)
        # Find the tokens that the tokenizer adds before a text.
        bare, whole = self.encode(_PROBE), self.encode(_PROBE, add_special_tokens=True)
        starts = range(len(whole) - len(bare) + 1)
        begin = next((at for at in starts if whole[at : at + len(bare)] == bare), 0)
        self.start_ids = tuple(whole[:begin])
        has_template = bool(self._tokenizer.chat_template)
        self.chat = ChatTemplate(self._tokenizer) if has_template else None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return a text's ids, without special tokens except those spelled in the text."""
        given = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            truncation=False,
            padding=False,
            verbose=False,
            return_attention_mask=False,
        )
        return list(given["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the exact text of ids, with special tokens and all spaces."""
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **how))


TextTokens = Bytes | Tokenizer
"""A way to turn texts into token ids."""


class Parts(NamedTuple):
    """Token ids of a text made of several parts."""

    ids: tuple[list[int], ...]
    """Token ids of each part."""
    is_apart: bool
    """True if parts were tokenised separately, as a token would reach from one into the next."""


def encode_parts(tokens: TextTokens, parts: Sequence[str], *, name: str) -> Parts:
    """Return the tokens of each part of a text.

    They are the whole text's tokens if tokens end where parts do. Otherwise each part is tokenised
    separately, as a model sees a prompt alone before it responds, and is proven to spell the same
    text. Raises UsageError, naming the record, if it does not.
    """
    apart = tuple(tokens.encode(part) if part else [] for part in parts)
    whole = apart[0] if len(parts) == 1 else tokens.encode("".join(parts))
    if list(chain(*apart)) == whole:
        return Parts(apart, is_apart=False)
    borders = [0]
    for before in accumulate(parts[:-1]):
        # The whole is cut at a border if it begins with the tokens of the text before.
        ids = tokens.encode(before) if before else []
        if whole[: len(ids)] != ids:
            break
        borders.append(len(ids))
    else:
        cut = tuple(whole[start:end] for start, end in pairwise([*borders, len(whole)]))
        return Parts(cut, is_apart=False)
    if tokens.decode(list(chain(*apart))) != tokens.decode(whole):
        raise UsageError(
            f"{name}: a token of {tokens.name} reaches from a prompt into its response, and the "
            "two spell another text when each is tokenised by itself",
            hint="end the prompt where a word ends, and begin the response with the space: "
            '`{"prompt": "Say", "completion": " yes"}`',
        )
    return Parts(apart, is_apart=True)


_LOOKED_AT = 20_000
"""Most tokens of a vocabulary that are tried as words."""
_WORDS = 2_000
"""Most words that texts are made of: many, so that experts get different tokens."""
_ROUNDS = 30
"""Most times that a text is made longer or shorter: one is enough if every word is one token."""
_LETTERS = ("a", "b", "c", "d")


def exact_texts(
    tokenizer: Any, *, length_tokens: int, count: int, seed: int, end: str
) -> list[str]:
    """Return ``count`` texts, which differ by ``seed`` and number, of ``length_tokens`` tokens
    each, counting the ``end`` that a trainer adds. Raises ModelError if no such text is found.
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
    """Return words that are one token each, also after a space; empty if there are none."""
    vocabulary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    random.Random(seed).shuffle(vocabulary)
    words: list[str] = []
    for number in vocabulary[:_LOOKED_AT]:
        word = tokenizer.decode([number]).strip()
        if word.isascii() and word.isalnum():
            together = tokenizer(text=f"{word} {word}", add_special_tokens=False)["input_ids"]
            words += [word] if len(together) == 2 else []
        if len(words) == _WORDS:
            break
    return words


def _exact(
    words: Sequence[str],
    tokens: Callable[[Sequence[str]], int],
    length_tokens: int,
    numbers: random.Random,
) -> list[str]:
    """Return words that are ``length_tokens`` tokens together, as ``tokens`` counts; or raise."""
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
