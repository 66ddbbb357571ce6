"""Messages of a conversation, read from a record with field names and roles of any maker (OpenAI,
ShareGPT, Alpaca, LLaMA-Factory, ms-swift).

A message has a ``role`` as in chat templates, its ``content`` as a text, ``tool_calls`` with a
function's name and an object of arguments each, and ``trained`` if the record has a mask for the
message. Its other fields are kept.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from highwater.engine.data.record_fields import DataRecord, is_about

Message = Mapping[str, Any]


class Conversation(NamedTuple):
    """Messages, with the tools and variables that a chat template may use."""

    messages: tuple[Message, ...]
    name: str
    """Name of the record, for errors."""
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = {}
    """Variables of the template: ``chat_template_kwargs``."""

    def changed(self, change: Callable[[Message], Message]) -> "Conversation":
        """Return the conversation with ``change`` applied to each message."""
        return self._replace(messages=tuple(map(change, self.messages)))

    def until(self, count: int) -> "Conversation":
        """Return the conversation with its first ``count`` messages alone."""
        return self._replace(messages=self.messages[:count])


_ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool")),
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
}
"""Roles in data, with the chat templates' role for each; None: the same."""
_CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT and ms-swift whose text is the JSON of a tool call, or of a list of them."""
_MESSAGES_EXAMPLE = '`[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]`'
_CALL_EXAMPLE = '`{"name": "add", "arguments": {"a": 1}}`'
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of the field with a call's arguments: OpenAI's, Llama 3.1's, and two more."""
_QUESTIONS = ("instruction", "question", "query")
"""Fields with a user's question, besides ``prompt``; the text of ``input`` is added to these."""

Said = str | tuple[Message, ...]
"""Prompt or response: a text, or messages."""


def said_of(record: DataRecord, name: str, value: Any = None) -> Said:
    """Return a field, or ``value`` of it, as a text or as messages; UsageError if it is neither."""
    value = record.value(name) if value is None else value
    return value if isinstance(value, str) else messages_of(record, name, value)


def prompt_of(record: DataRecord) -> Said | None:
    """Return a record's prompt: the text of ``prompt`` if the record has no other part of a
    conversation; else messages, with system, history and other questions. None without a prompt.
    """
    name = record.first("prompt") or record.first(*_QUESTIONS, "input")
    if name is None:
        return None
    asked = said_of(record, name)
    if isinstance(asked, str) and name in _QUESTIONS and record.has("input"):
        asked = "\n".join(part for part in (asked, record.text("input")) if part)
    earlier = _history(record) if isinstance(asked, str) and record.has("history") else ()
    messages = with_system(record, (*earlier, *spoken("user", asked)))
    is_text = name == "prompt" and isinstance(asked, str) and len(messages) == 1
    return asked if is_text and not record.fields.get("tools") else messages


def spoken(role: str, said: Said) -> tuple[Message, ...]:
    """Return messages unchanged, and a text as one message of this role."""
    return ({"role": role, "content": said},) if isinstance(said, str) else said


