"""Messages of a conversation, and which of their texts a chat template has to write."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from highwater.engine.data.unread_fields import is_about, is_label

Message = Mapping[str, Any]
_UNSPOKEN = ("role", "trained")
"""Fields of a message that a template need not write, beside those about it."""


class Conversation(NamedTuple):
    """Messages, and what else a template may want to know."""

    messages: tuple[Message, ...]
    name: str
    """The record's, for messages to the user."""
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = {}
    """Variables of the template: ``chat_template_kwargs``."""

    def changed(self, change: Callable[[Message], Message]) -> "Conversation":
        """The conversation with each message changed."""
        return self._replace(messages=tuple(map(change, self.messages)))

    def until(self, count: int) -> "Conversation":
        """Its first messages."""
        return self._replace(messages=self.messages[:count])


def with_system_for_developer(message: Message) -> Message:
    """The message, a developer's as the system's."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def ways(conversation: Conversation) -> Iterator[Conversation]:
    """The conversation as templates may want it: arguments of tools as an object or as text of
    JSON, and a message that calls tools without content, with an empty one, or with null.
    """
    yield conversation
    if any(message.get("tool_calls") for message in conversation.messages):
        for as_text in (False, True):
            for content in ({}, {"content": ""}, {"content": None}):
                yield conversation.changed(partial(_with_calls, content=content, as_text=as_text))


def _with_calls(message: Message, *, content: Message, as_text: bool) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if as_text:
        calls = [
            {**call, "function": {**call["function"], "arguments": as_json(arguments)}}
            for call, arguments in zip(calls, arguments_of(message), strict=True)
        ]
    given = {name: value for name, value in message.items() if name != "content" or value}
    return {**content, **given, "tool_calls": calls}


def arguments_of(message: Message) -> list[Any]:
    """The arguments of each tool that a message calls."""
    return [call["function"]["arguments"] for call in message.get("tool_calls", ())]


def mark_of(number: int) -> str:
    """What is put after the text of this number, to see whether a template writes it."""
    return f"HIGHWATER0MARKS{number}HERE"


def marked(conversation: Conversation, only: int | None = None) -> Conversation:
    """The conversation with a mark after each text, or after one."""
    numbers = count()

    def change(_: str, text: str) -> str:
        number = next(numbers)
        return text + mark_of(number) if only in (None, number) else text

    return conversation.changed(lambda message: _with_texts(message, change))


def texts(conversation: Conversation) -> list[tuple[int, str, str]]:
    """The texts that a template has to write: of which message, of which field, and each itself."""
    found: list[tuple[int, str, str]] = []
    for number, message in enumerate(conversation.messages):

        def keep(field: str, text: str, number: int = number) -> str:
            found.append((number, field, text))
            return text

        _with_texts(message, keep)
    return found


def _with_texts(message: Message, change: Callable[[str, str], str]) -> Message:
    """The message with each text that a template has to write changed, by its field and itself."""

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
        new = {**others(function, *new), **new}
        return {**others(call, "type", "function"), "function": new}

    names = ["name"] if is_label(message.get("name")) else []
    new = others(message, *_UNSPOKEN, *names, "tool_calls")
    if "tool_calls" in message:
        new = {**new, "tool_calls": [called(call) for call in message["tool_calls"]]}
    return new


def as_written(field: str, text: str) -> Iterator[str]:
    """How a template may write a text, without space: as it is, or as JSON, but no JSON twice."""
    for form in (text, as_json(text)[1:-1], json.dumps(text)[1:-1]):
        yield "".join(form.split())
        if field == "arguments":
            return


def as_json(value: Any) -> str:
    """A value as JSON, as ``tojson`` of chat templates writes it."""
    return json.dumps(value, ensure_ascii=False)
