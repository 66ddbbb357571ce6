"""Rendering: what a record is, as documents of token ids, and which of the tokens are trained; in
several processes where data is large, with the same documents in the same order.

A unit is what a step has all of or nothing: of supervised data a document, of preferences a pair,
the chosen document first, of rollouts all that answer one prompt.

Shapes:  L tokens of a document
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from highwater.engine.data.conversations import ChatTemplate
from highwater.engine.data.data_files import DataFile
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
from highwater.errors import HighwaterError, UsageError
from highwater.units import MIB


class TokenDocument(NamedTuple):
    """One sequence of tokens."""

    ids_L: NDArray[np.int64]
    trained_L: NDArray[np.bool_]
    reward: float = 0.0
    logprobs_L: NDArray[np.float32] | None = None
    """When the tokens were sampled; NaN where they were not."""
    is_apart: bool = False
    """True if its prompt and its response were tokenised each by itself."""
    is_chat: bool = False
    """True if a chat template made its text."""


class Unit(NamedTuple):
    """Documents that one step has all of, or none."""

    documents: tuple[TokenDocument, ...]
    group: str | int | None = None
    """The name of the group that they are a part of; None: they are a unit alone."""


_AS_TEXTS = "write the prompt and what answers it as texts, in the place of messages"
Render = Callable[[DataRecord], Iterator[Unit]]


class Rendering:
    """Makes documents of what records have, with one tokenizer."""

    def __init__(self, tokens: TextTokens, *, vocab_size: int) -> None:
        """``vocab_size``: ids that the model knows are below it."""
        self.tokens, self.vocab_size = tokens, vocab_size

    def document(
        self, record: DataRecord, parts: Sequence[tuple[str, bool]], *, starts: bool, ends: bool
    ) -> TokenDocument:
        """The tokens of a text in parts, each trained or not; with the tokenizer's own beginning,
        and with an end-of-text token unless it ends in one.
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
        """A prompt and a response to it, which alone is trained.

        Texts follow each other as they are. Messages are a conversation; a text that answers one
        follows the template's beginning of an answer, as it was sampled.
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
        """Messages with what the record has beside them, all of which the template writes."""
        return self.chat(record).fitted(conversation_of(record, messages))

    def ids(self, record: DataRecord, name: str, given: Any = None) -> NDArray[np.int64]:
        """A field that has token ids, or those ``given`` for it."""
        value = record.value(name) if given is None else given
        return record.ids(name, value, vocab_size=self.vocab_size)

    def prompt_ids(self, record: DataRecord, prompt: Said) -> NDArray[np.int64]:
        """The tokens that a policy is given to answer a prompt."""
        parts = [(self._prompt_text(record, prompt), False)]
        return self.document(record, parts, starts=isinstance(prompt, str), ends=False).ids_L

    def _prompt_text(self, record: DataRecord, prompt: Said) -> str:
        """A text as it is; messages up to the template's beginning of an answer."""
        if isinstance(prompt, str):
            return prompt
        return self.chat(record).text(self.conversation(record, prompt), prompts=True)

    def chat(self, record: DataRecord) -> ChatTemplate:
        """The tokenizer's chat template. Raises UsageError where it has none."""
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
    """Render a supervised record: ids, a conversation, a prompt with a response, or a text; the
    first of these that it has. ``everything``: prompts are trained too.
    """
    response = record.first("completion", "response", "output", "answer")
    if record.has("input_ids"):
        ids_L = rendering.ids(record, "input_ids")
        is_whole = record.value("labels") is None or everything
        trained_L = np.ones(len(ids_L), dtype=bool) if is_whole else record.labels(ids_L)
        document = TokenDocument(ids_L, trained_L)
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
    """The refusal of a record that lacks what it would be trained as."""
    nulls = {name: "" if record.has(name) else " (which is null)" for name in record.fields}
    names = ", ".join(f"{name}{null}" for name, null in nulls.items())
    problem = f"no `{missing}` among its fields: {names or 'none'}"
    return record.refusal(problem, hint=f"a record is {example}")


def _completion(
    rendering: Rendering, record: DataRecord, prompt: Said, name: str, everything: bool
) -> TokenDocument:
    """A prompt with the response in field ``name``: two texts, or a conversation."""
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
    """A conversation; trained are the assistant's turns from message ``first`` on."""
    conversation = rendering.conversation(record, messages)
    parts = rendering.chat(record).turns(conversation, first=first, everything=everything)
    return rendering.document(record, parts, starts=False, ends=False)


_CHUNK = 32
"""Records that go to a process at a time."""
_WAITING = 3
"""Chunks for each process that are read ahead."""
_MOST_PROCESSES = 32
_WORTH_BYTES = 16 * MIB
"""Data from which on more processes than this one are worth their start."""


def processes_for(files: Sequence[DataFile]) -> int:
    """Processes that render these files: this one alone where they are small."""
    size = sum(path.stat().st_size for file in files for path in file.parts)
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) if size > _WORTH_BYTES else 1


def rendered(
    records: Iterable[DataRecord], render: Render, *, processes: int
) -> Iterator[tuple[DataRecord, list[Unit]]]:
    """Each record with the units that it is, in the order of the records.

    Raises UsageError for the first record that is refused.
    """
    if processes == 1:
        yield from ((record, list(render(record))) for record in records)
        return
    waiting: deque[DataRecord] = deque()

    def read() -> Iterator[DataRecord | HighwaterError]:
        try:
            for record in records:
                waiting.append(record)
                yield record
        except HighwaterError as error:  # what was read before it comes first
            yield error

    loader = DataLoader[Any](
        cast(Any, _Rendered(render)),
        batch_size=_CHUNK,
        sampler=cast(Any, read()),
        num_workers=processes,
        prefetch_factor=_WAITING,
        collate_fn=list,
        multiprocessing_context="fork",
    )
    for units in chain.from_iterable(loader):
        if isinstance(units, HighwaterError):
            raise units
        yield waiting.popleft(), units


class _Rendered(NamedTuple):
    """The dataset of a loader, whose indices are the records themselves."""

    render: Render

    def __getitems__(
        self, records: Sequence[DataRecord | HighwaterError]
    ) -> list[list[Unit] | HighwaterError]:
        """The units of each record, up to the first that is refused."""
        found: list[list[Unit] | HighwaterError] = []
        for record in records:
            try:
                if isinstance(record, HighwaterError):
                    raise record
                found.append(list(self.render(record)))
            except HighwaterError as error:
                return [*found, error]
        return found
