"""Parser: a grammar whose errors are errors like all others."""

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from highwater.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with a command that works as the hint."""

    def __init__(self, *, example: str, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.example = example

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(
            message, hint=f"for example `{self.example}`; `{self.prog} --help` lists every flag"
        )

    def flags(self) -> list[str]:
        """Every flag, as its help lists them."""
        return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", self.format_help())))


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
    near = get_close_matches(word.partition("=")[0], parser.flags(), n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"`{parser.prog} --help` lists every flag"
    return UsageError(f"unknown flag {word}", hint=hint)
