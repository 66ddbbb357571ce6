"""Rendering: a record as documents of token ids, and which of the tokens are trained.

A unit is a set of documents that must be in the same step: for supervised data one document, for
preferences a pair, the chosen document first, for rollouts all responses to one prompt.

A record of rollouts is a prompt with all its responses, or with one response, whose ``group`` names
the responses to the same prompt; rewards are in the data, or come from a user's function. A record
of a pair is a prompt with two responses, or two whole texts or conversations, whose common prefix
is the prompt; lists of messages are responses if they begin with the assistant's.

Shapes:  L tokens of a document
"""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.batches import seen, user_function
from highwater.engine.data.conversations import ChatTemplate
from highwater.engine.data.messages import (
    Conversation,
    Message,
    Said,
    conversation_of,
    messages_of,
    prompt_of,
    said_of,
    spoken,
    with_system,
)
from highwater.engine.data.record_fields import DataRecord
from highwater.engine.data.text_tokens import TextTokens, encode_parts
from highwater.errors import UsageError


class TokenDocument(NamedTuple):
    """Token ids of one document, and which of them are trained on."""

    ids_L: NDArray[np.int64]
    trained_L: NDArray[np.bool_]
    reward: float = 0.0
    logprobs_L: NDArray[np.float32] | None = None
    """Log-probability of each token when it was sampled; NaN for tokens that were not sampled."""
    is_apart: bool = False
    """True if prompt and response were tokenised separately."""
    is_chat: bool = False
    """True if the text is from a chat template."""
    is_given: bool = False
    """True if the data has its ids, and no text."""


class Unit(NamedTuple):
    """Documents that must be trained in the same step: a pair, or the answers to a prompt."""

    documents: tuple[TokenDocument, ...]
    group: str | int | None = None
    """Name of the group that these documents are part of; None: they are a whole unit."""


_AS_TEXTS = "write the prompt and what answers it as texts, in the place of messages"
Render = Callable[[DataRecord], Iterator[Unit]]


class Rendering:
    """Tokenises records into documents, with one tokenizer."""

    def __init__(self, tokens: TextTokens, *, vocab_size: int) -> None:
        """``vocab_size``: ids at or above it raise errors."""
        self.tokens, self.vocab_size = tokens, vocab_size

    def document(
        self, record: DataRecord, parts: Sequence[tuple[str, bool]], *, starts: bool, ends: bool
    ) -> TokenDocument:
        """Tokenise ``parts``, each a text and True if trained, into one document; ``starts`` and
        ``ends`` add the tokenizer's start and end tokens. UsageError for ids past the vocabulary.
        """
        encoded = encode_parts(self.tokens, [text for text, _ in parts], name=record.name)
        pieces = [(ids, trained) for ids, (_, trained) in zip(encoded.ids, parts, strict=True)]
        if starts and self.tokens.start_ids:
            pieces.insert(0, (list(self.tokens.start_ids), pieces[0][1]))
        if ends and pieces[-1][0][-1:] != [self.tokens.end_id]:
            pieces.append(([self.tokens.end_id], pieces[-1][1]))
        ids_L = np.array([token for ids, _ in pieces for token in ids], dtype=np.int64)
        trained_L = np.array([trained for ids, trained in pieces for _ in ids], dtype=bool)
        if ids_L.size and int(ids_L.max()) >= self.vocab_size:
            raise record.refusal(
                f"{self.tokens.name} gives the id {int(ids_L.max())}, and the model knows the ids "
                f"0 to {self.vocab_size - 1}",
                hint="save the model's own into its folder, with `tokenizer.save_pretrained`",
            )
        return TokenDocument(ids_L, trained_L, is_apart=encoded.is_apart, is_chat=not starts)

    def answered(self, record: DataRecord, prompt: Said, response: Said) -> TokenDocument:
        """Return the document of a prompt and a response; only the response is trained.

        Two texts are joined unchanged. Messages are rendered as a conversation; a text that answers
        messages follows the generation prompt, as when it was sampled.
        """
        if isinstance(response, str):
            parts = [(self._prompt_text(record, prompt), False), (response, True)]
            return self.document(record, parts, starts=isinstance(prompt, str), ends=True)
        prompt = spoken("user", prompt)
        if any("trained" in message for message in response):
            raise record.refusal(
                "a response of which messages say whether they are trained, and all of it is",
                hint="leave `weight`, `train`, `training`, `loss` and `masked` out",
            )
        conversation, chat = self.conversation(record, (*prompt, *response)), self.chat(record)
        text = chat.text(conversation)
        begin = len(chat.prompt_of(conversation, len(prompt), text, hint=_AS_TEXTS))
        parts = [(text[:begin], False), (text[begin:], True)]
        return self.document(record, parts, starts=False, ends=False)

    def conversation(self, record: DataRecord, messages: Sequence[Message]) -> Conversation:
        """Return messages, tools and options, in a form that the template writes whole."""
        return self.chat(record).fitted(conversation_of(record, messages))

    def ids(self, record: DataRecord, name: str, given: Any = None) -> NDArray[np.int64]:
        """Return the checked token ids of a field, or those ``given`` instead."""
        value = record.value(name) if given is None else given
        return record.ids(name, value, vocab_size=self.vocab_size)

    def prompt_ids(self, record: DataRecord, prompt: Said) -> NDArray[np.int64]:
        """Return the token ids of a prompt, as the policy gets them for sampling."""
        parts = [(self._prompt_text(record, prompt), False)]
        return self.document(record, parts, starts=isinstance(prompt, str), ends=False).ids_L

    def _prompt_text(self, record: DataRecord, prompt: Said) -> str:
        """Return a text unchanged; for messages, their rendered text with the generation prompt."""
        if isinstance(prompt, str):
            return prompt
        return self.chat(record).text(self.conversation(record, prompt), prompts=True)

    def chat(self, record: DataRecord) -> ChatTemplate:
        """Return the tokenizer's chat template. Raises UsageError if it has none."""
        if self.tokens.chat is None:
            lacking = "the tokenizer has no chat template"
            if self.tokens.name == "bytes":
                lacking = "no tokenizer, whose chat template would make a text of them"
            raise record.refusal(
                f"{record.fields_read} would be a conversation, and {lacking}",
                hint="save one that has one into the model's folder, with "
                "`tokenizer.save_pretrained`, or write texts: "
                '`{"prompt": "Hi", "completion": "Yes"}`',
            )
        return self.tokens.chat


