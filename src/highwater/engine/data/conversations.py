"""Conversations as text, by a tokenizer's chat template, and which parts of it are the assistant's.

The template may mark the assistant's turns (``{% generation %}``). Without marks, turns are found
by rendering: a turn begins at the end of the conversation before it, rendered with the generation
prompt, if that text is a prefix of the whole text; and it ends at the end of the conversation up to
it, rendered alone.

A template that leaves out a part of a conversation is refused: the error names message and field.
"""

import json
import re
import resource
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, cast

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from highwater.engine.data.messages import Conversation, Message
from highwater.engine.data.record_fields import is_about, is_label
from highwater.errors import UsageError
from highwater.units import MIB, format_bytes

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BY_THE_TEMPLATE = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template may raise on a conversation that it does not support."""
LIMIT_S = 30.0
"""Seconds of processor time that a template may take for all texts of one record."""
_MOST_CHARACTERS, _MOST_TIMES = 4 * MIB, 16
"""A template may write so many characters, plus so many times the characters that it is given."""
_ROOM_BYTES = 512 * MIB
"""Memory that a template may take besides four bytes for each character that it may write."""
_ENDLESS = (
    "see whether it has a loop without an end: it is `chat_template.jinja`, or `chat_template` in "
    "`tokenizer_config.json`, of the tokenizer's folder"
)
_WRITES_IT = "train with a tokenizer whose chat template does, or leave it out of the record"
_STAND_IN = "HIGHWATER0STANDS0IN"
"""Replaces a turn's content, to see what the template writes after it."""


class _UnwrittenError(UsageError):
    """The template does not write all texts of a conversation."""


