"""Conversations as text, by a tokenizer's chat template, and which of it the assistant says.

Its turns are where the template says so (``{% generation %}``). Where it does not, they are found
by proof: what stands before a turn is the conversation so far with the template's own beginning of
an answer, a beginning of the whole; and its end is where the conversation up to it ends.
"""

import re
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from highwater.errors import UsageError

Message = Mapping[str, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BY_THE_TEMPLATE = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises on a conversation that it is not for."""
LIMIT_S = 30.0
"""Seconds of the processor's time in which a template has to write one conversation."""
_STAND_IN = "HIGHWATER0STANDS0IN"
"""Stands in the place of a turn's content, to see what the template puts after it."""


class Conversation(NamedTuple):
    """Messages, and what else a template may want to know."""

    messages: tuple[Message, ...]
    name: str
    """The record's, for messages to the user."""
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = {}
    """Variables of the template: ``chat_template_kwargs``."""

    def until(self, count: int) -> "Conversation":
        """Its first messages."""
        return self._replace(messages=self.messages[:count])


class Turns(NamedTuple):
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Where the assistant speaks, from and to characters of the text, in order."""


class ChatTemplate:
    """Renders conversations by the template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the tokenizer's template; it is compiled once, by transformers."""
        self._tokenizer = tokenizer

    @property
    def writes_the_date(self) -> bool:
        """Whether what it writes depends on the day."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    def text(self, conversation: Conversation, *, prompts: bool = False) -> str:
        """The conversation, with ``prompts`` up to where the assistant begins to answer.

        Raises UsageError, with the record's name, where the template refuses it.
        """
        return self._rendered(conversation, prompts=prompts)[0]

    def turns(self, conversation: Conversation, *, first: int = 0) -> Turns:
        """The text, and which of it are the assistant's turns, from message ``first`` on.

        Raises UsageError where they cannot be found exactly.
        """
        if _GENERATION.search(self._template(conversation)):
            text, spans = self._rendered(conversation, marked=True)
            begin = len(self.prompt_of(conversation, first, text)) if first else 0
            return Turns(text, tuple((max(a, begin), b) for a, b in spans if b > begin))
        text = self.text(conversation)
        return Turns(
            text,
            tuple(
                self._span(conversation, number, text)
                for number, message in enumerate(conversation.messages)
                if number >= first and message["role"] == "assistant"
            ),
        )

    def prompt_of(
        self, conversation: Conversation, count: int, text: str, *, hint: str | None = None
    ) -> str:
        """What the assistant has read when it answers the first ``count`` messages: proven to be
        the beginning of the whole conversation's text.

        Raises UsageError, with ``hint``, where it is not.
        """
        prompt = self.text(conversation.until(count), prompts=True)
        if not text.startswith(prompt):
            raise _not_found(
                conversation,
                count,
                "what the template writes before it is not what it writes there",
                hint,
            )
        return prompt

    def _span(self, conversation: Conversation, number: int, text: str) -> tuple[int, int]:
        """From where to where message ``number`` stands in the whole text."""
        start = len(self.prompt_of(conversation, number, text))
        if number + 1 == len(conversation.messages):
            return start, len(text)
        until = self.text(conversation.until(number + 1))
        end = len(until) if text.startswith(until) else self._end(conversation, number, text)
        if end < start:
            raise _not_found(conversation, number, "it ends before it begins")
        return start, end

    def _end(self, conversation: Conversation, number: int, text: str) -> int:
        """Where a turn ends that the template writes otherwise once it is not the last, as those do
        that leave out what was thought.

        With a word in the place of its content, what follows the word in the whole conversation is
        an end of the real one's text, and begins with what follows it where the turn is the last.
        """
        messages = list(conversation.messages)
        if not isinstance(messages[number].get("content"), str):
            raise _not_found(conversation, number, "its content is no text")
        messages[number] = {**messages[number], "content": _STAND_IN}
        marked = conversation._replace(messages=tuple(messages))
        _, found, rest = self.text(marked).partition(_STAND_IN)
        _, found_last, ending = self.text(marked.until(number + 1)).partition(_STAND_IN)
        is_proven = (
            found
            and found_last
            and _STAND_IN not in rest + ending + text
            and text.endswith(rest)
            and rest.startswith(ending)
        )
        if not is_proven:
            raise _not_found(conversation, number, "the template writes it otherwise further on")
        return len(text) - len(rest) + len(ending)

    def _template(self, conversation: Conversation) -> str:
        return str(self._tokenizer.get_chat_template(None, list(conversation.tools) or None))

    def _rendered(
        self, conversation: Conversation, *, prompts: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            with _limited(conversation.name):
                texts, spans = cast(Any, render_jinja_template)(
                    conversations=[[_without_none(message) for message in conversation.messages]],
                    tools=list(conversation.tools) or None,
                    chat_template=self._template(conversation),
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompts,
                    **{**self._tokenizer.special_tokens_map, **conversation.options},
                )
        except _BY_THE_TEMPLATE as error:
            raise UsageError(
                f"{conversation.name}: the chat template refuses the conversation: "
                f"{str(error) or type(error).__name__}",
                hint="a conversation that it takes has a user's message first, then the "
                "assistant's, in turn, each a `role` and a `content`",
            ) from error
        return texts[0], spans[0] if marked else []


class _LateError(BaseException):
    """A template's time is up; no Exception, which jinja2 takes for a refusal of its own to compute
    a constant.
    """


@contextmanager
def _limited(name: str) -> Generator[None]:
    """Run the block in at most ``LIMIT_S`` of this process's time, however busy the machine is.

    Raises UsageError, with the record's name.
    """

    def end(*_: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    except _LateError:
        raise UsageError(
            f"{name}: the chat template has not written the conversation in {LIMIT_S:g} s",
            hint="see whether it has a loop without an end: it is `chat_template.jinja`, or "
            "`chat_template` in `tokenizer_config.json`, of the tokenizer's folder",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _without_none(message: Message) -> dict[str, Any]:
    """The message as a template wants it: what a table has to have, and a record has not, is None
    in it.
    """
    return {name: value for name, value in message.items() if value is not None}


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