def supervised(rendering: Rendering, record: DataRecord, *, everything: bool) -> Iterator[Unit]:
    """Render a supervised record as one unit: from its ids, its conversation, its prompt and
    response, or its text, the first of these that exists. ``everything``: train prompts too.
    """
    response = record.first("completion", "response", "output", "answer")
    if record.has("input_ids"):
        ids_L = rendering.ids(record, "input_ids")
        is_whole = record.value("labels") is None or everything
        trained_L = np.ones(len(ids_L), dtype=bool) if is_whole else record.labels(ids_L)
        document = TokenDocument(ids_L, trained_L, is_given=True)
    elif name := record.first("messages", "conversations"):
        messages = with_system(record, messages_of(record, name))
        document = _conversation(rendering, record, messages, 0, everything)
    elif response and (prompt := prompt_of(record)) is not None:
        document = _completion(rendering, record, prompt, response, everything)
    elif record.has("text"):
        text = record.text("text")
        document = rendering.document(record, [(text, True)], starts=True, ends=bool(text))
    else:
        raise without_fields(record, "text", _EXAMPLE)
    record.refuse_unread()
    yield Unit((document,))


_EXAMPLE = '`{"text": "..."}`, `{"messages": [...]}` or `{"prompt": "...", "completion": "..."}`'


def without_fields(record: DataRecord, missing: str, example: str) -> UsageError:
    """Return the error for a record without the field ``missing``, with its fields' names."""
    nulls = {name: "" if record.has(name) else " (which is null)" for name in record.fields}
    names = ", ".join(f"{name}{null}" for name, null in nulls.items())
    problem = f"no `{missing}` among its fields: {names or 'none'}"
    return record.refusal(problem, hint=f"a record is {example}")


def _completion(
    rendering: Rendering, record: DataRecord, prompt: Said, name: str, everything: bool
) -> TokenDocument:
    """Return the document of a prompt and the response in field ``name``: texts, or messages."""
    response = said_of(record, name)
    if isinstance(prompt, str) and isinstance(response, str):
        parts = [(prompt, False), (response, True)]
        parts = [(prompt + response, True)] if everything else parts
        return rendering.document(record, parts, starts=True, ends=True)
    prompt, response = spoken("user", prompt), spoken("assistant", response)
    if not any(message["role"] == "assistant" for message in response):
        raise record.refusal(
            f"`{name}` has no message of the assistant",
            hint='give one: `[{"role": "assistant", "content": "Yes"}]`',
        )
    # Answers in the history are trained, as LLaMA-Factory does.
    first = 0 if record.has("history") else len(prompt)
    return _conversation(rendering, record, (*prompt, *response), first, everything)


def _conversation(
    rendering: Rendering,
    record: DataRecord,
    messages: Sequence[Message],
    first: int,
    everything: bool,
) -> TokenDocument:
    """Return a conversation's document; assistant turns from message ``first`` on are trained."""
    conversation = rendering.conversation(record, messages)
    parts = rendering.chat(record).turns(conversation, first=first, everything=everything)
    return rendering.document(record, parts, starts=False, ends=False)


