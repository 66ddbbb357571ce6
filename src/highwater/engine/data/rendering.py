"""Rendering: what a record is, as documents of token ids, and which of the tokens are trained; in
several processes where data is large, with the same documents in the same order.

A unit is what a step has all of or nothing: of supervised data a document, of preferences a pair,
the chosen document first, of rollouts all that answer one prompt.

Shapes:  L tokens of a document
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.conversations import ChatTemplate
from highwater.engine.data.data_files import DataFile, DataRecord
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
from highwater.engine.data.record_fields import (
    first_of,
    has,
    ids_of,
    labels_of,
    refuse_unread,
    text_of,
    value_of,
)
from highwater.engine.data.text_tokens import TextTokens, encode_parts
from highwater.errors import HighwaterError, UsageError
from highwater.nouns.corpus import TrainedTokens
from highwater.units import MIB


class TokenDocument(NamedTuple):
    """One sequence of tokens."""

    ids_L: NDArray[np.int64]
    trained_L: NDArray[np.bool_]
    reward: float = 0.0
    logprobs_L: NDArray[np.float32] | None = None
    """When the tokens were sampled; NaN where they were not."""
    is_apart: bool = False
    """Whether its prompt and its response were tokenised each by itself."""
    is_chat: bool = False
    """Whether a chat template made its text."""


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
            raise UsageError(
                f"{record.name}: {self.tokens.name} gives the id {int(ids_L.max())}, and the model "
                f"knows the ids 0 to {self.vocab_size - 1}",
                hint="save the model's own into its folder, with `tokenizer.save_pretrained`",
            )
        return TokenDocument(ids_L, trained_L, is_apart=encoded.is_apart, is_chat=not starts)

    def answered(self, record: DataRecord, prompt: Said, response: Said) -> TokenDocument:
        """A prompt and a response to it, which alone is trained.

        Texts follow each other as they are. Messages are a conversation; a text that answers one
        follows the template's beginning of an answer, as it was sampled.
        """
        if isinstance(response, str):
            is_text = isinstance(prompt, str)
            parts = [(self._prompt_text(record, prompt), False), (response, True)]
            return self.document(record, parts, starts=is_text, ends=True)
        prompt = spoken("user", prompt)
        if any("trained" in message for message in response):
            raise UsageError(
                f"{record.name}: a response of which messages say whether they are trained, and "
                "all of it is",
                hint="leave `weight`, `train`, `training`, `loss` and `masked` out",
            )
        conversation = self.conversation(record, (*prompt, *response))
        text = self.chat(record).text(conversation)
        begin = len(self.chat(record).prompt_of(conversation, len(prompt), text, hint=_AS_TEXTS))
        parts = [(text[:begin], False), (text[begin:], True)]
        return self.document(record, parts, starts=False, ends=False)

    def conversation(self, record: DataRecord, messages: Sequence[Message]) -> Conversation:
        """Messages with what the record has beside them, all of which the template writes."""
        return self.chat(record).fitted(conversation_of(record, messages))

    def prompt_ids(self, record: DataRecord, prompt: Said) -> NDArray[np.int64]:
        """The tokens that a policy is given to answer a prompt."""
        text, is_text = self._prompt_text(record, prompt), isinstance(prompt, str)
        return self.document(record, [(text, False)], starts=is_text, ends=False).ids_L

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
            fields = " and ".join(f"`{name}`" for name in record.fields if name in record.read)
            raise UsageError(
                f"{record.name}: {fields} would be a conversation, and {lacking}",
                hint="save one that has one into the model's folder, with "
                "`tokenizer.save_pretrained`, or write texts: "
                '`{"prompt": "Hi", "completion": "Yes"}`',
            )
        return self.tokens.chat


def supervised(rendering: Rendering, *, trained: TrainedTokens) -> Render:
    """Render supervised records: ids, conversations, prompts with a response, or texts; the first
    of these that a record has.
    """
    everything = trained == "all"

    def render(record: DataRecord) -> Iterator[Unit]:
        response = first_of(record, *_RESPONSES)
        if has(record, "input_ids"):
            document = _raw(rendering, record, everything)
        elif name := first_of(record, "messages", "conversations"):
            messages = with_system(record, messages_of(record, name))
            document = _conversation(rendering, record, messages, 0, everything)
        elif response and (prompt := prompt_of(record)) is not None:
            document = _completion(rendering, record, prompt, response, everything)
        elif has(record, "text"):
            parts = [(text_of(record, "text"), True)]
            document = rendering.document(record, parts, starts=True, ends=bool(parts[0][0]))
        else:
            raise without_fields(record, "text", SUPERVISED_EXAMPLE)
        refuse_unread(record)
        yield Unit((document,))

    return render


_RESPONSES = ("completion", "response", "output", "answer")
SUPERVISED_EXAMPLE = (
    '`{"text": "..."}`, `{"messages": [...]}` or `{"prompt": "...", "completion": "..."}`'
)


def without_fields(record: DataRecord, missing: str, example: str) -> UsageError:
    """A record lacks what it would be trained as."""
    nulls = {name: "" if has(record, name) else " (which is null)" for name in record.fields}
    names = ", ".join(f"{name}{null}" for name, null in nulls.items())
    return UsageError(
        f"{record.name}: no `{missing}` among its fields: {names or 'none'}",
        hint=f"a record is {example}",
    )


def _raw(rendering: Rendering, record: DataRecord, everything: bool) -> TokenDocument:
    """A document of ids: all trained where there are no labels."""
    ids = value_of(record, "input_ids")
    ids_L = ids_of(record, "input_ids", ids, vocab_size=rendering.vocab_size)
    if value_of(record, "labels") is None or everything:
        return TokenDocument(ids_L, np.ones(len(ids_L), dtype=bool))
    return TokenDocument(ids_L, labels_of(record, ids_L))


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
        raise UsageError(
            f"{record.name}: `{name}` has no message of the assistant",
            hint='give one: `[{"role": "assistant", "content": "Yes"}]`',
        )
    # Answers in the history are trained, as LLaMA-Factory does.
    first = 0 if has(record, "history") else len(prompt)
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
    turns = rendering.chat(record).turns(conversation, first=first, everything=everything)
    borders = [0, *(at for span in turns.spans for at in span), len(turns.text)]
    parts = [
        (turns.text[start:end], number % 2 == 1)
        for number, (start, end) in enumerate(pairwise(borders))
        if end > start
    ]
    return rendering.document(record, parts, starts=False, ends=False)


_CHUNK = 32
"""Records that go to a process at a time."""
_WAITING = 3
"""Chunks for each process that are read ahead."""
_MOST_PROCESSES = 32
_WORTH_BYTES = 16 * MIB
"""Data from which on more processes than this one are worth their start."""

_render: Render | None = None
"""What a process of the pool renders with: it is forked with it."""


class PlacedRecord(NamedTuple):
    """A record of one of the files."""

    file: int
    record: DataRecord


class _Refused(NamedTuple):
    """An error on its way to another process, which knows how to make it again."""

    kind: type[HighwaterError]
    problem: str
    hint: str


def processes_for(files: Sequence[DataFile]) -> int:
    """Processes that render these files: this one alone where they are small."""
    size = sum(path.stat().st_size for file in files for path in file.parts)
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) if size > _WORTH_BYTES else 1


def rendered(
    records: Iterable[PlacedRecord], render: Render, *, processes: int
) -> Iterator[tuple[PlacedRecord, list[Unit]]]:
    """Each record with the units that it is, in the order of the records.

    Raises UsageError for the first record that is refused.
    """
    if processes == 1:
        yield from ((placed, list(render(placed.record))) for placed in records)
        return
    global _render
    _render = render
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from _through(pool, iter(records), processes * _WAITING)


def _through(
    pool: ProcessPoolExecutor, records: Iterator[PlacedRecord], most: int
) -> Iterator[tuple[PlacedRecord, list[Unit]]]:
    waiting: deque[tuple[list[PlacedRecord], Future[list[list[Unit] | _Refused]]]] = deque()
    unread: HighwaterError | None = None
    is_read = False
    while waiting or not is_read:
        while not is_read and len(waiting) < most:
            chunk: list[PlacedRecord] = []
            try:
                chunk.extend(islice(records, _CHUNK))
            except HighwaterError as error:  # what was read before it comes first
                unread = error
            is_read = len(chunk) < _CHUNK
            if chunk:
                waiting.append((chunk, pool.submit(_rendered, [each.record for each in chunk])))
        if waiting:
            chunk, future = waiting.popleft()
            for placed, units in zip(chunk, future.result(), strict=False):
                if isinstance(units, _Refused):
                    for _, other in waiting:
                        other.cancel()
                    raise units.kind(units.problem, hint=units.hint)
                yield placed, units
    if unread is not None:
        raise unread


def _rendered(records: list[DataRecord]) -> list[list[Unit] | _Refused]:
    """The units of each record, up to the first that is refused."""
    assert _render is not None
    found: list[list[Unit] | _Refused] = []
    for record in records:
        try:
            found.append(list(_render(record)))
        except HighwaterError as error:
            return [*found, _Refused(type(error), error.problem, error.hint)]
    return found
