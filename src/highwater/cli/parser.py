"""Parser: a grammar whose errors are errors like all others, and whose help ends with examples."""

import argparse
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from highwater.errors import UsageError

_WRONG_VALUE = re.compile(
    r"argument (?P<flag>-\S+): invalid (?:(?P<kind>\w+) value: |choice: )"
    r"(?P<quote>['\"])(?P<value>.*)(?P=quote)(?: \(choose from .*\))?",
    re.DOTALL,
)
"""What argparse says of a flag whose value is not of its type, or not one of its words."""
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with a command that works as the hint."""

    def __init__(
        self,
        *,
        examples: Sequence[str],
        groups: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """``examples``: commands for the end of the help, the first one for hints.
        ``groups``: headings, each with those commands of it that its help lists.
        """
        super().__init__(allow_abbrev=False, **options)
        self.examples = tuple(examples)
        self._groups = groups

    @property
    def example(self) -> str:
        """A command that works."""
        return self.examples[0]

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, in words where a flag's value is wrong."""
        wrong = _WRONG_VALUE.fullmatch(message)
        if wrong is not None:
            raise self._wrong_value(wrong["flag"], wrong["value"], kind=wrong["kind"])
        raise UsageError(
            message, hint=f"for example `{self.example}`; `{self.prog} --help` lists every flag"
        )

    def _wrong_value(self, flag: str, value: str, *, kind: str | None) -> UsageError:
        """``flag`` as argparse names it: ``-o/--output``. ``kind``: the type that it has; None
        where it is one of several words.
        """
        name = flag.rpartition("/")[2]
        if kind is not None:
            what = _KINDS.get(kind, f"a {kind}")
            return UsageError(
                f"{name} takes {what}, and {value!r} is none",
                hint=f"for example `{self.example}`; `{self.prog} --help` lists every flag",
            )
        (action,) = (each for each in self._actions if flag == "/".join(each.option_strings))
        words = [str(each) for each in action.choices or ()]
        near = get_close_matches(value, words, n=1, cutoff=0.5) or words[:1]
        return UsageError(
            f"{name} {value!r} is not one of {', '.join(words)}", hint=f"use `{name} {near[0]}`"
        )

    def flags(self) -> list[str]:
        """Every flag, as its help lists them."""
        return sorted(
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        )

    def arguments(self) -> list[argparse.Action]:
        """Every argument and flag."""
        return list(self._actions)

    def format_help(self) -> str:
        """The help: commands below their headings, flags, examples. No example is folded: it is
        pasted.
        """
        text = super().format_help() if self._groups is None else self._grouped_help(self._groups)
        examples = "".join(f"  {example}\n" for example in self.examples)
        return f"{text}\nexamples:\n{examples}"

    def _grouped_help(self, groups: Mapping[str, Sequence[str]]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for heading, names in groups.items():
            formatter.start_section(heading)
            formatter.add_arguments(self._command(name) for name in names)
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(action for action in self._actions if action.option_strings)
        formatter.end_section()
        formatter.add_text(f"`{self.prog} COMMAND --help` lists the flags of a command.")
        return formatter.format_help()

    def _command(self, name: str) -> argparse.Action:
        """A command as a line of the help."""
        parser = self.commands[name]
        text = (parser.description or "").removeprefix(f"{name}: ")
        return _Line(option_strings=[], dest=name, metavar=name, help=text)

    @property
    def commands(self) -> Mapping[str, "Parser"]:
        """The grammar of each command, by its name."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # as those of subparsers are
                return action.choices
        return {}


class _Line(argparse.Action):
    """A line of a help that is no argument."""

    def __call__(self, *_: object, **__: object) -> None:
        """Nothing is parsed."""


def parse_strictly(
    parser: Parser, words: Sequence[str], *, whole: Parser | None = None
) -> argparse.Namespace:
    """The parsed words; raises UsageError for the first that ``parser`` (a command of ``whole``)
    does not know.
    """
    for word in words:
        if word.startswith("-") and word.endswith("=--"):  # which argparse takes for an empty list
            raise UsageError(
                f"{word.removesuffix('=--')} has no value", hint=f"for example `{parser.example}`"
            )
    arguments, unknown = (whole or parser).parse_known_args(words)
    if unknown:
        raise _unknown(unknown[0], parser)
    return arguments


def _unknown(word: str, parser: Parser) -> UsageError:
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {word!r}", hint=f"for example `{parser.example}`")
    flags = {flag.lstrip("-"): flag for flag in parser.flags()}
    near = get_close_matches(word.partition("=")[0].lstrip("-"), flags, n=1)
    meant = f"did you mean `{flags[near[0]]}`?" if near else None
    hint = meant or f"`{parser.prog} --help` lists every flag"
    return UsageError(f"unknown flag {word}", hint=hint)