_ROLLOUT_EXAMPLE = (
    '`{"prompt": "...", "responses": ["...", "..."], "rewards": [1.0, 0.0]}` or, one response '
    'each, `{"prompt": "...", "response": "...", "reward": 1.0, "group": 7}`'
)
_SEVERAL = ("responses", "completions")


class RewardFunction:
    """The user's ``module:function``, called with ``prompt``, ``response`` and a ``record``."""

    def __init__(self, source: str) -> None:
        """Find the function. Raises UsageError if it is missing, or takes other keywords."""
        self._source = source
        keywords = ("prompt", "response", "record")
        define = "def reward(*, prompt, response, **_)"
        self.function = user_function(source, keywords, what="reward function", define=define)

    def __call__(self, record: DataRecord, prompt: Any, response: Any) -> float:
        """Return a response's reward; UsageError if the function raises or gives no number."""
        try:
            value = self.function(prompt=prompt, response=response, record=record.fields)
        except Exception as error:  # the user's code may raise anything, and they can mend it
            at = traceback.extract_tb(error.__traceback__)[:2][-1]  # the function's own line
            raise record.refusal(
                f"{self._source} raised {type(error).__name__}: {error}",
                hint=f"look at it: `sed -n {at.lineno}p {quote(at.filename)}`",
            ) from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise record.refusal(
                f"{self._source} gave {seen(value)} for a reward",
                hint="let it return a finite number: `return 1.0`",
            )
        return float(value)


class _Sampled(NamedTuple):
    """One response with the values that its record has for it, not yet checked."""

    text: Any
    """None if the record has ids alone."""
    ids: Any
    logprobs: Any
    reward: Any


def rollouts(
    rendering: Rendering, record: DataRecord, *, grouped: bool, reward: RewardFunction | None
) -> Iterator[Unit]:
    """Render a record of rollouts as units; ``grouped``: one unit of all rollouts of a prompt."""
    if record.has("input_ids"):
        documents = [_raw(rendering, record, reward)]
    else:
        documents = [_document(rendering, record, each, reward) for each in _responses(record)]
    # A reward function is given the whole record, so that no field counts as unread.
    record.refuse_unread(may_have_more=reward is not None)
    if not grouped:
        yield from (Unit((document,)) for document in documents)
    else:
        group = None if _has_several(record) else _group(record)
        yield Unit(tuple(documents), group=group)


def _has_several(record: DataRecord) -> bool:
    """True if a record has lists with an item for each response to its prompt."""
    ids = record.fields.get("response_ids")
    is_nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return is_nested or record.first(*_SEVERAL) is not None


def _responses(record: DataRecord) -> list[_Sampled]:
    if not _has_several(record):
        name = record.first("response", "completion")
        if name is None and not record.has("response_ids"):
            raise without_fields(record, "responses", _ROLLOUT_EXAMPLE)
        beside = [record.value(each) for each in ("response_ids", "logprobs", "reward")]
        return [_Sampled(record.value(name) if name else None, *beside)]
    name = record.first(*_SEVERAL) or "response_ids"
    texts = record.sequence(name)
    if not texts:
        raise record.refusal(f"`{name}` is empty", hint=f"a record is {_ROLLOUT_EXAMPLE}")
    none = [None] * len(texts)
    beside = [
        record.sequence(each, count=len(texts)) if record.has(each) else none
        for each in ("response_ids", "logprobs", "rewards")
    ]
    texts = none if name == "response_ids" else texts
    return [_Sampled(*each) for each in zip(texts, *beside, strict=True)]


def _document(
    rendering: Rendering, record: DataRecord, sampled: _Sampled, reward: RewardFunction | None
) -> TokenDocument:
    """Return one rollout's document: from the sampled ids if the record has them, else its text."""
    prompt = prompt_of(record)
    if prompt is None:
        raise without_fields(record, "prompt", _ROLLOUT_EXAMPLE)
    if sampled.ids is not None:
        document = _sampled_ids(rendering, record, prompt, sampled)
    elif sampled.logprobs is not None:
        raise record.refusal(
            "`logprobs` without the tokens that they belong to",
            hint="give the ids that were sampled as `response_ids`, or leave `logprobs` out",
        )
    elif sampled.text is None:
        raise record.refusal("a response is null", hint=f"a record is {_ROLLOUT_EXAMPLE}")
    else:
        response = said_of(record, "response", sampled.text)
        document = rendering.answered(record, prompt, response)
    return document._replace(reward=_reward(record, prompt, sampled, reward))


