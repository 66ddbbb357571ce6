"""Recorded rollouts and preference pairs as documents.

A rollout's record is a prompt with all its responses, or one response, whose ``group`` says which
others answer the same prompt; rewards are in the data, or a function of the user's gives them. A
pair's is a prompt with two responses, or two whole texts or conversations, whose common beginning
is the prompt; two lists of messages are responses where an assistant's message comes first.
"""

import math
import traceback
from collections.abc import Iterator
from numbers import Real
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from highwater.engine.data.data_files import DataRecord
from highwater.engine.data.messages import (
    Said,
    messages_of,
    prompt_of,
    said_of,
    spoken,
    with_system,
)
from highwater.engine.data.micro_batches import refuse_uncallable, seen, user_function
from highwater.engine.data.record_fields import (
    first_of,
    has,
    ids_of,
    labels_of,
    list_of,
    logprobs_of,
    number_of,
    refuse_masked,
    refuse_unread,
    value_of,
)
from highwater.engine.data.rendering import Render, Rendering, TokenDocument, Unit, without_fields
from highwater.errors import UsageError

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
            raise UsageError(
                f"{record.name}: {self._source} raised {type(error).__name__}: {error}",
                hint=f"look at it: `sed -n {at.lineno}p {quote(at.filename)}`",
            ) from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UsageError(
                f"{record.name}: {self._source} gave {seen(value)} for a reward",
                hint="let it return a finite number: `return 1.0`",
            )
        return float(value)


class _Sampled(NamedTuple):
    """One response as its record has it."""

    text: Any
    """None: the record has ids alone."""
    ids: Any
    logprobs: Any
    reward: Any


def rollouts(rendering: Rendering, *, grouped: bool, reward: RewardFunction | None) -> Render:
    """Render recorded rollouts. ``grouped``: those of one prompt are a unit."""

    def render(record: DataRecord) -> Iterator[Unit]:
        if has(record, "input_ids"):
            documents = [_raw(rendering, record, reward)]
        else:
            documents = [_document(rendering, record, each, reward) for each in _responses(record)]
        # A function is given all of the record.
        (refuse_masked if reward else refuse_unread)(record)
        if not grouped:
            yield from (Unit((document,)) for document in documents)
        elif _has_several(record):
            yield Unit(tuple(documents))
        else:
            yield Unit(tuple(documents), group=_group(record))

    return render


def _has_several(record: DataRecord) -> bool:
    """Whether a record has all responses to its prompt, in lists."""
    ids = record.fields.get("response_ids")
    is_nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return is_nested or first_of(record, *_SEVERAL) is not None


def _responses(record: DataRecord) -> list[_Sampled]:
    """The responses of a record, one or several."""
    if _has_several(record):
        return _several(record)
    name = first_of(record, "response", "completion")
    if name is None and not has(record, "response_ids"):
        raise without_fields(record, "responses", _EXAMPLE)
    beside = [value_of(record, each) for each in ("response_ids", "logprobs", "reward")]
    return [_Sampled(value_of(record, name) if name else None, *beside)]


def _several(record: DataRecord) -> list[_Sampled]:
    name = first_of(record, *_SEVERAL) or "response_ids"
    texts = list_of(record, name)
    if not texts:
        raise UsageError(f"{record.name}: `{name}` is empty", hint=f"a record is {_EXAMPLE}")
    beside = [
        list_of(record, each, count=len(texts)) if has(record, each) else [None] * len(texts)
        for each in ("response_ids", "logprobs", "rewards")
    ]
    if name == "response_ids":
        texts = [None] * len(texts)
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
        raise UsageError(
            f"{record.name}: `logprobs` without the tokens that they belong to",
            hint="give the ids that were sampled as `response_ids`, or leave `logprobs` out",
        )
    elif sampled.text is None:
        raise UsageError(f"{record.name}: a response is null", hint=f"a record is {_EXAMPLE}")
    else:
        response = said_of(record, "response", sampled.text)
        document = rendering.answered(record, prompt, response)
    return document._replace(reward=_reward(record, prompt, sampled, reward))


def _sampled_ids(
    rendering: Rendering, record: DataRecord, prompt: Said, sampled: _Sampled
) -> TokenDocument:
    """The prompt's tokens and those that were sampled, nothing added."""
    vocab_size = rendering.vocab_size
    response_ids = ids_of(record, "response_ids", sampled.ids, vocab_size=vocab_size)
    if has(record, "prompt_ids"):
        given = value_of(record, "prompt_ids")
        prompt_ids = ids_of(record, "prompt_ids", given, vocab_size=vocab_size)
    else:
        prompt_ids = rendering.prompt_ids(record, prompt)
    ids_L = np.concatenate([prompt_ids, response_ids])
    logprobs_L = None
    if sampled.logprobs is not None:
        known = logprobs_of(record, sampled.logprobs, count=len(response_ids))
        logprobs_L = np.concatenate([np.full(len(prompt_ids), np.nan, np.float32), known])
    return TokenDocument(ids_L, np.arange(len(ids_L)) >= len(prompt_ids), logprobs_L=logprobs_L)