class ChatTemplate:
    """Renders conversations by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Store the tokenizer; transformers compiles its template once."""
        self._tokenizer = tokenizer
        self._record, self._left_s = "", LIMIT_S

    @property
    def writes_the_date(self) -> bool:
        """True if the template calls ``strftime_now``, so that its text depends on the day."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    def text(self, conversation: Conversation, *, prompts: bool = False) -> str:
        """Render the conversation as text; with ``prompts`` the generation prompt follows.

        Raises UsageError, with the record's name, if the template refuses the conversation.
        """
        return self._rendered(conversation, prompts=prompts)[0]

    def fitted(self, conversation: Conversation) -> Conversation:
        """Return the conversation in the first form (of ``_ways``) that this template writes whole.

        Raises UsageError, with the message and the field, if the template writes no form whole.
        """
        if "developer" not in self._template(conversation):
            conversation = conversation.changed(
                lambda each: {**each, "role": "system"} if each["role"] == "developer" else each
            )
        refused: list[UsageError] = []
        for way in _ways(conversation):
            try:
                self._refuse_unwritten(way)
            except UsageError as error:
                if not isinstance(error, _UnwrittenError) and error.__cause__ is None:
                    raise  # an error that another form of the conversation would not avoid
                refused.append(error)
            else:
                return way
        # An unwritten field tells the user more than an error that the template raised.
        raise next((each for each in refused if isinstance(each, _UnwrittenError)), refused[0])

    def _refuse_unwritten(self, conversation: Conversation) -> None:
        """Raise UsageError for the first text of a message that the template does not write.

        Each text, compared without spaces, must follow the texts of earlier messages; the system's
        may be anywhere. A short text may do so by chance, so a mark added to the text must be
        written too.
        """
        text = self.text(conversation)
        if conversation.tools and text == self.text(conversation._replace(tools=())):
            raise _UnwrittenError(
                f"{conversation.name}: the chat template does not write `tools`", hint=_WRITES_IT
            )
        all_marked = self.text(_marked(conversation))
        written = "".join(text.split())
        ends = [0] * (len(conversation.messages) + 1)
        """Where the texts of each message end in ``written``; first 0, as before any message."""
        for index, (number, field, said) in enumerate(_texts(conversation)):
            is_system = conversation.messages[number]["role"] in ("system", "developer")
            begin = 0 if is_system else max(ends[: number + 1])
            found = [
                at + len(form)
                for form in _as_written(field, said)
                if (at := written.find(form, begin)) >= 0
            ]
            is_marked = found and _mark(index) in all_marked
            if not (is_marked or (found and self._writes(_marked(conversation, index), index))):
                raise self._unwritten(conversation, number, field, index)
            if not is_system:
                ends[number + 1] = max(ends[number + 1], min(found))
        for number, message in enumerate(conversation.messages):
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                printed = str(arguments)
                if isinstance(arguments, Mapping) and _as_json(arguments) != printed in text:
                    raise _UnwrittenError(
                        f"{conversation.name}: the chat template writes arguments in `tool_calls` "
                        f"of message {number + 1} as Python does, and not as JSON",
                        hint=_WRITES_IT,
                    )

    def _unwritten(
        self, conversation: Conversation, number: int, field: str, index: int
    ) -> UsageError:
        hint, role = _WRITES_IT, conversation.messages[number]["role"]
        is_earlier_answer = role == "assistant" and number + 1 < len(conversation.messages)
        alone = _marked(conversation, index).until(number + 1)
        if is_earlier_answer and self._writes(alone, index):
            hint = (
                "write a record for each answer, which ends with it, and leave out what was "
                "thought before earlier ones"
            )
        return _UnwrittenError(
            f"{conversation.name}: the chat template does not write all of `{field}` of message "
            f"{number + 1}, of the {role}",
            hint=hint,
        )

    def _writes(self, marked: Conversation, index: int) -> bool:
        return _mark(index) in self.text(marked)

    def turns(
        self, conversation: Conversation, *, first: int = 0, everything: bool = False
    ) -> list[tuple[str, bool]]:
        """Return the text in parts, each with True if it is trained: the assistant's turns from
        message ``first`` on, or ``everything``; except messages marked as not trained.

        Raises UsageError if the turns cannot be found exactly.
        """
        text = self.text(conversation)
        is_marked = _GENERATION.search(self._template(conversation)) is not None
        trained, untrained = [], []
        for number, message in enumerate(conversation.messages):
            is_answer = message["role"] == "assistant"
            if not message.get("trained", True):
                if everything or is_answer:
                    untrained.append(self._span(conversation, number, text))
            elif "trained" in message and not (everything or is_answer):
                raise UsageError(
                    f"{conversation.name}: message {number + 1}, of the {message['role']}, says in "
                    "`weight`, `train`, `training` or `loss` that it is trained, and only "
                    "the assistant's are",
                    hint="leave that out, or train on every token that is not masked, "
                    "`--train-on all`",
                )
            elif is_answer and number >= first and not (everything or is_marked):
                trained.append(self._span(conversation, number, text))
        if everything:
            trained = [(0, len(text))]
        elif is_marked:
            begin = len(self.prompt_of(conversation, first, text)) if first else 0
            _, spans = self._rendered(conversation, spans=True)
            trained = [(max(a, begin), b) for a, b in spans if b > begin]
        spans = _without(trained, untrained)
        borders = [0, *(at for span in spans for at in span), len(text)]
        parts = [text[start:end] for start, end in pairwise(borders)]
        return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]

    def prompt_of(
        self,
        conversation: Conversation,
        count: int,
        text: str,
        *,
        answered: bool = True,
        hint: str | None = None,
    ) -> str:
        """Return the text of the first ``count`` messages, if ``answered`` with the generation
        prompt: checked to be a prefix of ``text``, the whole conversation's.

        Raises UsageError, with ``hint``, if it is not a prefix.
        """
        prompt = self.text(conversation.until(count), prompts=answered)
        if not text.startswith(prompt):
            why = "what the template writes before it is not what it writes there"
            raise _not_found(conversation, count, why, hint)
        return prompt

    def _span(self, conversation: Conversation, number: int, text: str) -> tuple[int, int]:
        """Return the start and the end of message ``number`` in the whole text."""
        is_answer = conversation.messages[number]["role"] == "assistant"
        start = 0
        if is_answer or number:
            start = len(self.prompt_of(conversation, number, text, answered=is_answer))
        if number + 1 == len(conversation.messages):
            return start, len(text)
        until = self.text(conversation.until(number + 1))
        end = len(until) if text.startswith(until) else self._end(conversation, number, text)
        if end < start:
            raise _not_found(conversation, number, "it ends before it begins")
        return start, end

    def _end(self, conversation: Conversation, number: int, text: str) -> int:
        """Return the end of a turn that the template writes differently if other turns follow, as
        templates do that leave out the reasoning of earlier turns.

        Test: with a placeholder as the turn's content, the text after the placeholder is also the
        end of the real text, and begins with the text that follows it if the turn is the last one.
        """
        messages = list(conversation.messages)
        messages[number] = {**messages[number], "content": _STAND_IN}
        stood_in = conversation._replace(messages=tuple(messages))
        _, found, rest = self.text(stood_in).partition(_STAND_IN)
        _, found_last, ending = self.text(stood_in.until(number + 1)).partition(_STAND_IN)
        is_proven = found and found_last and _STAND_IN not in rest + ending + text
        if not (is_proven and text.endswith(rest) and rest.startswith(ending)):
            raise _not_found(conversation, number, "the template writes it otherwise further on")
        return len(text) - len(rest) + len(ending)

    def _template(self, conversation: Conversation) -> str:
        return str(self._tokenizer.get_chat_template(None, list(conversation.tools) or None))

    def _rendered(
        self, conversation: Conversation, *, prompts: bool = False, spans: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        template = self._template(conversation)
        messages = [  # without the field that only we read
            {name: value for name, value in message.items() if name != "trained"}
            for message in conversation.messages
        ]
        given = sum(len(str(each)) for each in (template, *conversation))
        most = _MOST_CHARACTERS + _MOST_TIMES * given
        try:
            with self._limited(conversation.name), _memory_of(_ROOM_BYTES + 4 * most):
                rendered, found = cast(Any, render_jinja_template)(
                    conversations=[messages],
                    tools=list(conversation.tools) or None,
                    chat_template=template,
                    return_assistant_tokens_mask=spans,
                    add_generation_prompt=prompts,
                    **{**self._tokenizer.special_tokens_map, **conversation.options},
                )
            if len(rendered[0]) > most:
                raise MemoryError
        except MemoryError:
            raise UsageError(
                f"{conversation.name}: the chat template makes more than {most:,} characters, or "
                f"takes more than {format_bytes(_ROOM_BYTES + 4 * most)} of memory, for a "
                f"conversation of {given:,} with the template's own",
                hint=_ENDLESS,
            ) from None
        except _BY_THE_TEMPLATE as error:
            raise UsageError(
                f"{conversation.name}: the chat template refuses the conversation: "
                f"{str(error) or type(error).__name__}",
                hint="a conversation that it takes has a user's message first, then the "
                "assistant's, in turn, each a `role` and a `content`",
            ) from error
        return rendered[0], found[0] if spans else []

    @contextmanager
    def _limited(self, record: str) -> Generator[None]:
        """Context manager: end the block once its record took ``LIMIT_S`` of processor time."""
        if record != self._record:
            self._record, self._left_s = record, LIMIT_S

        def end(*_: object) -> None:
            raise _LateError

        before = signal.signal(signal.SIGPROF, end)
        begin_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(self._left_s, 0.001))  # 0 would set no limit
        try:
            yield
        except _LateError:
            raise UsageError(
                f"{record}: the chat template has not written all of the record in {LIMIT_S:g} s "
                "of the processor's time",
                hint=f"{_ENDLESS}; of a conversation of a thousand turns make several",
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            self._left_s -= time.process_time() - begin_s


class _LateError(BaseException):
    """A template ran too long. Not an Exception: jinja2 would take it for the template's error."""


