"""Preference pairs as documents: the chosen one first, the prompt that they share untrained.

A record is a prompt with two responses, or two whole texts or conversations, whose common beginning
is the prompt. Two lists of messages are responses where an assistant's message comes first.
"""

from collections.abc import Iterator

import numpy as np

from highwater.engine.data.messages import (
    Said,
    messages_of,
    prompt_of,
    said_of,
    spoken,
    with_system,
)
from highwater.engine.data.readers import DataRecord
from highwater.engine.data.record_fields import first_of, has
from highwater.engine.data.rendering import Render, Rendering, TokenDocument, Unit, without_fields
from highwater.engine.data.unread_fields import refuse_unread
from highwater.errors import UsageError

_EXAMPLE = '`{"prompt": "...", "chosen": "...", "rejected": "..."}`'


def preferences(rendering: Rendering) -> Render:
    """Render records with ``chosen`` and ``rejected``, a pair each."""

    def render(record: DataRecord) -> Iterator[Unit]:
        for name in ("chosen", "rejected"):
            if not has(record, name):
                raise without_fields(record, name, _EXAMPLE)
        chosen, rejected = said_of(record, "chosen"), said_of(record, "rejected")
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise UsageError(
                f"{record.name}: of `chosen` and `rejected` one is a text and one is messages",
                hint=f"write both alike: {_EXAMPLE}",
            )
        is_response = isinstance(chosen, str) or _are_answers(chosen, rejected)
        prompt = _prompt(record) if is_response else None
        if prompt is None:
            unit = _whole(rendering, record, chosen, rejected)
        else:
            if not isinstance(prompt, str):
                chosen, rejected = spoken("assistant", chosen), spoken("assistant", rejected)
            unit = Unit(
                tuple(rendering.answered(record, prompt, said) for said in (chosen, rejected))
            )
        refuse_unread(record)
        yield unit

    return render


def _are_answers(*conversations: Said) -> bool:
    return all(
        not isinstance(said, str) and said[0]["role"] == "assistant" for said in conversations
    )


def _prompt(record: DataRecord) -> Said | None:
    """What both answer: a prompt, or a conversation so far."""
    prompt = prompt_of(record)
    if prompt is None and (name := first_of(record, "messages", "conversations")):
        return with_system(record, messages_of(record, name))
    return prompt


def _whole(rendering: Rendering, record: DataRecord, chosen: Said, rejected: Said) -> Unit:
    """A pair of two whole texts or conversations."""
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        chosen, rejected = with_system(record, chosen), with_system(record, rejected)
        shared = _common(chosen, rejected)
        if shared in (0, len(chosen), len(rejected)):
            raise UsageError(
                f"{record.name}: `chosen` and `rejected` have no message in common before one that "
                "differs",
                hint=f"give the prompt: {_EXAMPLE}",
            )
        return Unit(
            tuple(
                rendering.answered(record, said[:shared], said[shared:])
                for said in (chosen, rejected)
            )
        )
    documents = [
        rendering.document(record, [(str(said), True)], starts=True, ends=True)
        for said in (chosen, rejected)
    ]
    # Tokens that both begin with have the same log-probabilities in both: they decide nothing.
    shared = _common(documents[0].ids_L.tolist(), documents[1].ids_L.tolist())
    return Unit(tuple(_untrained_until(document, shared) for document in documents))


def _common(one: "list[int] | tuple[object, ...]", other: "list[int] | tuple[object, ...]") -> int:
    """How many values two sequences begin with alike."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def _untrained_until(document: TokenDocument, end: int) -> TokenDocument:
    return document._replace(trained_L=np.arange(len(document.ids_L)) >= end)