def _raw(rendering: Rendering, record: DataRecord, reward: RewardFunction | None) -> TokenDocument:
    """A rollout of ids and labels, as a function of ``--data`` would yield it."""
    ids = value_of(record, "input_ids")
    ids_L = ids_of(record, "input_ids", ids, vocab_size=rendering.vocab_size)
    if not has(record, "labels"):
        raise UsageError(
            f"{record.name}: `input_ids` without `labels`, which say what was sampled",
            hint="give each token's own id where it was sampled, and -100 in the prompt",
        )
    logprobs_L = None
    if has(record, "logprobs"):
        logprobs_L = logprobs_of(record, value_of(record, "logprobs"), count=len(ids_L))
    sampled = _Sampled(None, ids_L.tolist(), None, value_of(record, "reward"))
    return TokenDocument(
        ids_L,
        labels_of(record, ids_L),
        reward=_reward(record, record.fields.get("prompt"), sampled, reward),
        logprobs_L=logprobs_L,
    )


def _reward(
    record: DataRecord, prompt: Any, sampled: _Sampled, reward: RewardFunction | None
) -> float:
    if reward is not None:
        text = sampled.text
        return reward(record, prompt, sampled.ids if text is None else text)
    if sampled.reward is None:
        raise UsageError(
            f"{record.name}: a response without a reward",
            hint=f"a record is {_EXAMPLE}; or name a function: `--reward module:function`",
        )
    return number_of(record, "reward", sampled.reward)


def _group(record: DataRecord) -> str | int:
    group = value_of(record, "group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        problem = "no `group`" if group is None else f"the `group` {group!r}"
        raise UsageError(
            f"{record.name}: {problem}, and GRPO compares the responses to one prompt",
            hint=f"give them one number or name, or all in one record: {_EXAMPLE}",
        )
    return group


_PAIR_EXAMPLE = '`{"prompt": "...", "chosen": "...", "rejected": "..."}`'


def preferences(rendering: Rendering) -> Render:
    """Render records with ``chosen`` and ``rejected``, a pair each."""

    def render(record: DataRecord) -> Iterator[Unit]:
        for name in ("chosen", "rejected"):
            if not has(record, name):
                raise without_fields(record, name, _PAIR_EXAMPLE)
        chosen, rejected = said_of(record, "chosen"), said_of(record, "rejected")
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise UsageError(
                f"{record.name}: of `chosen` and `rejected` one is a text and one is messages",
                hint=f"write both alike: {_PAIR_EXAMPLE}",
            )
        both = [said for said in (chosen, rejected) if not isinstance(said, str)]
        is_response = all(said[0]["role"] == "assistant" for said in both)
        prompt = prompt_of(record) if is_response else None
        name = first_of(record, "messages", "conversations")
        if is_response and prompt is None and name:  # a conversation so far
            prompt = with_system(record, messages_of(record, name))
        if prompt is None:
            unit = _whole(rendering, record, chosen, rejected)
        else:
            if not isinstance(prompt, str):
                chosen, rejected = spoken("assistant", chosen), spoken("assistant", rejected)
            both = (rendering.answered(record, prompt, said) for said in (chosen, rejected))
            unit = Unit(tuple(both))
        refuse_unread(record)
        yield unit

    return render


def _whole(rendering: Rendering, record: DataRecord, chosen: Said, rejected: Said) -> Unit:
    """A pair of two whole texts or conversations."""
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        chosen, rejected = with_system(record, chosen), with_system(record, rejected)
        shared = _common(chosen, rejected)
        if shared in (0, len(chosen), len(rejected)):
            raise UsageError(
                f"{record.name}: `chosen` and `rejected` have no message in common before one that "
                "differs",
                hint=f"give the prompt: {_PAIR_EXAMPLE}",
            )
        both = ((said[:shared], said[shared:]) for said in (chosen, rejected))
        return Unit(tuple(rendering.answered(record, *each) for each in both))
    documents = [
        rendering.document(record, [(str(said), True)], starts=True, ends=True)
        for said in (chosen, rejected)
    ]
    # Tokens that both begin with have the same log-probabilities in both: they decide nothing.
    shared = _common(documents[0].ids_L.tolist(), documents[1].ids_L.tolist())
    places = (np.arange(len(document.ids_L)) for document in documents)
    return Unit(
        tuple(d._replace(trained_L=at >= shared) for d, at in zip(documents, places, strict=True))
    )


def _common(one: "list[int] | tuple[object, ...]", other: "list[int] | tuple[object, ...]") -> int:
    """How many values two sequences begin with alike."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))
