"""Make untrusted text plain: logs, paths and model names may hold terminal escapes.

Lines break at blanks, but neither before a unit nor inside a command in backticks.
"""

import html
import json
import re
import unicodedata

from rich.cells import cell_len

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories a terminal may act upon: controls, invisible ones, surrogates, line ends."""


def plain(text: str) -> str:
    """``text`` on one line, with escapes for every character that a terminal would act upon."""
    for character in _unsafe(text):
        text = text.replace(character, character.encode("unicode_escape").decode("ascii"))
    return text


def plain_lines(text: str) -> str:
    """Escape each line of ``text`` by ``plain``; line ends stay."""
    return "\n".join(plain(line) for line in text.split("\n"))


def plain_json(text: str) -> str:
    """JSON with the same values, without characters that a terminal would act upon."""
    for character in _unsafe(text) - {"\n"}:
        text = text.replace(character, _escaped_in_json(character))
    return text


def _unsafe(text: str) -> set[str]:
    return {character for character in {*text} if unicodedata.category(character) in _UNSAFE}


def ascii_json(text: str) -> str:
    """The JSON document in ASCII alone, with the same values."""
    return "".join(
        character if character.isascii() else _escaped_in_json(character) for character in text
    )


def _escaped_in_json(character: str) -> str:
    return json.dumps(character)[1:-1]  # outside the basic plane: a pair of surrogates


INDENT = "  "
"""Indent of a line that continues the line above."""
_PIECE = re.compile(
    r"(?:\+ )?(?:`[^`]*`|\S)+"
    r"(?:(?<=\d) (?:[KMGT]iB|ms|s|%|GPUs?|tokens?)(?!\w)\S*|(?<=\d[hm]) \d\d[ms](?!\w)\S*)?"
)
"""Text kept on one line: a word, a figure with unit, a time, code, a plus and its addend."""
_BREAKS_AFTER = "/_-=,;:.&?"
"""Characters after which a word longer than a line is broken, if possible."""


def pieces(text: str) -> list[str]:
    """Split text into parts that stay on one line: words, figures with their unit, commands."""
    return _PIECE.findall(text)


def folded(text: str, width: int) -> list[str]:
    """Fold text into lines of at most ``width`` columns."""
    lines, end = [""], 0
    for piece in _PIECE.finditer(text):
        gap = text[end : piece.start()]
        end = piece.end()
        if cell_len(lines[-1] + gap + piece[0]) <= width:
            lines[-1] += gap + piece[0]
        elif "`" in piece[0] or cell_len(piece[0]) <= width:
            lines.append(piece[0])
        else:
            lines += _broken(piece[0], width)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def hanging(text: str, width: int) -> list[str]:
    """Fold text, with every line but the first indented."""
    text = text.strip()
    first, *more = folded(text, width)
    if not more:
        return [first]
    rest = text.removeprefix(first).lstrip()
    return [first, *(INDENT + line for line in folded(rest, max(1, width - len(INDENT))))]


def _broken(word: str, width: int) -> list[str]:
    """Break a word that is longer than a line into parts."""
    parts: list[str] = []
    while cell_len(word) > width:
        longest = _fitting(word, width)
        ends = [
            at for at in range(longest // 2 + 1, longest + 1) if not _is_within_a_figure(word, at)
        ]
        at = max(
            (end for end in ends if word[end - 1] in _BREAKS_AFTER),
            default=max(ends, default=longest),
        )
        parts.append(word[:at])
        word = word[at:]
    return [*parts, word]


def _fitting(word: str, width: int) -> int:
    """Number of leading characters of a word that fit ``width`` columns, at least one."""
    taken = 0
    for at, character in enumerate(word):
        taken += cell_len(character)
        if taken > width:
            return max(1, at)
    return len(word)


def _is_within_a_figure(word: str, at: int) -> bool:
    before, after = word[at - 1], word[at]
    return (after.isdigit() and (before.isdigit() or before in ",.")) or (
        before.isdigit() and after in ",."
    )


_SPECIAL = re.compile(r"[|*`\[\]\\~$]|^#|^[-+](?=\s)|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def escaped(text: str) -> str:
    """Escape text from outside for a Markdown paragraph, heading or table."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", html.escape(plain(text), quote=False))


def fenced(text: str, language: str = "text") -> str:
    """Fence text of several lines for Markdown, by a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{plain_lines(text)}\n{fence}"