def _sampled_ids(
    rendering: Rendering, record: DataRecord, prompt: Said, sampled: _Sampled
) -> TokenDocument:
    """Return the document of the prompt's tokens and the sampled tokens, with nothing added."""
    response_ids = rendering.ids(record, "response_ids", sampled.ids)
    if record.has("prompt_ids"):
        prompt_ids = rendering.ids(record, "prompt_ids")
    else:
        prompt_ids = rendering.prompt_ids(record, prompt)
    ids_L = np.concatenate([prompt_ids, response_ids])
    logprobs_L = None
    if sampled.logprobs is not None:
        told = record.logprobs(sampled.logprobs, count=len(response_ids))
        logprobs_L = np.concatenate([np.full(len(prompt_ids), np.nan, np.float32), told])
    return TokenDocument(ids_L, np.arange(len(ids_L)) >= len(prompt_ids), logprobs_L=logprobs_L)


def _raw(rendering: Rendering, record: DataRecord, reward: RewardFunction | None) -> TokenDocument:
    """Return the document of a rollout of ids and labels, as for a function of ``--data``."""
    ids_L = rendering.ids(record, "input_ids")
    if not record.has("labels"):
        raise record.refusal(
            "`input_ids` without `labels`, which say what was sampled",
            hint="give each token's own id where it was sampled, and -100 in the prompt",
        )
    logprobs_L = None
    if record.has("logprobs"):
        logprobs_L = record.logprobs(record.value("logprobs"), count=len(ids_L))
    sampled = _Sampled(None, ids_L.tolist(), None, record.value("reward"))
    return TokenDocument(
        ids_L,
        record.labels(ids_L),
        reward=_reward(record, record.fields.get("prompt"), sampled, reward),
        logprobs_L=logprobs_L,
    )


def _reward(
    record: DataRecord, prompt: Any, sampled: _Sampled, reward: RewardFunction | None
) -> float:
    if reward is not None:
        return reward(record, prompt, sampled.ids if sampled.text is None else sampled.text)
    if sampled.reward is None:
        raise record.refusal(
            "a response without a reward",
            hint=f"a record is {_ROLLOUT_EXAMPLE}; or name a function: `--reward module:function`",
        )
    return record.number("reward", sampled.reward)


def _group(record: DataRecord) -> str | int:
    group = record.value("group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        problem = "no `group`" if group is None else f"the `group` {group!r}"
        raise record.refusal(
            f"{problem}, and GRPO compares the responses to one prompt",
            hint=f"give them one number or name, or all in one record: {_ROLLOUT_EXAMPLE}",
        )
    return group


def preferences(rendering: Rendering, record: DataRecord) -> Iterator[Unit]:
    """Render a record with ``chosen`` and ``rejected`` as one unit of two documents."""
    for name in ("chosen", "rejected"):
        if not record.has(name):
            raise without_fields(record, name, _PAIR_EXAMPLE)
    pair = [said_of(record, name) for name in ("chosen", "rejected")]
    conversations = [said for said in pair if not isinstance(said, str)]
    if len(conversations) == 1:
        raise record.refusal(
            "of `chosen` and `rejected` one is a text and one is messages",
            hint=f"write both alike: {_PAIR_EXAMPLE}",
        )
    is_response = all(said[0]["role"] == "assistant" for said in conversations)
    prompt = prompt_of(record) if is_response else None
    if is_response and prompt is None and (name := record.first("messages", "conversations")):
        prompt = with_system(record, messages_of(record, name))  # a conversation so far
    if prompt is not None:
        if not isinstance(prompt, str):
            pair = [spoken("assistant", said) for said in pair]
        documents = [rendering.answered(record, prompt, said) for said in pair]
    elif conversations:
        chosen, rejected = (with_system(record, said) for said in conversations)
        shared = _common(chosen, rejected)
        if shared in (0, len(chosen), len(rejected)):
            raise record.refusal(
                "`chosen` and `rejected` have no message in common before one that differs",
                hint=f"give the prompt: {_PAIR_EXAMPLE}",
            )
        documents = [
            rendering.answered(record, said[:shared], said[shared:]) for said in (chosen, rejected)
        ]
    else:
        whole = [
            rendering.document(record, [(str(said), True)], starts=True, ends=True) for said in pair
        ]
        # Their common first tokens have the same log-probabilities in both: they change nothing.
        shared = _common(*(document.ids_L.tolist() for document in whole))
        documents = [
            document._replace(trained_L=np.arange(len(document.ids_L)) >= shared)
            for document in whole
        ]
    record.refuse_unread()
    yield Unit(tuple(documents))


_PAIR_EXAMPLE = '`{"prompt": "...", "chosen": "...", "rejected": "..."}`'


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
