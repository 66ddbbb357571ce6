"""Secrets: what looks like a token, a key or a password is hidden.

It is hidden where an exception's text is kept or printed, and in reports. Exceptions and logs are
written by anybody's code: what is kept of them has a bound, too.
"""

import re

import msgspec

from highwater.spec.codec import from_builtins, to_builtins
from highwater.spec.study import Study
from highwater.spec.trial import Failure, RankReport, TrialResult

HIDDEN = "[hidden]"
KEPT = 4_000
"""Characters of an exception's text that a study keeps.

Three quarters are from its beginning, the rest from its end.
"""
LOGGED = 32_000
"""Characters of such a text in a log, where a traceback stands before it."""
_REASON = 1_000
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


def without_secrets(text: str) -> str:
    """The text with what looks like a secret hidden; what nobody would recognise stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


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


def kept_result(result: TrialResult) -> TrialResult:
    """A trial's result as it is told and recorded, whatever its processes wrote."""
    return msgspec.structs.replace(
        result,
        reason=kept(result.reason, most=_REASON),
        ranks=tuple(kept_report(rank) for rank in result.ranks),
    )


def kept_report(report: RankReport) -> RankReport:
    """A rank's report as it is kept: secrets in its texts are hidden, long ones cut."""
    failure = report.failure
    if failure is None:
        return report
    hint = None if failure.hint is None else kept(failure.hint)
    said: Failure = msgspec.structs.replace(failure, text=kept(failure.text), hint=hint)
    return msgspec.structs.replace(report, failure=said)


def study_without_secrets(study: Study) -> Study:
    """The study without what looks like a secret in reasons, failures, commands and paths.

    What names a trial has no room for secrets.
    """
    return from_builtins(_hidden(to_builtins(study)), Study)


def _hidden(value: object) -> object:
    match value:
        case str():
            return without_secrets(value)
        case dict():
            # Data is named as module:function, which has to stay one.
            return {key: v if key == "data" else _hidden(v) for key, v in value.items()}
        case list() | tuple():
            return [_hidden(inner) for inner in value]
        case _:
            return value