@contextmanager
def _memory_of(most_bytes: int) -> Generator[None]:
    """Context manager: limit the block to ``most_bytes`` more memory; beyond that MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    taken_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    bound = taken_pages * resource.getpagesize() + most_bytes
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bound, *limits, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _without(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ``spans`` that none of ``others`` covers."""
    for start, end in others:
        spans = [
            (a, b)
            for span in spans
            for a, b in ((span[0], min(span[1], start)), (max(span[0], end), span[1]))
            if a < b
        ]
    return spans


def _not_found(
    conversation: Conversation, number: int, why: str, hint: str | None = None
) -> UsageError:
    return UsageError(
        f"{conversation.name}: where message {number + 1} begins and ends in the text cannot be "
        f"proven: {why}",
        hint=hint
        or "train on every token, `--train-on all`, or mark the assistant's turns in the chat "
        "template by `{% generation %}`",
    )


def _ways(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the conversation in forms that templates may need: arguments of tools as an object or
    as JSON text, and messages that call tools without content, with empty content, or null.
    """

    def called(message: Message, as_text: bool, content: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        if as_text:
            functions = [{**each, "arguments": _as_json(each["arguments"])} for each in functions]
        calls = [
            {**call, "function": function}
            for call, function in zip(message["tool_calls"], functions, strict=True)
        ]
        given = {name: value for name, value in message.items() if name != "content" or value}
        return {**content, **given, "tool_calls": calls}

    yield conversation
    if any(message.get("tool_calls") for message in conversation.messages):
        contents: tuple[Message, ...] = ({}, {"content": ""}, {"content": None})
        for as_text, content in product((False, True), contents):
            yield conversation.changed(partial(called, as_text=as_text, content=content))


def _mark(number: int) -> str:
    """Return the mark added to text number ``number`` to test if a template writes the text."""
    return f"HIGHWATER0MARKS{number}HERE"


def _marked(conversation: Conversation, only: int | None = None) -> Conversation:
    """Return the conversation with a mark after each text, or only after the text ``only``."""
    numbers = count()

    def change(_: str, text: str) -> str:
        number = next(numbers)
        return text + _mark(number) if only in (None, number) else text

    return conversation.changed(lambda message: _with_texts(message, change))


def _texts(conversation: Conversation) -> list[tuple[int, str, str]]:
    """Return the texts that a template has to write, as (message's number, field, text)."""
    found: list[tuple[int, str, str]] = []
    for number, message in enumerate(conversation.messages):

        def keep(field: str, text: str, number: int = number) -> str:
            found.append((number, field, text))
            return text

        _with_texts(message, keep)
    return found


def _with_texts(message: Message, change: Callable[[str, str], str]) -> Message:
    """Return the message, each text that a template has to write being ``change(field, text)``."""

    def changed(field: str, value: Any) -> Any:
        if isinstance(value, str):
            return change(field, value) if value.strip() else value
        if isinstance(value, Mapping):
            return {name: changed(field, each) for name, each in value.items()}
        return [changed(field, each) for each in value] if isinstance(value, list) else value

    def others(fields: Message, *unspoken: str) -> Message:
        return {
            field: each if field in unspoken or is_about(field, each) else changed(field, each)
            for field, each in fields.items()
        }

    def called(call: Message) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        field = "arguments" if isinstance(arguments, str) else "tool_calls"
        name = changed("tool_calls", function["name"])
        new = {"name": name, "arguments": changed(field, arguments)}
        return {**others(call, "type", "function"), "function": {**others(function, *new), **new}}

    names = ["name"] if is_label(message.get("name")) else []
    new = others(message, "role", "trained", *names, "tool_calls")
    if "tool_calls" in message:
        new = {**new, "tool_calls": [called(call) for call in message["tool_calls"]]}
    return new


def _as_written(field: str, text: str) -> Iterator[str]:
    """Yield the forms in which a template may write a text, without spaces: plain, or as JSON."""
    for form in (text, _as_json(text)[1:-1], json.dumps(text)[1:-1]):
        yield "".join(form.split())
        if field == "arguments":
            return


def _as_json(value: Any) -> str:
    """Return a value as JSON, like ``tojson`` in chat templates."""
    return json.dumps(value, ensure_ascii=False)
