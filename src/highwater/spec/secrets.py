"""Secrets: what looks like a token, a key or a password is hidden.

It is hidden in commands, where an exception's text is kept or printed, and in reports. Exceptions
and logs are written by anybody's code: what is kept of them has a bound, too.
"""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

HIDDEN = "[hidden]"
KEPT = 4_000
"""Characters of an exception's text that a study keeps.

Three quarters are from its beginning, the rest from its end.
"""
LOGGED = 32_000
"""Characters of such a text in a log, where a traceback stands before it."""
REASON = 1_000
"""Characters of a line that says why."""
_MARK = 40
_LONGEST_SECRET = 1_000
"""Characters past a cut that are looked at: half of a secret is one."""

_NAME = (
    r"[\w-]{0,40}(?:token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:api|access|private|secret)[_-]?key|authorization)"
)
_HIDING = r"(?:secret|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key)"
"""Names of nothing but secrets: whatever stands after them is one."""
_NO_VALUE = r"(?![\"']?(?:none|null|true|false)\b)"
_VALUE = r"(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&}]+)"
_PATTERNS = (
    re.compile(rf"(?i)({_HIDING}[\"']?[ \t]*[:=][ \t]*){_NO_VALUE}{_VALUE}"),
    # "token": abc, but not `1 token: use 2`
    re.compile(
        rf"(?im)(token[\"']?[ \t]*:[ \t]*){_NO_VALUE}(?![\"']?[<\[]|\d+\b){_VALUE}(?=[,;}}]|\s*$)"
    ),
    re.compile(rf"(?i)(--{_NAME}[ \t]+)(?!-|[\d.,]+(?:\s|$)){_VALUE}"),  # --hf-token ...
    re.compile(rf"(?i)({_NAME}[\"']?\s*=\s*[\"']?)(?![\d.,]+\b)[^\s\"',;&]{{6,}}"),  # HF_TOKEN=...
    # "api_key": "...", of prose nothing
    re.compile(rf"(?i)({_NAME}[\"']?\s*:\s*[\"']?)(?=[a-z_.+/=-]*\d)[\w.+/=-]{{12,}}"),
    # --password 1234; and of a list of words, ['--password', '1234']
    re.compile(rf"(?i)(--?[\w.-]{{0,40}}{_HIDING}[ \t]+)(?!-){_NO_VALUE}{_VALUE}"),
    re.compile(rf"(?i)([\"']--?{_NAME}[\"'],[ \t]*)(?:\"[^\"\n]*\"|'[^'\n]*')"),
    re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+)[^\s\"',;&]+"),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"),
    re.compile(
        r"(\b[a-z][a-z0-9+.-]{0,40}://[^\s/:@]*:)[^\s/@]+(?=@)"
    ),  # https://user:password@host
    re.compile(
        r"()\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{8,}|sk-[\w-]{16,})"
    ),
    re.compile(r"()\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"()\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON web token
)
"""Patterns of secrets; a match keeps its first group alone, the name that goes before."""
_SECRETS = re.compile(
    r"(?:secret|passw(?:or)?d|passphrase|credential|bearer|authorization|auth|.pwd)s?$"
    r"|(?:api|access|private|secret|auth|ssh|wandb|account|storage|signing|encryption|license)keys?$"
    r"|token$"
)
"""Ends of names of secrets, of letters alone."""
_VOCABULARY = re.compile(
    r"(?:pad|eos|bos|eot|eod|unk|sep|cls|mask|image|img|video|audio|special|start|begin|end|stop"
    r"|think|tool|assistant|placeholder|ignore|first|last|next|new|max|min|per)token$"
)
"""Ends of names of tokens that a model knows."""
_FLAG = re.compile(r"--?[\w.-]+")
_ASSIGNED = re.compile(r"[\w.+-]+(?==)")
_PLACEHOLDER = re.compile(r"\{\w+\}")


def without_secrets(text: str) -> str:
    """The text with what looks like a secret hidden; what nobody would recognise stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def hidden_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command with the values of secrets hidden, by the names that go before them:
    ``--api-key x``, ``--token=x``, ``HF_TOKEN=x``, also in a word that is a command itself.
    """
    return tuple(_hidden_word(word, before) for before, word in pairwise(("", *words)))


def _hidden_word(word: str, before: str) -> str:
    is_value = not word.startswith("-") and not _PLACEHOLDER.fullmatch(word)
    if is_value and _FLAG.fullmatch(before) and _is_secret(before):
        return HIDDEN
    with suppress(ValueError):
        parts = shlex.split(word)
        if len(parts) > 1 and (hidden := hidden_words(parts)) != tuple(parts):
            return shlex.join(hidden)
    if len(word.split()) == 1:
        for name in _ASSIGNED.finditer(word):
            if _is_secret(name[0]) and not _PLACEHOLDER.fullmatch(word[name.end() + 1 :]):
                return f"{word[: name.end()]}={HIDDEN}"
    return without_secrets(word)


def _is_secret(name: str) -> bool:
    """Whether a flag or a variable has this name for a secret, however its words are joined."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return bool(_SECRETS.search(letters)) and not _VOCABULARY.search(letters)


def kept(text: str, *, most: int = KEPT) -> str:
    """The beginning and the end of an exception's text, without what looks like a secret.

    A text of at most ``most`` characters is kept whole.
    """
    if len(text) <= most:
        return without_secrets(text)
    head, tail = most * 3 // 4 - _MARK, most // 4 - _MARK  # no longer than what is kept as it is
    start = without_secrets(text[: head + _LONGEST_SECRET])[:head]
    end = without_secrets(text[-tail - _LONGEST_SECRET :])[-tail:]
    return f"{start} [... {len(text) - most:,} characters are left out ...] {end}"
