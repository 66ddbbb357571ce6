"""Recorded rollouts and preference pairs as documents.

A rollout's record is a prompt with all its responses, or one response, whose ``group`` says which
others answer the same prompt; rewards are in the data, or a function of the user's gives them. A
pair's is a prompt with two responses, or two whole texts or conversations, whose common beginning
is the prompt; two lists of messages are responses where an assistant's message comes first.
"""

import math
import traceback
from collections.abc import Iterator, Sequence
from numbers import Real
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from highwater.engine.data.batches import refuse_uncallable, seen, user_function
from highwater.engine.data.messages import (
    Said,
    messages_of,
    prompt_of,
    said_of,
    spoken,
    with_system,
)
from highwater.engine.data.record_fields import DataRecord
from highwater.engine.data.rendering import Rendering, TokenDocument, Unit, without_fields

_EXAMPLE = (
    '`{"prompt": "...", "responses": ["...", "..."], "rewards": [1.0, 0.0]}` or, one response '
    'each, `{"prompt": "...", "response": "...", "reward": 1.0, "group": 7}`'
)
_SEVERAL = ("responses", "completions")
_DEFINITION = "def reward(*, prompt, response, **_)"


class RewardFunction:
    """A function of the user's: ``module:function``, called with ``prompt``, ``response`` and the
    whole ``record``.
    """

    def __init__(self, source: str) -> None:
        """Find it. Raises UsageError where there is none, or it cannot be called so."""
        self._source = source
        self.function = user_function(source, what="reward function")
        keywords = ("prompt", "response", "record")
        refuse_uncallable(self.function, keywords, source, define=_DEFINITION)

    def __call__(self, record: DataRecord, prompt: Any, response: Any) -> float:
        """The reward of a response. Raises UsageError, with the record's name, for what the
        function raises, and for what is no number.
        """
        try:
            value = self.function(prompt=prompt, response=response, record=record.fields)
        except Exception as error:  # the user's code: whatever it is, they mend it
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
    """One response as its record has it."""

    text: Any
    """None if the record has ids alone."""
    ids: Any
    logprobs: Any
    reward: Any


def rollouts(
    rendering: Rendering, record: DataRecord, *, grouped: bool, reward: RewardFunction | None
) -> Iterator[Unit]:
    """Render a record of rollouts. ``grouped``: those of one prompt are a unit."""
    if record.has("input_ids"):
        documents = [_raw(rendering, record, reward)]
    else:
        documents = [_document(rendering, record, each, reward) for each in _responses(record)]
    # A function is given all of the record.
    (record.refuse_masked if reward else record.refuse_unread)()
    if not grouped:
        yield from (Unit((document,)) for document in documents)
    else:
        group = None if _has_several(record) else _group(record)
        yield Unit(tuple(documents), group=group)


def _has_several(record: DataRecord) -> bool:
    """True if a record has all responses to its prompt, in lists."""
    ids = record.fields.get("response_ids")
    is_nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return is_nested or record.first(*_SEVERAL) is not None


def _responses(record: DataRecord) -> list[_Sampled]:
    """The responses of a record, one or several."""
    if not _has_several(record):
        name = record.first("response", "completion")
        if name is None and not record.has("response_ids"):
            raise without_fields(record, "responses", _EXAMPLE)
        beside = [record.value(each) for each in ("response_ids", "logprobs", "reward")]
        return [_Sampled(record.value(name) if name else None, *beside)]
    name = record.first(*_SEVERAL) or "response_ids"
    texts = record.sequence(name)
    if not texts:
        raise record.refusal(f"`{name}` is empty", hint=f"a record is {_EXAMPLE}")
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
    """One rollout: from the ids that were sampled where the record has them, else from its text."""
    prompt = prompt_of(record)
    if prompt is None:
        raise without_fields(record, "prompt", _EXAMPLE)
    if sampled.ids is not None:
        document = _sampled_ids(rendering, record, prompt, sampled)
    elif sampled.logprobs is not None:
        raise record.refusal(
            "`logprobs` without the tokens that they belong to",
            hint="give the ids that were sampled as `response_ids`, or leave `logprobs` out",
        )
    elif sampled.text is None:
        raise record.refusal("a response is null", hint=f"a record is {_EXAMPLE}")
    else:
        response = said_of(record, "response", sampled.text)
        document = rendering.answered(record, prompt, response)
    return document._replace(reward=_reward(record, prompt, sampled, reward))


def _sampled_ids(
    rendering: Rendering, record: DataRecord, prompt: Said, sampled: _Sampled
) -> TokenDocument:
    """The prompt's tokens and those that were sampled, nothing added."""
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
    """A rollout of ids and labels, as a function of ``--data`` would yield it."""
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
            hint=f"a record is {_EXAMPLE}; or name a function: `--reward module:function`",
        )
    return record.number("reward", sampled.reward)


def _group(record: DataRecord) -> str | int:
    group = record.value("group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        problem = "no `group`" if group is None else f"the `group` {group!r}"
        raise record.refusal(
            f"{problem}, and GRPO compares the responses to one prompt",
            hint=f"give them one number or name, or all in one record: {_EXAMPLE}",
        )
    return group


def preferences(rendering: Rendering, record: DataRecord) -> Iterator[Unit]:
    """Render a record with ``chosen`` and ``rejected``: a pair."""
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
        # Tokens that both begin with have the same log-probabilities in both: they decide nothing.
        shared = _common(*(document.ids_L.tolist() for document in whole))
        documents = [
            document._replace(trained_L=np.arange(len(document.ids_L)) >= shared)
            for document in whole
        ]
    record.refuse_unread()
    yield Unit(tuple(documents))


_PAIR_EXAMPLE = '`{"prompt": "...", "chosen": "...", "rejected": "..."}`'


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many values two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
