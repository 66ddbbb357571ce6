"""The log of a foreign trainer as lines: who wrote each, and what it says without its decoration.

Terminal colours go, a progress bar that overwrites itself becomes a line for each state, and what
launchers and loggers put before a line (host, rank, process, time) goes: what names a process
becomes the name of the line's stream.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_LINE_END = re.compile(r"\r\n|[\n\r]")
_HOOK = r"\[(?P<hook>rank\d{1,5})\]: ?"
"""Before each line of an exception that nobody caught, by torch.distributed's own hook."""
OF_ANOTHER_TIME = (
    r"(?i:\b(?:(?:re|pre)?load(?:ed|ing)|resum|restore|restoring|checkpoint|best|dry|config"
    r"|estimat|replay|skip|simulat|cached|previous|history|would|planned)\w*)"
)
"""Words that make of a step's line one about another time."""
_PREFIX = re.compile(
    rf"{_HOOK}"
    r"|\[(?P<rank>(?:[A-Za-z_-]{1,20}[ :=]{0,2})?\d{1,5}(?:,\d{1,5})?)\](?:<std(?:out|err)>)?:? ?"
    r"|\((?P<pid>(?:[^()]{0,80} )?pid=\d{1,10}(?:, ip=[\w.:]{1,40})?)\) ?"  # Ray
    r"|\[?(?:(?:\d{4}[-/]\d\d[-/]\d\d|\d\d/\d\d/\d\d(?:\d\d)?|[A-Z][a-z]{2} [ \d]\d)[T ])?"
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?: [-|](?= ))? ?"
    r"|\[(?![^\]]*(?:WARN|ERROR|CRIT|FATAL))"
    rf"(?![^\].]*{OF_ANOTHER_TIME})[A-Za-z][^\[\]]{{0,60}}\]:? ?"
    r"|(?P<host>(?=[\w.-]*\d)(?![\w.-]*(?:Error|Exception|Exit|Interrupt|step|epoch|iter|loss))"
    r"[\w.-]{1,64})(?: *\| |:[ \t])",
)
"""A process's name or a time at the start of a line. A host's name has a digit; any other is known
by the traceback before which it stands."""
TRACEBACK = "Traceback (most recent call last):"
"""What Python writes before the frames of an exception."""
_SOURCE = re.compile(r"\s{2,}[\w/.-]+\.py:\d+$")
"""Where a line was logged, which rich writes at the right edge."""

_NAME = re.compile(
    rf"(?!\S*(?:step|epoch|iter|loss|{OF_ANOTHER_TIME}))[\w.-]{{1,64}}(?: ?[:>|]| -) ",
    re.IGNORECASE,
)
"""A name before a line, which says nothing of its own."""
_BOX = re.compile(r"[╭┌][─ ]*$")
"""The corner of the box that rich draws around a traceback."""

_LONGEST = 8192
"""Characters of a line that are read; the longest that anybody means to be read is shorter."""
_LONGEST_PREFIX, _NEAR = 80, 8
"""Characters of a prefix, and lines after a traceback's first in which it stands again."""


class LogLine(NamedTuple):
    """One line that somebody wrote."""

    stream: str
    """Whose it is, as the launcher names them; empty where nobody says."""
    text: str
    is_uncaught: bool = False
    """Whether torch.distributed's hook wrote it: it is of an exception that ended its rank."""


def log_lines(text: str) -> list[LogLine]:
    """The lines of a log, states of a progress bar among them, in the order they were written."""
    found = [_line(raw[:_LONGEST]) for raw in _LINE_END.split(_ANSI.sub("", text))]
    prefixes = _other_prefixes(found)
    lines: list[LogLine] = []
    for line in found:
        if prefixes is not None and (prefix := prefixes.match(line.text)) is not None:
            own = _line(line.text[prefix.end() :])
            stream = f"{line.stream} {prefix[0].strip()} {own.stream}".rstrip()
            line = LogLine(stream, own.text, line.is_uncaught or own.is_uncaught)
        before, header, after = line.text.partition(TRACEBACK)
        if header and before.strip() and not after.strip():
            # a progress bar leaves no line end before what comes after it
            lines += [line._replace(text=before), line._replace(text=header)]
        else:
            lines.append(line)
    return lines


def _line(raw: str) -> LogLine:
    """A line without the names before it, which are its stream's."""
    names: list[str] = []
    is_uncaught = False
    while (found := _PREFIX.match(raw)) is not None:
        if found.lastgroup is not None:
            names.append(found[found.lastgroup])
        is_uncaught |= found.lastgroup == "hook"
        raw = raw[found.end() :]
    return LogLine(" ".join(dict.fromkeys(names)), _SOURCE.sub("", raw).rstrip(), is_uncaught)


def _other_prefixes(lines: Sequence[LogLine]) -> re.Pattern[str] | None:
    """What stands before a traceback's first line and one after it, whatever the numbers in it, and
    before every line of a log that has a few, the states of a bar aside.
    """
    found: dict[str, None] = {}
    for at, line in enumerate(lines):
        before = _BOX.sub("", line.text.partition(TRACEBACK[:-1])[0])
        if before != line.text and before.strip() and len(before) <= _LONGEST_PREFIX:
            mask = re.sub(r"\d+", r"\\d+", re.escape(before))
            if any(re.match(mask, each.text) for each in lines[at + 1 : at + 1 + _NEAR]):
                found[mask] = None
    texts = [f"{line.text} " for line in lines if line.text and "%|" not in line.text]
    name = _NAME.match(texts[0]) if len(texts) > _NEAR else None
    if name is not None and all(text.startswith(name[0]) for text in texts):
        found[re.escape(name[0].rstrip()) + "(?: |$)"] = None
    return re.compile("|".join(found)) if found else None
