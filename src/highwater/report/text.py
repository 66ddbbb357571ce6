"""Plain text from untrusted text: logs, paths and model names are data, to a terminal too."""

import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that a terminal may act upon: controls, invisible formatting, surrogates, line separators."""


def plain(text: str) -> str:
    """``text`` on one line, every character that a terminal would act upon shown as its escape."""
    return "".join(_escaped(character) if unicodedata.category(character) in _UNSAFE else character for character in text)


def plain_lines(text: str) -> str:
    """The same for text of several lines: line ends stay."""
    return "\n".join(plain(line) for line in text.split("\n"))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
