"""Plain text from untrusted text: logs, paths and model names are data, to a terminal too."""

import json
import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that a terminal may act upon.

They are controls, invisible formatting, surrogates and line separators.
"""


def plain(text: str) -> str:
    """``text`` on one line, every character that a terminal would act upon shown as its escape."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSAFE else character
        for character in text
    )


def plain_lines(text: str) -> str:
    """``text`` as ``plain`` shows it, line by line: line ends stay."""
    return "\n".join(plain(line) for line in text.split("\n"))


def plain_json(text: str) -> str:
    """A JSON document, indented or not, without characters that a terminal would act upon.

    It stays JSON, and has the same values when it is read.
    """
    return "".join(
        _escaped_in_json(character)
        if character != "\n" and unicodedata.category(character) in _UNSAFE
        else character
        for character in text
    )


def ascii_json(text: str) -> str:
    """A JSON document in ASCII alone, with the same values."""
    return "".join(
        character if character.isascii() else _escaped_in_json(character) for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _escaped_in_json(character: str) -> str:
    return json.dumps(character)[1:-1]  # past the basic plane: a pair of surrogates
