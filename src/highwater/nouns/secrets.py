"""Hide secrets: text that looks like a token, a key or a password.

Secrets are hidden in commands, in recorded or printed exceptions, and in reports. Any code may
write exceptions and logs: the text that is kept of them is limited in size, too.
"""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

HIDDEN = "[hidden]"
KEPT = 4_000
"""Characters of an exception's text that a study keeps, a quarter of them from its end."""
LOGGED = 32_000
"""Characters of such a text in a log, where a traceback stands before it."""
REASON = 1_000
"""Most characters of a line that says why."""
_MARK = 40
_LONGEST_SECRET = 1_000
"""Characters past a cut that are searched, too: half of a secret is one."""

_NAME = (
    r"[\w-]{0,40}(?:token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:api|access|private|secret|session)[_-]?key|authorization)"
)
_HIDING = r"(?:secret|passw(?:or)?d|passphrase|(?:api|access|private|session)[_-]?key)"
"""Names that only secrets have: whatever stands after them is hidden."""
_SHORT = r"(?:(?<![a-z])(?:pass|pwd|pat|cookie))"
"""Names that mean a secret only as a flag or a variable."""
_NO_VALUE = r"(?![\"']?(?:none|null|true|false)\b)"
_VALUE = r"(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&}]+)"
_WORDS = rf"{_VALUE}(?:[ \t]+(?!-)[^\s\"'`,;&}})\]]+)*"
"""A value and the words after it up to the next flag: they may have been printed without quotes."""
_LOGIN = re.compile(
    r"(?i)((?<![\w-])(?:-u|--(?:[\w-]{0,40}-)?(?:user|login))(?:[ \t=]+|[\"'],[ \t]*[\"']))"
    r"(?!\d+:\d)[^\s:/\"']+:(?!/)[^\s\"']+"
)
"""A user with a password, as curl takes them; ``1000:1000`` are ids."""
_PATTERNS = (
    re.compile(rf"(?i)({_HIDING}[\"']?[ \t]*[:=][ \t]*){_NO_VALUE}{_VALUE}"),
    # "token": abc, but not `1 token: use 2`
    re.compile(
        rf"(?im)(token[\"']?[ \t]*:[ \t]*){_NO_VALUE}(?![\"']?[<\[]|\d+\b){_VALUE}(?=[,;}}]|\s*$)"
    ),
    re.compile(rf"(?i)(--{_NAME}[ \t]+)(?!-|[\d.,]+(?:\s|$)){_VALUE}"),  # --hf-token ...
    re.compile(rf"(?i)({_NAME}[\"']?\s*=\s*[\"']?)(?![\d.,]+\b)[^\s\"',;&]{{6,}}"),  # HF_TOKEN=...
    # "api_key": "...", but no prose
    re.compile(rf"(?i)({_NAME}[\"']?\s*:\s*[\"']?)(?=[a-z_.+/=-]*\d)[\w.+/=-]{{12,}}"),
    # --password 1234; and of a list of words, ['--password', '1234']
    re.compile(
        rf"(?i)((?<![\w-])--?[\w.-]{{0,40}}(?:{_HIDING}|{_SHORT})(?:[ \t]+|=))"
        rf"(?!--[a-z]){_NO_VALUE}{_WORDS}"
    ),
    re.compile(rf"(\b(?:[A-Z]{{1,20}}_){{1,4}}(?:PASS|PWD|PAT|COOKIE)=){_VALUE}"),
    re.compile(r"(?i)(\bcookie[\"']?:[ \t]*)[^\s\"'][^\"'\n]*"),
    _LOGIN,
    re.compile(
        rf"(?i)([\"']--?(?:{_NAME}|[\w.-]{{0,40}}{_SHORT})[\"'],[ \t]*)(?:\"[^\"\n]*\"|'[^'\n]*')"
    ),
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
    r"(?:secret|passw(?:or)?d|passphrase|passcode|credential|bearer|authorization|auth|cookie)s?$"
    r"|(?:api|access|private|secret|session|auth|ssh|wandb|account|storage|signing|encryption"
    r"|license)keys?$|token$|pass$|pwd$|(?<![a-z])pat$"
)
"""Ends of names of secrets, in lower case, with words joined or as they are."""
_VOCABULARY = re.compile(
    r"(?:pad|eos|bos|eot|eod|unk|sep|cls|mask|image|img|video|audio|special|start|begin|end|stop"
    r"|think|tool|assistant|placeholder|ignore|first|last|next|new|max|min|per)token$"
    r"|(?:forward|backward|first|second|last|one|two|single|multi|per|by|com|high|low|band)pass$"
)
"""Ends of names of a model's tokens, and of passes over data, which are no secrets."""
_FLAG = re.compile(r"--?[\w.-]+")
_LONG_FLAG = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
_ASSIGNED = re.compile(r"[\w.+-]+(?==)")
_PLACEHOLDER = re.compile(r"\{\w+\}")


def without_secrets(text: str) -> str:
    """The text with recognised secrets hidden; a secret of unknown form stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def hidden_words(words: Iterable[str]) -> tuple[str, ...]:
    """A command's words with the values of secret flags hidden: ``--api-key x``."""
    return tuple(_hidden_word(word, before) for before, word in pairwise(("", *words)))


def _hidden_word(word: str, before: str) -> str:
    if _is_value(word, before) or _LOGIN.match(f"{before} {word}"):
        return HIDDEN
    for name in _ASSIGNED.finditer(word.split(maxsplit=1)[0] if word.strip() else ""):
        value = word[name.end() + 1 :]
        # `HF_TOKEN=x train {length}` is a command, `--password='two words'` has a value to its end
        is_command = not word.startswith("-") and _PLACEHOLDER.search(value) and " " in value
        if _is_secret(name[0]) and not (is_command or _PLACEHOLDER.fullmatch(value)):
            return f"{word[: name.end()]}={HIDDEN}"
    with suppress(ValueError):
        parts = shlex.split(word)
        if len(parts) > 1 and _is_value(parts[1], parts[0]):  # a flag and all of its value
            at = next((at for at, each in enumerate(parts) if at and _ends_value(each)), len(parts))
            return shlex.join((parts[0], HIDDEN, *hidden_words(parts[at:])))
        if len(parts) > 1 and (hidden := hidden_words(parts)) != tuple(parts):
            return shlex.join(hidden)
    return without_secrets(word)


def _is_value(word: str, before: str) -> bool:
    """True if ``word`` is the value of the secret flag ``before``."""
    return bool(_FLAG.fullmatch(before)) and _is_secret(before) and not _ends_value(word)


def _ends_value(word: str) -> bool:
    return bool(_LONG_FLAG.fullmatch(word) or _PLACEHOLDER.fullmatch(word))


def _is_secret(name: str) -> bool:
    """True if a flag or variable of this name holds a secret, however its words are joined."""
    if name in ("PWD", "OLDPWD"):  # a shell's directories
        return False
    letters = re.sub(r"[^a-z]", "", name.lower())
    return not _VOCABULARY.search(letters) and any(
        _SECRETS.search(each) for each in (letters, name.lower())
    )


def kept(text: str, *, most: int = KEPT) -> str:
    """Start and end of an exception's text, all of it if below ``most``, without secrets."""
    if len(text) <= most:
        return without_secrets(text)
    head, tail = most * 3 // 4 - _MARK, most // 4 - _MARK  # no longer than what is kept as it is
    start = without_secrets(text[: head + _LONGEST_SECRET])[:head]
    end = without_secrets(text[-tail - _LONGEST_SECRET :])[-tail:]
    return f"{start} [... {len(text) - most:,} characters are left out ...] {end}"