def with_system(record: DataRecord, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages after the record's system text, if any; UsageError for two such texts."""
    name = record.first("system", "system_prompt")
    text = "" if name is None else record.text(name)
    if not text.strip():
        return messages
    if messages[0]["role"] not in ("system", "developer"):
        return *spoken("system", text), *messages
    if messages[0].get("content") != text:
        raise record.refusal(
            f"`{name}` is another text than the {messages[0]['role']}'s message",
            hint="leave one of them out, or write both in the message",
        )
    return messages


def _history(record: DataRecord) -> tuple[Message, ...]:
    """Return the messages of ``history``, given as messages or as pairs of question and answer."""
    turns = record.sequence("history")
    if turns and all(isinstance(turn, Mapping) for turn in turns):
        return messages_of(record, "history")
    for turn in turns:
        is_pair = isinstance(turn, list | tuple) and len(turn) == 2
        if not is_pair or not all(isinstance(text, str) for text in turn):
            raise record.wrong("history", turn, "pairs of texts", '`[["Hi", "Hello"]]`')
    return tuple(
        message
        for asked, answered in turns
        for message in (*spoken("user", asked), *spoken("assistant", answered))
    )


def messages_of(record: DataRecord, name: str, value: Any = None) -> tuple[Message, ...]:
    """Return the messages of a field, or of ``value``: a list of messages, or one message."""
    value = record.value(name) if value is None else value
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise record.wrong(name, value, "a list of messages", _MESSAGES_EXAMPLE)
    return tuple(
        _message(record._replace(name=f"{record.name}: message {number} of `{name}`"), name, each)
        for number, each in enumerate(cast(Sequence[Any], messages), 1)
    )


def conversation_of(record: DataRecord, messages: Sequence[Message]) -> Conversation:
    """Return these messages as a conversation with the record's tools and template variables."""
    options = record.value("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise record.wrong("chat_template_kwargs", options, "variables of a template", "`{}`")
    return Conversation(tuple(messages), record.name, _tools(record), dict(options or {}))


def _message(record: DataRecord, name: str, value: Any) -> Message:
    """Read one message with chat templates' names; ``record.name`` names it in errors."""
    given = dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}
    role_field = "role" if given.get("role") else "from"
    role = str(given.pop(role_field, ""))
    told = role.lower()
    content_field = "value" if given.get("content") is None else "content"
    content = given.pop(content_field, None)
    calls = given.pop("tool_calls", None) or given.pop("function_call", None)
    if not told or (content is None and not calls):
        problem = "messages with a `role` and a `content` each"
        raise record.wrong(name, value, problem, _MESSAGES_EXAMPLE)
    if told not in _ROLES or (role_field, told) == _AMBIGUOUS:
        known = ", ".join(f"`{name}`" for name in _ROLES)
        raise record.wrong(role_field, role, "a role that is known", known)
    message: dict[str, Any] = {"role": _ROLES[told] or told}
    if told in _CALLS and calls:
        raise record.wrong("tool_calls", calls, f"nothing, and `{told}` a call", _CALL_EXAMPLE)
    if told in _CALLS:
        message["tool_calls"] = _calls(record, told, content)
    elif content is not None:
        message["content"] = _content(record, content_field, content)
    if calls:
        message["tool_calls"] = _calls(record, "tool_calls", calls)
    trained = record.mask(given)
    return {**given, **message, **({} if trained is None else {"trained": trained})}


_AMBIGUOUS = ("from", "function")
"""Field and role that some use for a call, others for a call's result, like OpenAI's ``role``."""


def _content(record: DataRecord, name: str, value: Any) -> str:
    """Return a message's content as one text, its parts joined; UsageError for other parts."""
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for part in value if isinstance(value, list | tuple) else [value]:
        beside = dict(part) if isinstance(part, Mapping) else {}
        kind, text = beside.pop("type", None), beside.pop("text", None)
        if kind != "text" or not isinstance(text, str):
            raise record.wrong(name, part, "a text or parts that are texts", _PART_EXAMPLE)
        if record.mask(beside) is False:
            raise record.wrong(name, part, "trained as a whole, or not at all", _PART_EXAMPLE)
        if any(each and not is_about(field, each) for field, each in beside.items()):
            raise record.wrong(name, part, "parts that are texts alone", _PART_EXAMPLE)
        texts.append(text)
    return "".join(texts)


_PART_EXAMPLE = '`[{"type": "text", "text": "Hi"}]`'


def _calls(record: DataRecord, name: str, value: Any) -> list[Mapping[str, Any]]:
    calls = _from_json(record, name, value)
    return [_call(record, name, call) for call in (calls if isinstance(calls, list) else [calls])]


def _call(record: DataRecord, name: str, value: Any) -> Mapping[str, Any]:
    """Read a tool call in chat templates' form; arguments may be JSON text, as OpenAI has them."""
    call = dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}
    fields = ("name", *_ARGUMENTS)
    function = call.pop("function", None) or {
        field: call.pop(field) for field in fields if field in call
    }
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise record.wrong(name, value, "a call of a function by its name", _CALL_EXAMPLE)
    given = [field for field in _ARGUMENTS if field in function]
    if len(given) > 1:
        raise record.wrong(name, value, "a call with its arguments in one field", _CALL_EXAMPLE)
    field = given[0] if given else "arguments"
    stated = function.get(field)
    arguments = {} if stated in (None, "", []) else _from_json(record, field, stated)
    if not isinstance(arguments, Mapping):
        raise record.wrong(field, arguments, "an object", _CALL_EXAMPLE)
    for beside in (call, {each: function[each] for each in function if each not in fields}):
        record.refuse_flags(beside)
    renamed = {"arguments" if each == field else each: function[each] for each in function}
    return {"type": "function", **call, "function": {**renamed, "arguments": arguments}}


def _tools(record: DataRecord) -> tuple[Mapping[str, Any], ...]:
    """Return tools in templates' form; data may have JSON text, or functions without a frame."""
    name = record.first("tools", "functions") or "tools"
    value = record.value(name)
    tools = _from_json(record, name, value) if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise record.wrong(name, tools, "a list of tools", "`[]`")
    return tuple(
        tool
        if "function" in tool
        else {
            "type": "function",
            "function": {key: tool[key] for key in tool if (key, tool[key]) != _FRAME},
        }
        for tool in cast(list[Mapping[str, Any]], tools)
    )


_FRAME = ("type", "function")


def _from_json(record: DataRecord, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise record.wrong(name, value, "JSON", _CALL_EXAMPLE) from error
