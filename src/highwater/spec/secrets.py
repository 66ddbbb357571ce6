"""Secrets: what looks like a token, a key or a password is hidden where an exception's text is kept or printed, and in reports.

Exceptions and logs are written by anybody's code: what is kept of them has a bound, too.
"""

import re

import msgspec

from highwater.spec.codec import from_builtins, to_builtins
from highwater.spec.study import Study
from highwater.spec.trial import Failure, RankReport, TrialResult

HIDDEN = "[hidden]"
KEPT = 4_000
"""Characters of an exception's text that a study keeps: three quarters from its beginning, the rest from its end."""
LOGGED = 32_000
"""The same of what goes into a log, where a traceback stands before the text."""
_REASON = 1_000
"""Of a line that says why."""
_MARK = 40
_LONGEST_SECRET = 1_000
"""Characters past a cut that are looked at: half of a secret is one."""

_NAME = r"[\w-]{0,40}(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|private|secret)[_-]?key|authorization)"
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
    re.compile(r"(\b[a-z][a-z0-9+.-]{0,40}://[^\s/:@]*:)[^\s/@]+(?=@)"),  # https://user:password@host
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


def kept(text: str, *, most: int = KEPT) -> str:
    """As much of an exception's text as is kept, without what looks like a secret: its beginning, and its end."""
    if len(text) <= most:
        return without_secrets(text)
    head, tail = most * 3 // 4 - _MARK, most // 4 - _MARK  # no longer than what is kept as it is
    start = without_secrets(text[: head + _LONGEST_SECRET])[:head]
    end = without_secrets(text[-tail - _LONGEST_SECRET :])[-tail:]
    return f"{start} [... {len(text) - most:,} characters are left out ...] {end}"


def kept_result(result: TrialResult) -> TrialResult:
    """A trial's result as it is told and recorded, whatever its processes wrote."""
    return msgspec.structs.replace(
        result, reason=kept(result.reason, most=_REASON), ranks=tuple(kept_report(rank) for rank in result.ranks)
    )


def kept_report(report: RankReport) -> RankReport:
    """The same of one rank's report."""
    failure = report.failure
    if failure is None:
        return report
    hint = None if failure.hint is None else kept(failure.hint)
    said: Failure = msgspec.structs.replace(failure, text=kept(failure.text), hint=hint)
    return msgspec.structs.replace(report, failure=said)


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
