"""Secrets: what looks like a token, a key or a password is hidden before a report is made. Logs are written by anybody's code."""

import re

from highwater.spec.codec import from_builtins, to_builtins
from highwater.spec.study import Study

HIDDEN = "[hidden]"

_NAME = r"[\w-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|private|secret)[_-]?key|authorization)"
_HIDING = r"(?:secret|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key)"
"""Names of nothing else: whatever stands after them is one."""
_NO_VALUE = r"(?![\"']?(?:none|null|true|false)\b)"
_VALUE = r"(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&}]+)"
_PATTERNS = (
    re.compile(rf"(?i)({_HIDING}[\"']?[ \t]*[:=][ \t]*){_NO_VALUE}{_VALUE}"),
    re.compile(rf"(?im)(token[\"']?[ \t]*:[ \t]*){_NO_VALUE}(?![\"']?[<\[]|\d+\b){_VALUE}(?=[,;}}]|\s*$)"),  # not `1 token: use 2`
    re.compile(rf"(?i)(--{_NAME}[ \t]+)(?!-|[\d.,]+(?:\s|$)){_VALUE}"),  # --hf-token ...
    re.compile(rf"(?i)({_NAME}[\"']?\s*=\s*[\"']?)(?![\d.,]+\b)[^\s\"',;&]{{6,}}"),  # HF_TOKEN=...
    re.compile(rf"(?i)({_NAME}[\"']?\s*:\s*[\"']?)(?=[a-z_.+/=-]*\d)[\w.+/=-]{{12,}}"),  # "api_key": "...", of prose nothing
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"),  # https://user:password@host
    re.compile(r"()\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{8,}|sk-[\w-]{16,})"),
    re.compile(r"()\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"()\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON web token
)
"""What is kept of a match is its first group: the name that goes before."""


def without_secrets(text: str) -> str:
    """The text with what looks like a secret hidden; what nobody would recognise stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def study_without_secrets(study: Study) -> Study:
    """The same of every text of a study: reasons, failures, commands and paths. What names a trial has no room for secrets."""
    return from_builtins(_hidden(to_builtins(study)), Study)


def _hidden(value: object) -> object:
    match value:
        case str():
            return without_secrets(value)
        case dict():
            return {key: inner if key == "data" else _hidden(inner) for key, inner in value.items()}  # module:function stays one
        case list() | tuple():
            return [_hidden(inner) for inner in value]
        case _:
            return value
